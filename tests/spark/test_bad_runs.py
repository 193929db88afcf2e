"""A failure of a running replay on a real Spark is a clear error, and nothing is lost or doubled."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
from lanes_postgres import Positions
from lanes_spark import ParquetTable, Progress, replay
from lanes_spark.driver.results_folder import ResultsFolder
from lanes_spark.tables.table import Spans
from tests.components import wait_until
from tests.conftest import PostgresFactory
from tests.spark.fenced import Fenced
from tests.spark.rows import ONCE, SCHEMA, rows
from tests.spark.tables import by_key, noted, noting, positions, write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

COUNT = 450
RESULTS = pa.schema([("partition", pa.int64()), ("position", pa.int64())])
HARMLESS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.sql.files.maxPartitionBytes": "4096",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "1g",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.execution.removeRedundantSorts": "true",
    "spark.sql.execution.sortBeforeRepartition": "false",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.session.timeZone": "America/St_Johns",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.sources.useV1SourceList": "",
    "spark.sql.caseSensitive": "true",
    "spark.sql.parquet.fieldId.read.enabled": "true",
    "spark.sql.parquet.fieldId.read.ignoreMissing": "true",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    "spark.sql.streaming.minBatchesToRetain": "1",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
"""Settings that look as if they could move, merge or drop rows."""


@contextmanager
def settings(spark: Any, changed: dict[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in changed}
    try:
        for name, value in changed.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def scattered(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [messages[start::4][::-1] for start in (2, 0, 3, 1)]


def everything() -> list[tuple[int, int]]:
    return sorted((one["partition"], one["offset"]) for one in rows(COUNT))


def test_each_accepted_setting_of_spark_keeps_the_order_and_loses_nothing(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(rows(COUNT)))
    journal = tmp_path / "journal"
    more: dict[str, Any] = {"results": RESULTS, "results_to": str(tmp_path / "results")}
    more |= {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 600}
    with settings(spark, HARMLESS):
        report = replay(spark, table, noting(journal), **more)
        assert replay(spark, table, noting(journal), **more).batches == 0
        with pytest.raises(lanes.ConfigError, match="results of another checkpoint"):
            replay(spark, table, noting(journal), **{**more, "checkpoint": str(tmp_path / "other")})
    assert positions(noted(journal)) == everything()
    assert pq.read_table(tmp_path / "results").num_rows == COUNT
    assert all(sorted(found) == found for found in by_key(noted(journal)).values())
    assert (report.finished, report.batches) == (COUNT, 2)


def test_two_replays_at_once_on_one_checkpoint_are_refused(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(rows(COUNT)))
    journal, begun, go = tmp_path / "journal", tmp_path / "begun", str(tmp_path / "go")

    def wait(message: Any) -> None:
        import time

        begun.touch()
        while not os.path.exists(go):
            time.sleep(0.01)

    checkpoint = str(tmp_path / "checkpoint")
    ended: list[object] = []

    def first() -> None:
        ended.append(replay(spark, table, noting(journal, wait), checkpoint=checkpoint).finished)

    running = threading.Thread(target=first)
    running.start()
    try:
        wait_until(begun.exists, "the start of the first replay", seconds=300)
        with pytest.raises(lanes.SourceError, match=rf"another replay uses the checkpoint .*process {os.getpid()} on"):
            replay(spark, table, noting(tmp_path / "nothing"), checkpoint=checkpoint)
    finally:
        Path(go).touch()
        running.join()
    assert ended == [COUNT]
    assert positions(noted(journal)) == everything()
    assert not (tmp_path / "nothing").exists()
    # The lock is free again.
    assert replay(spark, table, noting(tmp_path / "nothing"), checkpoint=checkpoint).batches == 0


@pytest.mark.parametrize("restartable", [False, True], ids=["whole", "checkpoint"])
def test_an_error_of_a_task_keeps_its_text_and_whether_a_retry_helps(
    restartable: bool, spark: Any, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "table", scattered(rows(COUNT)))
    checkpoint = str(tmp_path / "checkpoint") if restartable else None
    said = 'no "broker":\nit is \\ away, 100% é'

    async def setup() -> None:
        raise lanes.SourceError(said, retryable=True)

    with pytest.raises(lanes.SourceError) as told:
        replay(spark, table, noting(tmp_path / "journal"), setup=setup, checkpoint=checkpoint)
    assert str(told.value) == said.replace("\n", " ") and told.value.retryable
    assert "in setup" in str(told.value.__cause__)


def test_files_that_cannot_be_read_are_named(spark: Any, tmp_path: Path) -> None:
    def broken(name: str, change: Callable[[Path], object]) -> str:
        table = write_table(tmp_path / name, scattered(rows(COUNT)))
        change(tmp_path / name / "003.parquet")
        with pytest.raises(lanes.SourceError) as told:
            replay(spark, table, noting(tmp_path / "journal"), checkpoint=str(tmp_path / f"checkpoint of {name}"))
        said = str(told.value)
        assert said.startswith("orders: Spark failed: ")
        assert "\n" not in said
        assert "restore the file, or remove it from the table" in said
        return said

    def cut(file: Path) -> None:
        os.truncate(file, 500)

    def garble(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[:4] + bytes(1_500) + content[1_504:])

    def retype(file: Path) -> None:
        table = pq.read_table(file)
        at = SCHEMA.get_field_index("offset")
        pq.write_table(table.set_column(at, "offset", table["offset"].cast(pa.string())), file)

    for name, change in (("cut", cut), ("garbled", garble), ("retyped", retype)):
        assert f"{name}/003.parquet" in broken(name, change)
    there = ParquetTable(path=str(tmp_path / "cut"), topic="orders")
    with pytest.raises(lanes.LanesError):
        replay(spark, there, noting(tmp_path / "journal"))


def test_a_checkpoint_of_another_kind_is_refused(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(rows(COUNT)))
    checkpoint = tmp_path / "checkpoint"
    rate = spark.readStream.format("rate").load().writeStream.trigger(availableNow=True)
    rate.option("checkpointLocation", str(checkpoint)).format("noop").start().awaitTermination()
    with pytest.raises(lanes.SourceError, match="orders: the checkpoint belongs to a query that is not a replay"):
        replay(spark, table, noting(tmp_path / "journal"), checkpoint=str(checkpoint))
    assert not (tmp_path / "journal").exists()


@dataclass(frozen=True, kw_only=True)
class Named(ParquetTable):
    """A table with an id, like a topic whose brokers report an id."""

    def spans(self, spark: Any) -> Spans:
        return dataclasses.replace(super().spans(spark), incarnation="one")


def test_a_checkpoint_without_a_topic_id_names_the_remedy(spark: Any, tmp_path: Path) -> None:
    table, seen = write_table(tmp_path / "table", [rows(60)]), tmp_path / "seen"
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 30, "tasks": 1}

    def stop(at: Progress) -> None:
        # One batch is recorded as done, and the next batch is not.
        if at.batches == 2:
            raise ConnectionError("the terminal is gone")

    with pytest.raises(ConnectionError):
        replay(spark, table, noting(seen), progress=stop, **more)
    named = Named(path=table.path, topic=table.topic)
    remedy = r"^orders: the checkpoint has no topic id, .* another checkpoint with from_=\{0: 10, 1: 10, 2: 10\}; "
    with pytest.raises(lanes.SourceError, match=remedy):
        replay(spark, named, noting(tmp_path / "nothing"), **more)
    assert not (tmp_path / "nothing").exists()


def test_two_replays_never_write_one_folder_of_results(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(name: str) -> str:
        # The state that Spark leaves after the start of a query.
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata").write_text(json.dumps({"id": name}))
        return str(tmp_path / name)

    checkpoints = {name: begun(name) for name in ("one", "two")}
    results = tmp_path / "r[1]"
    claims = results / "_lanes" / "claims"

    def take(name: str) -> None:
        ResultsFolder(spark, str(results), checkpoints[name]).take()

    def refused(name: str, why: str) -> None:
        with pytest.raises(lanes.ConfigError, match=why):
            take(name)

    # A replay was killed before it wrote its note: another replay is told of it, and the first can continue.
    with monkeypatch.context() as patched:
        patched.setattr(ResultsFolder, "_write", Mock(side_effect=lanes.SourceError("killed")))
        with pytest.raises(lanes.SourceError, match="killed"):
            take("one")
    refused(
        "two",
        r"results_to='.*': another replay takes the folder at the same time, as .*/_lanes/claims/one shows .*remove",
    )
    assert [one.name for one in claims.iterdir() if not one.name.startswith(".")] == ["one"]
    take("one")
    take("one")
    # A replay that searched before the note existed finds the claim.
    with monkeypatch.context() as patched:
        patched.setattr(ResultsFolder, "_note", lambda self: None)
        refused("two", "another replay takes the folder at the same time")
    refused("two", "the folder is for the results of another checkpoint")
    assert not (tmp_path / "two" / "results").exists()
    # Both replays have searched for the note before either claimed the folder.
    shutil.rmtree(results)
    shutil.rmtree(tmp_path / "one" / "results")
    looked, check = threading.Barrier(2, timeout=60), ResultsFolder.check

    def wait(self: ResultsFolder) -> None:
        check(self)
        looked.wait()

    monkeypatch.setattr(ResultsFolder, "check", wait)
    ended: dict[str, object] = {}

    def run(name: str) -> None:
        try:
            take(name)
        except lanes.ConfigError as error:
            ended[name] = error

    both = [threading.Thread(target=run, args=[name]) for name in checkpoints]
    for one in both:
        one.start()
    for one in both:
        one.join()
    # At most one replay owns the folder, and only the owner is bound to it.
    assert ended
    assert len(list(results.glob("_lanes/checkpoint/part-*"))) == 2 - len(ended)
    assert {name for name in checkpoints if (tmp_path / name / "results").exists()} == checkpoints.keys() - ended.keys()


@dataclass(frozen=True)
class Direct(Fenced):
    """The fenced handler with a new connection for each message, which detects a lost server at once and records it in
    the file `refused`."""

    refused: str = ""

    async def __call__(self, message: lanes.Message) -> dict[str, object]:
        row = (os.getpid(), message.partition.id.number, message.position, message.key)
        positions = Positions("fenced", schema=self.schema)
        try:
            connected = await psycopg.AsyncConnection.connect(self.url)
        except psycopg.OperationalError:
            os.close(os.open(self.refused, os.O_WRONLY | os.O_CREAT))
            raise
        async with connected as connection, positions.once(connection, message) as fresh:
            # Either both writes succeed, or neither.
            await connection.execute(self._insert("calls"), row)
            if fresh:
                await connection.execute(self._insert("effects"), row)
        return {}


def test_a_lost_database_stops_the_replay_without_lost_or_doubled_effects(
    spark: Any, tmp_path: Path, fresh_postgres: PostgresFactory
) -> None:
    server = fresh_postgres()
    messages = rows(COUNT)
    table = write_table(tmp_path / "table", scattered(messages))
    refused = tmp_path / "refused"
    handler = Direct(server.url, "outage", refused=str(refused))
    handler.make()
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 300, "effects": "fenced"}

    killed = 0

    def kill(at: Progress) -> None:
        nonlocal killed
        if at.batches == 1 and not killed:
            killed = 1
            server.kill()

    with pytest.raises(lanes.HandlerHalted, match=r"orders/\d position \d+ with OperationalError: .*onnection") as told:
        replay(spark, table, handler, settings=ONCE, progress=kill, **more)
    assert "\n" not in str(told.value)
    server.start()
    assert len(handler.effects()) == COUNT // 3
    refused.unlink()

    # The server stops again, and restarts after an attempt of a message.
    def come_back() -> None:
        wait_until(refused.exists, "an attempt of a message", seconds=300)
        server.start()

    coming = threading.Thread(target=come_back)

    def go(at: Progress) -> None:
        nonlocal killed
        if at.batches == 1 and killed == 1:
            killed = 2
            server.kill()
            coming.start()

    patient = lanes.Settings(retry=lanes.Retry(attempts=10_000, backoff=0.05, max_backoff=0.5))
    report = replay(spark, table, handler, settings=patient, progress=go, **more)
    coming.join()
    assert (report.finished, report.batches) == (COUNT * 2 // 3, 2)
    # A rolled-back transaction leaves no call in the table.
    assert handler.check(messages) == set()
