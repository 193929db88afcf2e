"""On a cluster of three executors, a replay survives kill -9 of a Python worker, of an executor, and of the driver."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.conftest import Spawn
from tests.spark.killed import COUNT, MIDDLE, Run, second_batch
from tests.spark.test_driver_kills import kill, run

__all__ = ["run"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]


@pytest.mark.parametrize("lost", ["worker", "executor"])
def test_a_killed_process_repeats_messages_but_no_effects(
    lost: Literal["worker", "executor"], cluster: Any, run: Run
) -> None:
    report = run.go(cluster, trap=run.trap(lost))
    assert run.sprung
    assert (report.batches, report.delivered, report.finished, report.dead_lettered) == (3, COUNT, COUNT, 0)
    repeated = run.check()
    assert MIDDLE in repeated
    assert repeated <= second_batch()
    found = run.audit(cluster)
    assert sum(found.duplicates.values()) <= len(second_batch())
    # A worker that survives its executor may complete its journal; a killed worker cannot.
    assert found.unfinished == 1 or lost == "executor"


def test_a_replay_whose_driver_was_killed_goes_on_while_its_executors_still_act(
    cluster: Any, run: Run, spawn: Spawn
) -> None:
    kill(spawn, "local-cluster[3,1,1024]", "in", run)
    report = run.go(cluster)
    assert (report.batches, report.finished) == (2, COUNT * 2 // 3)
    repeated = run.check()
    assert MIDDLE in repeated
    assert repeated <= second_batch()
    assert sum(run.audit(cluster, beside=True).duplicates.values()) <= len(second_batch())
