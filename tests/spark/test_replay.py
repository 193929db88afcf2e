"""A replay on a real Spark in one process handles each row once, in order within its key."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
from lanes.core.ring import slot
from lanes_spark import KafkaTopic, ParquetTable, Progress, replay
from memsource import check_files
from tests.spark.rows import ONCE, expected, rows
from tests.spark.tables import by_key, noted, noting, positions, write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

COUNT = 900
RESULTS = pa.schema([("partition", pa.int64()), ("position", pa.int64())])


def history() -> list[dict[str, Any]]:
    """Rows of 3 partitions, some without a key."""
    return [one | ({"key": None} if number % 10 == 9 else {}) for number, one in enumerate(rows(COUNT))]


def scattered(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows divided into files, in no order and across partitions."""
    return [messages[start::4][::-1] for start in (2, 0, 3, 1)]


def in_order(calls: list[tuple[int, int, bytes | None]]) -> bool:
    return all(sorted(found) == found for found in by_key(calls).values())


def stored(path: Path) -> list[tuple[int, int]]:
    table = pq.read_table(path)
    return sorted(zip(table["partition"].to_pylist(), table["position"].to_pylist(), strict=True))


def test_every_row_is_handled_once_and_in_order_within_its_key(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(history()))
    journal = tmp_path / "journal"
    report = replay(spark, table, noting(journal), results=RESULTS, results_to=str(tmp_path / "results"))
    everything = positions([(one["partition"], one["offset"], None) for one in history()])
    assert positions(noted(journal)) == everything
    assert in_order(noted(journal))
    assert stored(tmp_path / "results") == everything
    assert (report.delivered, report.finished, report.dead_lettered) == (COUNT, COUNT, 0)
    assert (report.skipped, report.batches, report.plan.kind) == (0, 1, "reshard")


def test_only_selected_messages_are_handled(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(history()))
    journal = tmp_path / "journal"
    keys = sorted({one["key"] for one in history() if one["key"] is not None})
    slots = {slot(key) for key in keys[::2]}
    since = datetime.fromtimestamp(1_700_000_100, UTC)
    report = replay(
        spark,
        table,
        noting(journal),
        keys=keys[3:],
        slots=slots,
        partitions=[1, 2],
        from_=since,
        to={1: 500, 2: 400},
        effects="none",
    )
    wanted = [
        one
        for one in history()
        if one["key"] in keys[3:]
        and slot(one["key"]) in slots
        and one["partition"] in (1, 2)
        and one["timestamp"] >= since
        and one["offset"] < {1: 500, 2: 400}[one["partition"]]
    ]
    assert 20 < len(wanted) < COUNT / 2
    assert positions(noted(journal)) == sorted((one["partition"], one["offset"]) for one in wanted)
    assert (report.delivered, report.skipped) == (len(wanted), COUNT - len(wanted))


