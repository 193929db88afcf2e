"""The frequency of garbage collections during a task."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import lanes
from lanes_spark import run_task
from lanes_spark.task.task import YOUNG_OBJECTS, collecting_seldom
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
    assert seen == {(YOUNG_OBJECTS, 10, 10)}
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_tasks_leaves_the_process_as_it_was() -> None:
    with collecting_seldom():
        with collecting_seldom():
            pass
        assert gc.get_threshold() == (YOUNG_OBJECTS, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (50_000, 5, 5)])
def test_what_the_process_was_set_to_is_kept(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with collecting_seldom():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_a_handler_sets_is_kept() -> None:
    with collecting_seldom():
        gc.set_threshold(9_000, 10, 10)
    assert gc.get_threshold() == (9_000, 10, 10)
