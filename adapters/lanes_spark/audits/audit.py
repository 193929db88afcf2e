"""Audit of journals at the scale of a cluster: promises that were kept, broken or left unproven."""

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
        rows: Number of rows of the journal.
        processes: Number of processes that wrote it.
        duplicates: Number of repeated messages by cause. The source reported ``held``, ``settled`` and ``late``. A
            handler was started once more in the same assignment (``retry``), in another one before the message was
            finished (``takeover``), or after that (``repeat``).
        unfinished: Number of incomplete files, which are in no verdict; 0 on Spark Connect, which lists none.
        findings: One row for each violation: checker, what, member, run, n, partition, assignment, position and key.
            It is usable as long as the session.
    """

    verdicts: tuple[AuditVerdict, ...]
    rows: int
    processes: int
    duplicates: Mapping[str, int]
    unfinished: int = 0
    findings: DataFrame = field(repr=False, compare=False)

    @property
    def status(self) -> int:
        """Exit status as of ``lanes check``: 0 all promises held, 1 one was violated, 2 one is unproven."""
        statuses = {verdict.status for verdict in self.verdicts}
        return 1 if "violated" in statuses else 2 if "unproven" in statuses else 0

    @property
    def unjudged(self) -> str:
        """Sentence about incomplete files, "" without any. They do not change ``status``."""
        if not self.unfinished:
            return ""
        if self.unfinished == 1:
            return "1 unfinished file: its writer still runs or was killed; its rows are not judged"
        return (
            f"{self.unfinished:,} unfinished files: their writers still run or were killed; their rows are not judged"
        )


def audit(
    spark: SparkSession,
    journal: str | Sequence[str],
    *,
    source: ParquetTable | KafkaTopic | DataFrame | None = None,
    findings_to: str | None = None,
) -> Audit:
    """Judge journals of all processes of a run together. Blocks while Spark works.

    No Python code runs per row: one pass finds the few messages that need a close look. The verdicts are those of
    ``lanes check`` for PerKeyOrder, NoOverlap, ExclusiveOwner, AtLeastOnce, NoCommitPastUnfinished and
    DeadLetterBeforeSettle. ``lanes check`` has more checkers. An audit says less where rows would have to be read
    one by one:

    - A process that lacks rows is not judged, and then nothing is judged across processes; both are ``unproven``, even
      if the remaining rows would convict. AtLeastOnce then convicts nothing, as in ``lanes check``.
    - Violations that follow from each other may be counted differently. In an assignment whose commits fall, not every
      commit is looked at.
    - With a ``source``, a message without a handler's success is lost; without one, it was left at the broker.
    - A killed task without a complete file has no rows; ``Audit.unfinished`` counts its file.

    Args:
        spark: Session that judges.
        journal: Folder that ``lanes.run(journal=…)`` has written, or several.
        source: Messages that had to be handled: a table, a topic, or a DataFrame with the columns ``partition``, as
            ``orders/3``, and ``position``. With an empty one AtLeastOnce is ``unproven``.
        findings_to: New folder for the findings as Parquet. Without it the call is idempotent.

    Returns:
        The verdicts.

    Raises:
        ConfigError: The folder has no journal.
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
            raise ConfigError(f"journal {', '.join(paths)}: it has no rows; give the folder of a run that has begun")
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
