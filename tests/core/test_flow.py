"""The flow of an engine stops, pauses and resumes intake at its marks and times, like a naive flow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.flow import LOOK_EVERY, PAUSE_AFTER, Flow
from lanes.core.types import NEVER, Room

CALLS = st.lists(
    st.tuples(st.sampled_from(["admit", "release", "due", "looked", "paused"]), st.integers(0, 5), st.integers(0, 9)),
    max_size=30,
)


@given(CALLS)
def test_a_flow_stops_at_its_high_mark_and_resumes_at_its_low_mark(calls: list[tuple[str, int, int]]) -> None:
    flow = Flow(10, 20, concurrency=2)
    count = size = peak = peak_size = 0
    taking, pausing, pause_at, look_at = True, False, NEVER, NEVER
    for now, (call, number, length) in enumerate(calls):
        if call == "admit":
            count, size = count + number, size + length
            peak, peak_size = max(peak, count), max(peak_size, size)
            stops = taking and (count >= 10 or size >= 20)
            if stops:
                taking, pause_at, look_at = False, now + PAUSE_AFTER, now + LOOK_EVERY
            assert flow.admit(number, length, now) is stops
        elif call == "release":
            number, length = min(number, count), min(length, size)
            count, size = count - number, size - length
            starts = not taking and count <= 6 and size <= 10
            if starts:
                taking, pausing, pause_at, look_at = True, False, NEVER, NEVER
            assert flow.release(number, length) is starts
        elif call == "due":
            begins = pause_at <= now
            if begins:
                pausing, pause_at = True, NEVER
            assert flow.due(now) is begins
        elif call == "looked" and not taking:
            early = count < 10 and size < 20
            look_at = now + LOOK_EVERY if early or not pausing else NEVER
            assert flow.stopped_early is early
            flow.looked(now)
        elif call == "paused":
            flow.paused = not flow.paused
        assert (flow.in_flight, flow.bytes, flow.peak, flow.peak_bytes) == (count, size, peak, peak_size)
        assert (flow.taking, flow.pausing, flow.pause_at, flow.look_at) == (taking, pausing, pause_at, look_at)
        assert flow.room() == (Room(10 - count, 20 - size) if taking and not flow.paused else Room(0, 0))


def test_a_flow_at_a_bound_looks_for_an_idle_handler_until_its_pause_begins() -> None:
    flow = Flow(2, 20)
    assert flow.admit(2, 0, 0.0)
    flow.looked(1.0)
    assert flow.look_at == 1.0 + LOOK_EVERY
    assert flow.due(PAUSE_AFTER)
    flow.looked(9.0)
    assert flow.look_at == NEVER


def test_a_flow_that_is_at_its_bound_in_bytes_does_not_count_as_stopped_early() -> None:
    flow = Flow(10, 20)
    assert flow.admit(1, 20, 0.0)
    assert not flow.stopped_early
    assert not flow.release(0, 1)
    assert flow.stopped_early


@pytest.mark.parametrize(("concurrency", "low"), [(0, 5), (4, 7), (5, 7)])
def test_the_low_mark_lies_between_the_concurrency_and_the_bound(concurrency: int, low: int) -> None:
    assert Flow(10, 20, concurrency=concurrency).low == low
    assert repr(Flow(10, 20)) == "<Flow 0 of 10 in flight, 0 of 20 bytes>"
