"""The engine keeps its promises in every order of events, and an exploration that misses a branch fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memsource.explorer import AckWorld, GroupWorld, Scope, invariants, search
from tests.effort import is_full
from tests.memsource.explorer.scopes import ACKS, DAILY, SOAK, keys, nearest_states, violation

NO_DRAIN = Scope(
    messages=keys("AAB"),
    hands_over=False,
    close_prefix=False,
    invariants=frozenset({invariants.clean_rebalance_repeats_nothing}),
)
"""A drain that waits for running handlers, and neither hands over the completed set nor closes the prefix."""


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(300)  # seconds of computing, which take minutes on a busy machine
@pytest.mark.parametrize("name", DAILY)
def test_the_engine_keeps_its_promises_in_every_order_of_events(name: str) -> None:
    scope = DAILY[name]
    exploration = search(GroupWorld(scope), max_states=nearest_states())
    print(f"{name}: {exploration}")
    assert exploration.violation is None, str(exploration.violation)
    if is_full():
        assert exploration.complete
        assert scope.unreached(exploration.reached) == []


def test_an_exploration_that_misses_a_branch_is_noticed() -> None:
    scope = DAILY[next(iter(DAILY))]
    cut_short = search(GroupWorld(scope), max_states=20)
    missing = scope.unreached(cut_short.reached)
    assert missing and set(missing) == scope.expected() - cut_short.reached.keys()
    assert scope.unreached(scope.expected()) == []


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.parametrize("name", ACKS)
def test_individual_acknowledgements_keep_the_promises_too(name: str) -> None:
    scope, redeliveries = ACKS[name]
    exploration = search(AckWorld(scope, redeliveries), max_states=nearest_states())
    print(f"{name}: {exploration}")
    assert exploration.violation is None, str(exploration.violation)
    if not is_full():
        return
    assert exploration.complete
    expected = {"delivered", "delivered again", "held when it came again", "settled when it came again"}
    expected |= {"starts a handler", "ends well", "settles", "acknowledged", "no further event"}
    expected |= {"acknowledgements get lost", "sending fails", "sent, and not known"} if scope.unknown else set()
    expected |= (
        {"lost and assigned again", "redelivered after the loss", "a fenced handler ended"} if scope.faults else set()
    )
    expected |= {"fails", "held for a retry", "time passes"} if scope.failures else set()
    assert expected - exploration.reached.keys() == set()


def test_without_either_form_of_drain_a_clean_rebalance_repeats_finished_work() -> None:
    found = violation(NO_DRAIN)
    assert found is not None
    print(found)
    assert found.invariant == "clean_rebalance_repeats_nothing"
    assert "fault" in found.text
    assert len(found.path) == 18
    # A message that finished before a queued one runs again at the next owner.
    assert found.path[7] == "a: the handler of 3 ends well"
    assert found.path[-1] == "b starts a handler"


@pytest.mark.parametrize("form", ["hands_over", "close_prefix"])
def test_with_either_form_of_drain_a_clean_rebalance_repeats_nothing(form: str) -> None:
    assert violation(replace(NO_DRAIN, **{form: True})) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", SOAK.values(), ids=SOAK)
def test_the_scopes_of_the_soak_begin_without_a_violation(scope: Scope) -> None:
    exploration = search(GroupWorld(scope), max_states=500)
    assert (exploration.violation, exploration.complete) == (None, False)
