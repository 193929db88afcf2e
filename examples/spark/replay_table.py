"""Applies a new rule to all past payments, in order within an account.

The payments are in a Parquet table, in files without an order. Spark reads the files on two cores of this machine; the
call on a cluster is the same. The handler is an ordinary handler of `lanes`, and its results become a table.

Needs pyspark and Java 17 or newer: python examples/spark/replay_table.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

import lanes
from lanes_spark import ParquetTable, replay

ACCOUNTS, PAYMENTS, PARTITIONS, FILES = 50, 5_000, 4, 6
OVERDRAWN = pa.schema([("account", pa.string()), ("position", pa.int64()), ("balance", pa.int64())])

balances: defaultdict[str, int] = defaultdict(int)


async def begin() -> None:
    """Clear the accounts of earlier tasks in this worker process, before the first message of a task."""
    balances.clear()


async def overdrawn(message: lanes.Message) -> dict[str, Any] | None:
    """Return the overdraft that a payment causes; None = no overdraft.

    Payments of one account run one at a time and in order, so each balance is correct.
    """
    assert message.key is not None
    account = message.key.decode()
    balances[account] += int(message.value)
    if balances[account] >= 0:
        return None
    return {"account": account, "position": message.position, "balance": balances[account]}


def payments() -> list[dict[str, Any]]:
    """Return the rows of all past payments."""
    found = []
    for number in range(PAYMENTS):
        account = number * 7919 % ACCOUNTS
        amount = number * 2_654_435_761 % 401 - 180
        found.append(
            {
                "key": f"account-{account}".encode(),
                "partition": account % PARTITIONS,
                "offset": number,
                "value": str(amount).encode(),
            }
        )
    return found


def expected(messages: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return the results of a plain loop."""
    sums: defaultdict[str, int] = defaultdict(int)
    found = []
    for one in messages:
        account = one["key"].decode()
        sums[account] += int(one["value"])
        if sums[account] < 0:
            found.append((account, one["offset"], sums[account]))
    return sorted(found)


def main(folder: Path) -> None:
    messages = payments()
    table = folder / "payments"
    table.mkdir()
    for number in range(FILES):
        pq.write_table(pa.Table.from_pylist(messages[number::FILES][::-1]), table / f"{number}.parquet")

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "FATAL").getOrCreate()
    try:
        report = replay(
            spark,
            ParquetTable(path=str(table), topic="payments"),
            overdrawn,
            setup=begin,
            results=OVERDRAWN,
            results_to=str(folder / "overdrawn"),
            effects="none",
        )
    finally:
        spark.stop()

    rows = pq.read_table(folder / "overdrawn").to_pylist()
    found = sorted((row["account"], row["position"], row["balance"]) for row in rows)
    assert found == expected(messages)
    assert report.finished == PAYMENTS
    print(report.plan)
    print(f"{report.finished} payments, {len(found)} of them left an account overdrawn: as in a plain loop")


if __name__ == "__main__":
    # Without this setting, the workers run the first python3 of the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