@pytest.mark.parametrize("how", ["handler", "worker killed"])
def test_a_stopped_replay_continues(spark: Any, tmp_path: Path, how: str) -> None:
    table = write_table(tmp_path / "table", scattered(history()))
    journal, mended = tmp_path / "journal", tmp_path / "mended"
    flag = str(mended)

    def fail(message: Any) -> None:
        import os
        import signal
        import time

        if message.partition.id.number == 1 and message.position == 350 and os.path.exists(flag):
            time.sleep(2.5)
        elif message.partition.id.number == 1 and message.position == 350:
            if how == "worker killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the database is away")

    more: dict[str, Any] = {
        "settings": ONCE,
        "checkpoint": str(tmp_path / "checkpoint"),
        "rows_per_batch": 600,
        "results": RESULTS,
        "results_to": str(tmp_path / "results"),
    }
    stopped: Any = {
        "handler": (lanes.HandlerHalted, "orders/1 position 350 with ValueError: the database is away"),
        "worker killed": (lanes.SourceError, "orders: Spark failed: .*Python worker exited unexpectedly"),
    }[how]
    with pytest.raises(stopped[0], match=stopped[1]):
        replay(spark, table, noting(journal, fail), **more)
    mended.touch()
    # In a separate file, because a task that Spark gave up may continue for a while.
    told: list[Progress] = []
    report = replay(spark, table, noting(tmp_path / "again", fail), **more, progress=told.append)
    # After each batch, and sometimes during a batch.
    done = {one.batches: (one.delivered, one.left) for one in reversed(told) if one.batches}
    assert done == {1: (300, 597), 2: (600, 0)}
    # The pulse also tells during the first batch of 600 positions with 300 rows, whose slow message is not handled.
    assert any(597 + 300 < one.left <= 597 + 600 for one in told if not one.batches)
    everything = positions([(one["partition"], one["offset"], None) for one in history()])
    again = noted(tmp_path / "again")
    # The first batch is not repeated. The failed batch is repeated from its beginning, in order.
    assert positions([one for one in noted(journal) if one[1] < 200]) == [one for one in everything if one[1] < 200]
    assert positions(again) == [one for one in everything if one[1] >= 200]
    assert in_order(again)
    assert stored(tmp_path / "results") == everything
    assert (report.delivered, report.skipped, report.batches) == (600, 300, 2)
    assert replay(spark, table, noting(journal, fail), **more).batches == 0
    with pytest.raises(lanes.SourceError, match="the checkpoint belongs to another replay"):
        replay(spark, table, noting(journal, fail), **more, keys=["customer"])


def test_the_journals_of_all_attempts_of_a_task_pass_together(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(history()))
    journal, mended = tmp_path / "journal", tmp_path / "mended"
    flag = str(mended)

    def handler(message: Any) -> None:
        import os

        if message.partition.id.number == 1 and message.position == 350 and not os.path.exists(flag):
            raise ValueError("the database is away")

    more: dict[str, Any] = {
        "settings": ONCE,
        "checkpoint": str(tmp_path / "checkpoint"),
        "rows_per_batch": 600,
        "journal": journal,
        "tasks": 4,
    }
    with pytest.raises(lanes.HandlerHalted):
        replay(spark, table, handler, **more)
    mended.touch()
    assert replay(spark, table, handler, **more).delivered == 600
    stored = pq.read_table(journal).to_pylist()
    members = {row["member"] for row in stored}
    assert all(re.fullmatch(r"[\w.-]+-p[0-3]-a0-t\d+", member) for member in members)
    # One batch, then a batch that failed in at least one task and started again, and one more batch.
    assert 12 <= len(members) <= 16
    assert {row["reason"] for row in stored if row["event"] == "end"} == {"drained", "failed"}
    acked = {(row["partition"], row["position"]) for row in stored if row["event"] == "ack"}
    assert acked == {(f"orders/{one['partition']}", one["offset"]) for one in history()}
    checked = check_files([journal])
    assert checked.status == 0, checked.text
    with pytest.raises(lanes.ConfigError, match="choose a folder that the driver and all workers can write to"):
        replay(spark, table, handler, journal=mended)


def test_a_partition_in_one_file_needs_no_shuffle(spark: Any, tmp_path: Path) -> None:
    files = [[one for one in history() if one["partition"] == partition] for partition in range(3)]
    table = write_table(tmp_path / "table", files, aligned=True)
    report = replay(spark, table, noting(tmp_path / "journal"))
    assert report.plan.kind == "aligned"
    assert in_order(noted(tmp_path / "journal"))
    assert report.finished == COUNT
    halves = [half for one in files for half in (one[:150], one[150:])]
    other = write_table(tmp_path / "other", halves, aligned=True)
    with pytest.raises(lanes.LanesError, match=r"aligned=True, and orders/\d is read by 2 tasks|comes after"):
        replay(spark, other, noting(tmp_path / "nothing"))


