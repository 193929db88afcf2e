"""Tasks that Spark runs twice concurrently, on two hosts, have each effect once and in order."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
from lanes_spark import replay
from tests.components import PostgresServer, wait_until
from tests.components.environment import ROOT
from tests.components.spark_standalone import SparkStandalone
from tests.spark.conftest import need_java, session
from tests.spark.fenced import Fenced
from tests.spark.rows import rows
from tests.spark.tables import noting, write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

COUNT, HOT = 600, b"key-0-0"
RESULTS = pa.schema([("partition", pa.int64()), ("position", pa.int64())])
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.efficiency.enabled": "false",
    "spark.executor.memory": "512m",
}


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Any]:
    """A session with an executor on each of two hosts."""
    need_java()
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    with SparkStandalone(pythonpath=path) as standalone, session(standalone.url, SPECULATION) as found:
        yield found


def test_a_task_that_runs_twice_at_once_has_its_effects_once_and_in_order(
    two_hosts: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    messages = rows(COUNT)
    table = write_table(tmp_path / "table", [messages[start::4][::-1] for start in range(4)])
    # A call with a message of the hot key waits for the other call, so both compete for each of these messages.
    fenced = Fenced(postgres.url, f"twice{os.getpid()}", twins=HOT)
    fenced.make()
    report = replay(
        two_hosts,
        table,
        fenced,
        settings=lanes.Settings(concurrency=4),
        setup=fenced.setup,
        teardown=fenced.teardown,
        results=RESULTS,
        results_to=str(tmp_path / "results"),
        checkpoint=str(tmp_path / "checkpoint"),
        rows_per_batch=COUNT,
        tasks=4,
        effects="fenced",
    )
    assert (report.batches, report.delivered, report.finished) == (2, COUNT, COUNT)
    # The losing attempt continues for a while.
    wait_until(lambda: fenced.connections() == 0, "the last worker to end", seconds=60.0)
    hot = {(one["partition"], one["offset"]) for one in messages if one["key"] == HOT}
    assert hot <= fenced.check(messages)
    processes = defaultdict(set)
    for pid, partition, position, key in fenced.calls():
        if key == HOT:
            processes[partition, position].add(pid)
    assert all(len(pids) == 2 for pids in processes.values())
    stored = pq.read_table(tmp_path / "results")
    assert sorted(zip(stored["partition"].to_pylist(), stored["position"].to_pylist(), strict=True)) == sorted(
        (one["partition"], one["offset"]) for one in messages
    )


def test_a_handler_without_a_fence_is_refused_where_tasks_may_run_twice(two_hosts: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", [rows(6)])
    for effects in ({}, {"effects": "unfenced"}):
        with pytest.raises(lanes.ConfigError, match=r'spark\.speculation=true with effects="unfenced"'):
            replay(two_hosts, table, noting(tmp_path / "journal"), **effects)  # type: ignore[call-overload]
    assert not (tmp_path / "journal").exists()
