"""A process of the demo measures the spans in which it was late, and a computing member is no late member."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from demo import DemoConfig
from demo.brokers.backends import renewal_time
from demo.lateness import TICK, Delay, Lateness, covered
from lanes.clock import monotonic


@pytest.mark.parametrize(
    ("starved", "turn", "spans"),
    [
        (True, (10.0, 10.5, 0.0), [Delay(10.0, 10.5)]),
        # The last part of the span, because the process computed first.
        (True, (10.0, 10.5, 0.25), [Delay(10.25, 10.5)]),
        (True, (10.0, 10.5, 0.5), []),
        (False, (10.0, 10.5, 0.5), [Delay(10.0, 10.5)]),
        (False, (10.0, 10.0625, 0.0), []),
    ],
    ids=["without a processor", "computing for a part", "computing", "computing, with a route", "as good as in time"],
)
def test_a_late_turn_is_a_span(starved: bool, turn: tuple[float, float, float], spans: list[Delay]) -> None:
    lateness = Lateness(starved=starved)
    lateness.note(*turn)
    assert lateness.spans == spans
    assert lateness.take() == spans
    assert lateness.take() == []


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(11.0, 12.0)], 1.0),
        ([(9.0, 21.0)], 10.0),
        ([(8.0, 9.0), (20.5, 21.0)], 0.0),
        ([(14.0, 15.0), (11.0, 12.0)], 2.0),
        ([(11.0, 13.0), (12.0, 14.0), (12.0, 13.0)], 3.0),
        ([(9.0, 11.0), (19.0, 21.0), (20.0, 22.0)], 2.0),
    ],
)
def test_the_covered_seconds_count_each_second_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert covered(spans, 10.0, 20.0) == seconds


def test_a_member_has_half_of_a_lease_for_a_renewal() -> None:
    assert renewal_time(DemoConfig(server="nats://h", broker="jetstream", members=3, lease=4.0)) == 2.0
    assert renewal_time(DemoConfig(server="postgresql://h/x", broker="postgres", members=3, lease=6.0)) == 3.0
    assert renewal_time(DemoConfig(server="h:9092", broker="kafka")) == 5.5


async def measured(block: Callable[[], None], *, starved: bool) -> float:
    """Return the measured seconds of a call that blocks the loop."""
    lateness = Lateness(starved=starved)
    measurement = asyncio.create_task(lateness.measure())
    await asyncio.sleep(0.0)
    block()
    while not lateness.spans and not measurement.done():
        await asyncio.sleep(0.0)
        # The measurement has had its late turn, which records nothing for a computing process.
        if starved and block is compute:
            break
    measurement.cancel()
    return sum(ended - begun for begun, ended in lateness.spans)


def wait() -> None:
    time.sleep(0.5)


def compute() -> None:
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass


def test_a_process_that_waits_is_late() -> None:
    assert asyncio.run(measured(wait, starved=True)) >= 0.5 - 2 * TICK


def test_a_process_that_computes_is_late_only_for_its_route() -> None:
    assert asyncio.run(measured(compute, starved=False)) >= 0.5 - 2 * TICK
    begun, computed = monotonic(), time.process_time()
    late = asyncio.run(measured(compute, starved=True))
    assert late <= monotonic() - begun - (time.process_time() - computed)