def test_a_key_that_moved_between_partitions_keeps_its_order(spark: Any, tmp_path: Path) -> None:
    def one(partition: int, offset: int, key: bytes) -> dict[str, Any]:
        return rows(1)[0] | {"partition": partition, "offset": offset, "key": key}

    # One partition at first, and a second partition after 200 messages, to which half of the keys moved.
    first = [one(0, offset, b"key-%d" % (offset % 4)) for offset in range(200)]
    second = [
        one(offset % 2, offset // 2 + (200 if offset % 2 == 0 else 0), b"key-%d" % (offset % 4))
        for offset in range(200)
    ]
    table = write_table(tmp_path / "table", scattered(first + second), eras=[{0: 200}])
    for name, more in (
        ("whole", {}),
        ("batches", {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 150}),
    ):
        replay(spark, table, noting(tmp_path / name), **more)  # type: ignore[call-overload]
        found = by_key(noted(tmp_path / name))
        assert found == by_key([(each["partition"], each["offset"], each["key"]) for each in first + second])


def test_an_invalid_replay_is_refused_before_the_first_message(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(history()))
    lock = threading.Lock()

    async def unpicklable(message: lanes.Message) -> None:
        with lock:
            pass

    with pytest.raises(lanes.ConfigError, match=r"cannot be sent to the workers .*lock.*Create clients, locks"):
        replay(spark, table, unpicklable)
    handler = noting(tmp_path / "journal")
    other = ParquetTable(path=str(tmp_path / "table"), topic="orders", columns={"key": "customer"})
    with pytest.raises(lanes.ConfigError, match="no column 'customer' for key, only key, partition"):
        replay(spark, other, handler)
    wrong = ParquetTable(path=str(tmp_path / "table"), topic="orders", columns={"offset": "value"})
    with pytest.raises(lanes.ConfigError, match="the column 'value' for offset is binary, not bigint or int"):
        replay(spark, wrong, handler)
    with pytest.raises(lanes.ConfigError, match=r"lacks jars of its connector to Kafka: .*spark-sql-kafka-0-10_2\.13:"):
        replay(spark, KafkaTopic(servers="127.0.0.1:9", topic="orders"), handler)
    with pytest.raises(lanes.SourceError, match="PATH_NOT_FOUND"):
        replay(spark, ParquetTable(path=str(tmp_path / "nowhere"), topic="orders"), handler)
    with pytest.raises(lanes.ConfigError, match="only one of results and results_to is given"):
        replay(spark, table, handler, results=RESULTS)
    with pytest.raises(lanes.ConfigError, match='order="serial" handles one partition, and 3 partitions are selected'):
        replay(spark, table, handler, settings=lanes.Settings(order="serial"))

    async def unready() -> None:
        raise KeyError("the name of the database")

    with pytest.raises(lanes.SourceError, match=r"orders: Spark failed: .*KeyError: 'the name of the database'"):
        replay(spark, table, handler, setup=unready, partitions=[0], tasks=1)
    # A setting of the cluster, which check_conf reads in the same way.
    assert spark.conf.get("spark.driver.bindAddress", None) == "127.0.0.1"
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with pytest.raises(lanes.ConfigError, match=r"spark\.sql\.files\.ignoreMissingFiles=true"):
            replay(spark, table, handler)
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")
    assert "repartitionById(3, partition)" in str(
        replay(spark, table, handler, settings=lanes.Settings(order="partition"), explain=True)
    )
    assert not (tmp_path / "journal").exists()


def test_with_order_by_partition_each_partition_is_handled_in_sequence(spark: Any, tmp_path: Path) -> None:
    table = write_table(tmp_path / "table", scattered(rows(COUNT)))
    replay(spark, table, noting(tmp_path / "journal"), settings=lanes.Settings(order="partition"))
    found: dict[int, list[int]] = {}
    for partition, position, _ in noted(tmp_path / "journal"):
        found.setdefault(partition, []).append(position)
    assert found == {number: sorted(found[number]) for number in range(3)}
    assert sum(map(len, found.values())) == sum(map(len, expected(rows(COUNT)).values()))
