"""Audit of journals at the scale of a cluster: a verdict on each promise."""

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
        rows: Number of rows in complete files of the journal, without copied files.
        processes: Number of processes that wrote the journal; each run of a consumer counts as a process.
        duplicates: Number of repeated messages by cause. ``held``: a redelivery in flight. ``settled``: a redelivery
            after the settlement. ``late``: a delivery below the highest position, of a message unknown to the engine.
            ``retry``: another start of the handler in the same assignment. ``takeover``: another start in another
            assignment, before the finish of the message. ``repeat``: another start in another assignment, after the
            finish of the message.
        unfinished: Number of incomplete files, which no verdict includes. With Spark Connect, which cannot list
            incomplete files, the number is 0.
        findings: One row for each violation, with the columns checker, what, member, run, n, partition, assignment,
            position and key. The rows are usable until the end of the session.
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

    No Python code runs per row: one pass finds the few messages that the audit must examine row by row. The verdicts
    equal those of ``lanes check`` for PerKeyOrder, NoOverlap, ExclusiveOwner, AtLeastOnce, NoCommitPastUnfinished and
    DeadLetterBeforeSettle. ``lanes check`` has more checkers. An audit differs from ``lanes check`` where a verdict
    needs every row in order:

    - If rows of a process are missing, the audit judges neither that process nor events across processes. The verdict
      about a promise is then ``unproven``, unless other processes violate the promise. With missing rows, AtLeastOnce
      has no violation, as in ``lanes check``.
    - The number of violations may differ from ``lanes check`` if one violation causes another violation. If the
    committed floor
      of an assignment falls, the audit does not judge some commits of this assignment.
    - With a ``source``, a message that no handler finished counts as lost. Without a ``source``, such a message counts
      as left at the broker.
    - The journal of a task that was killed before the end of its first file has no rows. ``Audit.unfinished`` counts
      such files.

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
