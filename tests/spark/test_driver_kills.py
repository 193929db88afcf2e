"""After kill -9 of the driver, another driver continues with the checkpoint."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.components import PostgresServer
from tests.conftest import Spawn
from tests.spark.killed import COUNT, MIDDLE, Moment, Run, arguments, second_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

KILL_SECONDS = 400.0
_numbers = itertools.count(1)


@pytest.fixture
def run(postgres: PostgresServer, tmp_path: Path) -> Run:
    made = Run(str(tmp_path), postgres.url, f"driver{os.getpid()}x{next(_numbers)}")
    made.make()
    return made


def kill(spawn: Spawn, master: str, moment: Moment, run: Run) -> None:
    process = spawn(*arguments(master, moment, run))
    # Without a wait for the end of its pipes, because surviving executors hold the pipes too.
    status = process.wait(KILL_SECONDS)
    assert status == -signal.SIGKILL, process.communicate()[1]
    assert run.sprung == (moment == "in")


@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_a_replay_continues_after_a_kill_of_its_driver(moment: Moment, spark: Any, run: Run, spawn: Spawn) -> None:
    kill(spawn, "local[2]", moment, run)
    report = run.go(spark)
    # The first batch is not handled again; the second batch starts again from its beginning.
    assert (report.batches, report.finished, report.dead_lettered) == (2, COUNT * 2 // 3, 0)
    repeated, found = run.check(), run.audit(spark)
    again = sum(found.duplicates.values())
    if moment == "before":
        assert repeated == set()
        assert (again, found.unfinished) == (0, 0)
    elif moment == "in":
        assert MIDDLE in repeated
        assert repeated <= second_batch()
        # A worker of a killed driver may complete its journal, which then has all its rows.
        assert again <= len(second_batch())
    else:
        assert repeated == second_batch()
        assert (again, found.duplicates["repeat"], found.unfinished) == (len(repeated), len(repeated), 0)
    assert run.go(spark).batches == 0
