"""A task of Spark collects garbage less often, and leaves the process as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import lanes
from lanes.runtime.garbage import YOUNG_OBJECTS
from lanes_spark import run_task
from tests.spark.rows import ONCE, batches, job, rows


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's default thresholds during the test; the former thresholds return after the test."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_collects_garbage_seldom_and_leaves_the_process_as_it_was(fails: bool) -> None:
    seen = set()

    def handler(message: lanes.Message) -> None:
        seen.add(gc.get_threshold())
        if fails:
            raise ValueError("no")

    task = job(handler, settings=ONCE)
    if fails:
        with pytest.raises(lanes.HandlerHalted):
            list(run_task(batches(rows(10)), task))
    else:
        list(run_task(batches(rows(10)), task))
    assert {thresholds[0] for thresholds in seen} == {YOUNG_OBJECTS}
    assert gc.get_threshold() == (700, 10, 10)
