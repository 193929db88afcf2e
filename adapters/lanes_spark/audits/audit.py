"""Audits journals on a cluster, and returns a verdict on each promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lanes.errors import ConfigError
from lanes_spark.audits.verdicts import CAUSES, AuditVerdict
from lanes_spark.failures import mapped_errors
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Result of an audit.

    Attributes:
        verdicts: One verdict for each checker.
        rows: Number of rows in complete files of the journal. Copies of files do not count.
        processes: Number of processes that wrote the journal; each run of a consumer counts as a process.
        duplicates: Number of repeated messages by cause. ``held``: the broker redelivered a message in flight.
            ``settled``: the broker redelivered a settled message. ``late``: the broker delivered a message that the
            engine did not know, below the highest position. ``retry``: the handler started again in the same
            assignment. ``takeover``: the handler started in another assignment, before the message was finished.
            ``repeat``: the handler started in another assignment, after the message was finished.
        unfinished: Number of incomplete files, whose rows the audit does not judge. The number is 0 with Spark Connect,
            which cannot list incomplete files.
        findings: One row for each violation, with the columns checker, what, member, run, n, partition, assignment,
            position and key. The DataFrame is usable until the session ends.
    """

    verdicts: tuple[AuditVerdict, ...]
    rows: int
    processes: int
    duplicates: Mapping[str, int]
    unfinished: int = 0
    findings: DataFrame = field(repr=False, compare=False)

    @property
    def status(self) -> int:
        """Exit status of the audit: 1 after a violation, else 2 if a promise is unproven, else 0."""
        statuses = {verdict.status for verdict in self.verdicts}
        return 1 if "violated" in statuses else 2 if "unproven" in statuses else 0

    @property
    def unjudged(self) -> str:
        """Sentence about incomplete files; "" without incomplete files. Incomplete files do not change ``status``."""
        if not self.unfinished:
            return ""
        if self.unfinished == 1:
            return "1 unfinished file: its writer still runs or was killed, and its rows are not judged"
        return (
            f"{self.unfinished:,} unfinished files: their writers still run or were killed, and their rows are not "
            "judged"
        )


def audit(
    spark: SparkSession,
    journal: str | Sequence[str],
    *,
    source: ParquetTable | KafkaTopic | DataFrame | None = None,
    findings_to: str | None = None,
) -> Audit:
    """Judge the journals of all processes of a run together. Blocks while Spark works.

    No Python code runs for single rows. One pass finds the few messages whose rows the audit must examine. The verdicts
    equal the verdicts of ``lanes check`` for PerKeyOrder, NoOverlap, ExclusiveOwner, AtLeastOnce,
    NoCommitPastUnfinished and DeadLetterBeforeSettle. ``lanes check`` has more checkers. An audit differs from ``lanes
    check`` if a verdict needs every row in order:

    - If rows of a process are missing, the audit judges neither that process nor events across processes. The verdict
      about a promise is then ``unproven``, unless other processes violate the promise. With missing rows, the audit
      reports no violation of AtLeastOnce, like ``lanes check``.
    - The number of violations may differ from ``lanes check`` if one violation causes another violation. If the
    committed floor
      of an assignment falls, the audit does not judge some commits of this assignment.
    - With a ``source``, the audit treats a message without a finished handler as lost. Without a ``source``, the audit
      treats such a message as left at the broker.
    - If a task was killed before the end of its first file, its journal has no rows. ``Audit.unfinished`` counts such
      files.

    Args:
        spark: Spark session that runs the audit.
        journal: Folder that ``lanes.run(journal=…)`` has written, or several such folders.
        source: Messages that handlers had to handle: a table, a topic, or a DataFrame with the columns ``partition``,
            such as ``orders/3``, and ``position``. With an empty source, AtLeastOnce is ``unproven``.
        findings_to: New folder for the findings as Parquet; None = the call stores no findings and is idempotent.

    Returns:
        The verdicts.

    Raises:
        ConfigError: The folder has no journal, no rows, or a journal of an earlier ``lanes``; or ``source`` is invalid.
        SourceError: Spark cannot read or write.
    """
    from lanes_spark.audits.judge import judge
    from lanes_spark.audits.rows import check_columns, due_positions, journal_rows
    from lanes_spark.tables.journal import read_journal, unfinished_files

    paths = [journal] if isinstance(journal, str) else list(journal)
    if not paths:
        raise ConfigError("journal is empty: give the folder that lanes.run(journal=…) has written to")
    with mapped_errors(f"journal {', '.join(paths)}"):
        unfinished = unfinished_files(spark, paths)
        table = read_journal(spark, paths, unfinished)
        check_columns(table)
        judged = judge(journal_rows(table), None if source is None else due_positions(spark, source))
        told = judged.told()
        if not told:
            raise ConfigError(
                f"journal {', '.join(paths)}: the journal has no rows; give the folder of a run that has begun"
            )
        findings = judged.findings.drop("history")
        if findings_to is not None:
            findings.write.parquet(findings_to)
        verdicts, figures = told[""]
        return Audit(
            verdicts=verdicts,
            rows=figures["rows"],
            processes=figures["processes"],
            duplicates={name: figures[name] for name in CAUSES},
            unfinished=unfinished,
            findings=findings,
        )
