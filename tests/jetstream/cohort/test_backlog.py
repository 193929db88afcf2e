"""The backlog of a durable is correct for deliveries and answers in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lanes_jetstream.cohort.owned_partition import Backlog


class BacklogMachine(RuleBasedStateMachine):
    """A durable that is published to, delivers, is asked and is purged.

    Its reports arrive later: deliveries in order, answers in their own order, and either at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backlog = Backlog()
        self.left = 0
        self.delivery = 0
        self.counted = 0
        self.published = 0
        self.coming: list[tuple[int, int]] = []
        self.answers: list[tuple[int, int]] = []
        self.dropped = 0

    @rule(count=st.integers(1, 5))
    def publish(self, count: int) -> None:
        self.left += count

    @precondition(lambda self: self.left)
    @rule()
    def deliver(self) -> None:
        self.left -= 1
        self.delivery += 1
        self.coming.append((self.delivery, self.left))

    @precondition(lambda self: self.delivery)
    @rule()
    def deliver_again(self) -> None:
        self.delivery += 1
        self.coming.append((self.delivery, self.left))

    @rule()
    def ask(self) -> None:
        # A durable with several copies counts deliveries later than its backlog, but before the next request.
        self.answers.append((self.counted, self.left))
        self.counted = self.delivery

    @precondition(lambda self: self.coming)
    @rule(count=st.integers(1, 3))
    def arrive(self, count: int) -> None:
        # Of several reports that arrive together, the last one is read.
        taken, self.coming = self.coming[:count], self.coming[count:]
        self.backlog.delivered(*taken[-1], 0)

    @precondition(lambda self: self.answers)
    @rule()
    def answer(self) -> None:
        self.backlog.asked(*self.answers.pop(0), 0)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        gone = data.draw(st.integers(1, self.left))
        self.left -= gone
        self.dropped += gone

    @invariant()
    def nothing_is_missed_that_was_not_dropped(self) -> None:
        assert self.backlog.missed <= self.dropped


TestBacklog = BacklogMachine.TestCase


TestBacklog.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_dropped_messages_are_found_by_the_next_delivery_or_answer() -> None:
    for tell in (Backlog.delivered, Backlog.asked):
        backlog = Backlog()
        backlog.delivered(1, 10, 7)
        backlog.delivered(2, 9, 8)
        assert (backlog.missed, backlog.left) == (0, 9)
        tell(backlog, 3, 4, 20)
        if tell is Backlog.asked:
            assert backlog.missed == 0
            tell(backlog, 3, 4, 20)
        assert (backlog.missed, backlog.reached, backlog.left) == (4, 8, 4)
        for _ in range(2):
            backlog.asked(3, 0, 21)
        # The stream must be checked where the first message is missing.
        assert (backlog.missed, backlog.reached) == (8, 8)


def test_an_answer_may_arrive_before_the_deliveries_that_it_counts() -> None:
    backlog = Backlog()
    backlog.delivered(1, 5, 1)
    backlog.asked(3, 6, 1)  # Two more deliveries are on their way, and three messages were published after them.
    backlog.delivered(2, 4, 2)
    backlog.delivered(3, 3, 3)
    assert (backlog.missed, backlog.left) == (0, 6)
    backlog.asked(2, 4, 3)
    backlog.delivered(4, 5, 4)
    assert (backlog.missed, backlog.left) == (0, 5)


def test_an_answer_from_a_replica_that_lags_is_no_loss() -> None:
    backlog = Backlog()
    backlog.delivered(1, 100, 1)
    backlog.asked(1, 80, 1)  # Twenty more deliveries are not counted yet.
    backlog.delivered(21, 80, 21)
    backlog.asked(21, 60, 21)
    backlog.asked(41, 60, 21)
    assert (backlog.missed, backlog.left) == (0, 60)


def test_a_delivery_missing_from_an_answer_may_still_arrive() -> None:
    backlog = Backlog()
    backlog.asked(0, 2, 0)  # One delivery is not counted yet, and two messages were published after it.
    backlog.delivered(1, 0, 1)
    assert (backlog.missed, backlog.left) == (0, 0)


def test_a_new_durable_resets_the_backlog() -> None:
    backlog = Backlog()
    backlog.delivered(5, 10, 7)
    backlog.begin()
    backlog.asked(0, 3, 7)
    assert (backlog.missed, backlog.left) == (0, 3)
