"""A member's look at its durables, without a server: what was dropped, and durables that are there no more."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from nats.aio.client import Client

import lanes
from lanes_jetstream.cohort import watch as cohort_watch
from lanes_jetstream.cohort.owned_partition import Backlog
from lanes_jetstream.cohort.watch import CohortWatch
from lanes_jetstream.wire.connection import ApiError, Connection, NoAnswer
from lanes_jetstream.wire.stream import OutOfRange
from tests.cohort.held import taken_over
from tests.jetstream.test_cohort_deliveries import Held

pytestmark = pytest.mark.anyio


class BacklogMachine(RuleBasedStateMachine):
    """A durable that is published to, delivers, is asked and is purged; what it says arrives later, deliveries in
    order, answers in theirs, and each of them when it likes."""

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
        # One with several copies counts its deliveries a little later than what is left, but before it is asked again.
        self.answers.append((self.counted, self.left))
        self.counted = self.delivery

    @precondition(lambda self: self.coming)
    @rule(count=st.integers(1, 3))
    def arrive(self, count: int) -> None:
        # Of several that arrive together the last one is read.
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


def test_what_was_dropped_is_missed_by_the_next_delivery_and_by_the_next_answer() -> None:
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
        # Where the first of them was missed is where the stream has to be looked at.
        assert (backlog.missed, backlog.reached) == (8, 8)


def test_an_answer_that_overtakes_what_it_tells_of_is_the_newer_one() -> None:
    backlog = Backlog()
    backlog.delivered(1, 5, 1)
    backlog.asked(3, 6, 1)  # Two more deliveries are on their way, and three messages have come behind them.
    backlog.delivered(2, 4, 2)
    backlog.delivered(3, 3, 3)
    assert (backlog.missed, backlog.left) == (0, 6)
    backlog.asked(2, 4, 3)
    backlog.delivered(4, 5, 4)
    assert (backlog.missed, backlog.left) == (0, 5)


def test_an_answer_of_copies_that_do_not_know_the_last_deliveries_yet_is_no_loss() -> None:
    backlog = Backlog()
    backlog.delivered(1, 100, 1)
    backlog.asked(1, 80, 1)  # Twenty more are delivered, which it has not counted yet.
    backlog.delivered(21, 80, 21)
    backlog.asked(21, 60, 21)
    backlog.asked(41, 60, 21)
    assert (backlog.missed, backlog.left) == (0, 60)


def test_what_an_answer_of_copies_left_out_may_still_be_on_its_way() -> None:
    backlog = Backlog()
    backlog.asked(0, 2, 0)  # One is delivered, which it has not counted yet; two have come behind that.
    backlog.delivered(1, 0, 1)
    assert (backlog.missed, backlog.left) == (0, 0)


def test_another_durable_begins_anew() -> None:
    backlog = Backlog()
    backlog.delivered(5, 10, 7)
    backlog.begin()
    backlog.asked(0, 3, 7)
    assert (backlog.missed, backlog.left) == (0, 3)


# --- the looks


class Looked:
    """A member that has one partition, and a server that says what the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out_of_range: OutOfRange = "fail") -> None:
        self.held = Held()
        self.held.tell((3, taken_over(7)))
        self.held.partitions.next_events()
        self.owned = self.held.partitions.by_number[3]
        self.asked: list[str] = []
        self.info: dict[str, Any] = {"delivered": {"consumer_seq": 2}, "num_pending": 9}
        self.wrong: dict[str, Exception] = {}
        self.first = 1
        self.config: dict[str, Any] = {}
        self.watch = CohortWatch(
            Connection(Client()),
            "S",
            "test",
            partitions=self.held.partitions,
            out_of_range=out_of_range,
            wake=self.held.side.inbox.wake.set,
        )
        monkeypatch.setattr(self.watch._connection, "api", self.api)

    async def api(self, subject: str) -> dict[str, Any]:
        self.asked.append(subject)
        error = self.wrong.get(subject.partition(".")[0])
        if error is not None:
            raise error
        if subject == "STREAM.INFO.S":
            return {"created": "now", "state": {"first_seq": self.first, "last_seq": 99}, "config": self.config}
        assert subject == "CONSUMER.INFO.S.c-p3-e7-0"
        return self.info

    async def dropped(self, first: int) -> None:
        """Have it look, and then find twice that of nine that were left all are gone."""
        self.owned.backlog.delivered(2, 9, 8)
        self.info = {"delivered": {"consumer_seq": 2}, "num_pending": 0}
        self.first = first
        for _ in range(3):
            await self.watch._check()


