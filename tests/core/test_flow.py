"""The budgets: two transitions a crossing, and room that never promises too much."""

from __future__ import annotations

import pytest

from lanes.core.flow import Flow
from lanes.core.types import Room


def test_taking_stops_at_the_bound_and_resumes_at_half_of_it() -> None:
    flow = Flow(10, 1_000)
    assert [flow.admit(1, 1, 0.0) for _ in range(10)] == [False] * 9 + [True]
    assert not flow.taking
    assert [flow.release(1, 1) for _ in range(6)] == [False] * 4 + [True, False]
    assert flow.taking


def test_taking_resumes_while_the_handlers_still_have_something_to_do() -> None:
    flow = Flow(10, 1_000, concurrency=4)
    assert flow.admit(10, 10, 0.0)
    assert [flow.release(1, 1) for _ in range(4)] == [False, False, True, False]
    # Where all that may be in flight runs, every end of a handler makes room for the next.
    full = Flow(10, 1_000, concurrency=10)
    assert [full.admit(10, 10, 0.0), full.release(1, 1), full.admit(1, 1, 0.0)] == [True, True, True]


def test_bytes_stop_taking_too_and_have_their_own_low_mark() -> None:
    flow = Flow(100, 1_000)
    assert flow.admit(1, 1_000, 0.0)
    flow.admit(2, 0, 0.0)
    assert not flow.release(2, 400)
    assert flow.release(0, 100)


def test_both_budgets_must_be_low_to_resume() -> None:
    flow = Flow(10, 1_000)
    assert flow.admit(10, 1_000, 0.0)
    assert not flow.release(9, 0)
    assert flow.release(0, 500)


def test_a_crossing_has_two_transitions_however_the_count_swings() -> None:
    flow = Flow(10, 1_000)
    flow.admit(10, 10, 0.0)
    changes = 0
    for _ in range(50):
        changes += flow.release(4, 4)
        changes += flow.admit(4, 4, 0.0)
    assert changes == 0
    changes += flow.release(5, 5)
    for _ in range(50):
        changes += flow.admit(4, 4, 0.0)
        changes += flow.release(4, 4)
    assert changes == 1


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_a_small_bound_resumes(bound: int) -> None:
    flow = Flow(bound, 1_000)
    assert flow.admit(bound, 0, 0.0)
    assert flow.release(bound, 0)


def test_room_is_what_is_left_and_nothing_while_not_taking() -> None:
    flow = Flow(10, 1_000)
    assert flow.room() == Room(10, 1_000)
    flow.admit(4, 300, 0.0)
    assert flow.room() == Room(6, 700)
    flow.admit(6, 0, 0.0)
    assert flow.room() == Room(0, 0)
    flow.release(4, 0)
    assert flow.room() == Room(0, 0)
    flow.release(1, 0)
    assert flow.room() == Room(5, 700)


def test_one_batch_may_overshoot_the_bytes_and_the_peak_says_so() -> None:
    flow = Flow(10, 1_000)
    flow.admit(2, 5_000, 0.0)
    flow.release(2, 5_000)
    flow.admit(3, 10, 0.0)
    assert (flow.peak, flow.peak_bytes) == (3, 5_000)
    assert repr(flow) == "<Flow 3 of 10 in flight, 10 of 1000 bytes>"
