"""A replay in batches with fenced effects, and a driver that is killed with signal 9.

`python -m tests.spark.killed MASTER MOMENT RUN`: RUN has the fields of `Run` as JSON. MOMENT tells when, in the second
batch, driver and JVM are killed:

- `before`: Spark has recorded the start of the batch, and no message is handled
- `in`: a handler is in its transaction
- `after`: all messages are handled, and Spark has not recorded the end of the batch
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

import lanes
from lanes_spark import Audit, ParquetTable, Progress, Report, audit, replay
from memsource import check_files
from tests.spark.conftest import session
from tests.spark.fenced import Fenced, Place, Trap
from tests.spark.rows import rows
from tests.spark.tables import write_table

Moment = Literal["before", "in", "after"]

PARTITIONS, COUNT, ROWS_PER_BATCH = 3, 900, 600
SECOND: Final = range(200, 400)
"""The positions of the second batch in each partition; every other position has a message."""

MIDDLE: Final[Place] = (1, 300)
RESULTS: Final = pa.schema([("partition", pa.int64()), ("position", pa.int64())])


def history() -> list[dict[str, Any]]:
    """Rows of 3 partitions, some without a key."""
    return [one | ({"key": None} if number % 10 == 9 else {}) for number, one in enumerate(rows(COUNT))]


def second_batch() -> set[Place]:
    """Return the messages that a repetition of the second batch may handle again."""
    return {(one["partition"], one["offset"]) for one in history() if one["offset"] in SECOND}


@dataclass(frozen=True)
class Run:
    """A replay of `history()`. All its files are in `folder`, and its effects are in `schema`."""

    folder: str
    url: str
    schema: str

    def make(self) -> None:
        """Write the input table, and create the tables of the database, before the first run."""
        messages = history()
        # The files are neither in order nor split by partition.
        write_table(Path(self.folder) / "table", [messages[start::4][::-1] for start in (2, 0, 3, 1)])
        self.fenced().make()

    def fenced(self, trap: Trap | None = None) -> Fenced:
        return Fenced(self.url, self.schema, trap)

    def trap(self, kills: Literal["worker", "executor", "driver"], driver: tuple[int, ...] = ()) -> Trap:
        return Trap(kills, MIDDLE, f"{self.folder}/sprung", driver)

    @property
    def journal(self) -> str:
        """The folder of the journal."""
        return f"{self.folder}/journal"

    @property
    def sprung(self) -> bool:
        return Path(self.folder, "sprung").exists()

    def go(self, spark: Any, *, trap: Trap | None = None, moment: Moment | None = None) -> Report:
        """Start or continue the replay, until its end. With `moment`, kill this process and its JVM then."""
        fenced = self.fenced(trap)
        source = Doomed if moment == "before" else ParquetTable

        def tell(progress: Progress) -> None:
            if moment == "after" and progress.batches == 2:
                end_driver()

        return replay(
            spark,
            source(path=f"{self.folder}/table", topic="orders"),
            fenced,
            settings=lanes.Settings(concurrency=4),
            setup=fenced.setup,
            teardown=fenced.teardown,
            results=RESULTS,
            results_to=f"{self.folder}/results",
            checkpoint=f"{self.folder}/checkpoint",
            rows_per_batch=ROWS_PER_BATCH,
            tasks=6,
            effects="fenced",
            progress=tell,
            journal=self.journal,
        )

    def check(self) -> set[Place]:
        """Check like `Fenced.check`, and assert that every message has one row of results."""
        table = pq.read_table(Path(self.folder) / "results")
        found = sorted(zip(table["partition"].to_pylist(), table["position"].to_pylist(), strict=True))
        assert found == sorted((one["partition"], one["offset"]) for one in history())
        return self.fenced().check(history())

    def audit(self, spark: Any, *, beside: bool = False) -> Audit:
        """Audit the journals of all attempts that were not killed, against the table.

        Asserts that every promise is held, with the verdicts of `lanes check`. With `beside`, workers of a killed
        driver may have run concurrently with those of the next driver, so order and exclusion may be broken.
        """
        # For little data, compiling the plans would take longer than running them.
        simple = ("spark.sql.codegen.wholeStage", "spark.sql.adaptive.enabled")
        for name in simple:
            spark.conf.set(name, "false")
        try:
            found = audit(spark, self.journal, source=ParquetTable(path=f"{self.folder}/table", topic="orders"))
        finally:
            for name in simple:
                spark.conf.unset(name)
        checked = {one.name: one.status.replace("passed", "held") for one in check_files([self.journal]).verdicts}
        assert {one.name: one.status for one in found.verdicts} == {
            one.name: checked[one.name] for one in found.verdicts
        }
        broken = {one.name for one in found.verdicts if one.status != "held"}
        assert broken <= ({"PerKeyOrder", "NoOverlap"} if beside else set()), found.verdicts
        assert {one.name: one.checked for one in found.verdicts}["AtLeastOnce"] == COUNT
        return found


@dataclass(frozen=True, kw_only=True)
class Doomed(ParquetTable):
    """A table whose driver is killed just before it reads the second batch."""

    def rows(self, spark: Any, ranges: Mapping[int, tuple[int, int]], incarnation: str = "") -> Any:
        if min(first for first, _ in ranges.values()) == SECOND.start:
            end_driver()
        return super().rows(spark, ranges, incarnation)


def driver() -> tuple[int, ...]:
    """Return the process ids of this driver: its JVM, then this process."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    return gateway.proc.pid, os.getpid()


def end_driver() -> None:
    for pid in driver():
        os.kill(pid, signal.SIGKILL)


def main(master: str, moment: Moment, given: str) -> None:
    run = Run(**json.loads(given))
    with session(master) as spark:
        # The killing worker ends with the JVM, so the JVM is killed last.
        trap = run.trap("driver", driver()[::-1]) if moment == "in" else None
        run.go(spark, trap=trap, moment=moment)


def arguments(master: str, moment: Moment, run: Run) -> tuple[str, ...]:
    """Return the arguments of a Python process that runs this module."""
    return "-m", "tests.spark.killed", master, moment, json.dumps(dataclasses.asdict(run))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