async def test_what_was_dropped_from_the_beginning_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Looked(monkeypatch)
    await looked.dropped(10)
    with pytest.raises(
        lanes.SourceError, match=r"'S' begins at sequence 10, so 9 messages of cohort partition 3 were dr"
    ):
        raise looked.watch.failure or AssertionError
    assert looked.held.side.inbox.wake.is_set()


async def test_what_was_dropped_is_found_while_a_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Looked(monkeypatch)
    assert looked.owned.pulls is not None
    looked.owned.backlog.delivered(2, 9, 8)
    # Room has come back between two looks: the server would deliver what is left, and nothing is.
    looked.owned.pulls._outstanding = 1
    await looked.dropped(10)
    assert isinstance(looked.watch.failure, lanes.SourceError)
    assert len([one for one in looked.asked if one.startswith("CONSUMER.INFO")]) == 2


async def test_what_was_dropped_is_gone_on_without_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = Looked(monkeypatch, "earliest")
    await looked.dropped(10)
    await looked.watch._check()
    assert looked.watch.failure is None
    assert caplog.text.count("dropped before they were delivered") == 1


async def test_what_was_deleted_among_others_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = Looked(monkeypatch)
    await looked.dropped(9)
    assert looked.watch.failure is None
    assert "9 messages of cohort partition 3 were deleted before they were delivered" in caplog.text


async def test_a_stream_that_thins_itself_out_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = Looked(monkeypatch)
    looked.config = {"max_msgs_per_subject": 1}
    await looked.dropped(10)
    assert looked.watch.failure is None
    assert caplog.text == ""


async def test_only_a_durable_that_says_nothing_by_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Looked(monkeypatch)
    backlog, pulls = looked.owned.backlog, looked.owned.pulls
    assert pulls is not None
    for delivery in (1, 2, 3):
        backlog.delivered(delivery, 4 - delivery, 8)
        await looked.watch._check()
    assert looked.asked == []
    # It has delivered nothing since, and has nothing to deliver: a request is open.
    backlog.delivered(4, 0, 9)
    pulls._outstanding = 1
    for _ in range(3):
        await looked.watch._check()
    assert looked.asked == []
    pulls._outstanding = 0
    await looked.watch._check()
    assert looked.asked == ["CONSUMER.INFO.S.c-p3-e7-0"]


@pytest.mark.parametrize("who", ["CONSUMER", "STREAM"])
@pytest.mark.parametrize(
    "error",
    [ApiError(10014, "consumer not found", 404), ApiError(10059, "stream not found", 404), NoAnswer("no"), OSError()],
    ids=["consumer", "stream", "silence", "broken"],
)
async def test_a_look_that_is_not_answered_is_one_that_was_not_made(
    monkeypatch: pytest.MonkeyPatch, error: Exception, who: str
) -> None:
    monkeypatch.setattr(cohort_watch, "CHECK_INTERVAL", 0.0)
    looked = Looked(monkeypatch)
    looked.held.side.inbox.wake.clear()
    looked.owned.backlog.delivered(2, 9, 8)
    looked.info = {"delivered": {"consumer_seq": 2}, "num_pending": 0}
    looked.first = 10
    looked.wrong = {who: error}
    looked.watch.start()
    while len([subject for subject in looked.asked if subject.startswith(who)]) < 3:
        await anyio.lowlevel.checkpoint()
    assert [looked.watch.failure] == [None]
    looked.wrong = {}
    await looked.held.side.inbox.wake.wait()
    assert looked.watch.failure is not None
    await looked.watch.stop()


# --- nobody answers for a consumer


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([ApiError(10014, "consumer not found", 404)], "gone"),
        ([NoAnswer("no"), ApiError(10008, "temporarily unavailable", 503)], "takeover"),
        ([ApiError(10023, "insufficient resources", 503), ApiError(10014, "consumer not found", 404)], "gone"),
        ([ApiError(10059, "stream not found", 404)], "takeover"),
        ([lanes.SourceError("the connection is closed")], "takeover"),
    ],
    ids=["gone", "no_leader", "then_gone", "stream", "closed"],
)
async def test_only_a_consumer_that_is_not_found_is_gone(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], told: str
) -> None:
    monkeypatch.setattr(cohort_watch, "_RETRY_DELAY", 0.0)
    looked = Looked(monkeypatch)
    answers = list(errors)

    async def api(subject: str) -> dict[str, Any]:
        assert subject == "CONSUMER.INFO.S.c-p3-e7"
        if answers:
            raise answers.pop(0)
        return {}

    monkeypatch.setattr(looked.watch._connection, "api", api)
    await looked.watch._resolve(looked.owned, "c-p3-e7")
    assert [(what, number) for what, number, _ in looked.held.stub.told] == [(told, 3)]
    assert answers == []
