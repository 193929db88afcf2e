"""Proof from the journal at the scale of a cluster: the promises that a run has kept, broken, or left unproven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lanes.errors import ConfigError
from lanes_spark.audits.verdicts import AUDITED, CAUSES, WITNESSES, AuditStatus, AuditVerdict
from lanes_spark.failures import mapped_errors
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["AUDITED", "CAUSES", "WITNESSES", "Audit", "AuditStatus", "AuditVerdict", "audit"]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the audit of a journal found.

    ``verdicts``: one for each checker. ``rows`` and ``processes``: how many the journal has. ``duplicates``: what came
    again, by cause: ``held``, ``settled`` and ``late`` as the source said; of handlers that were started once more,
    ``retry`` in the same assignment, ``takeover`` in another one where nobody had finished it before, and ``repeat``
    where somebody had. ``unfinished``: files that are not written to the end; 0 where nobody can look, as over Spark
    Connect. What they hold is in no verdict, see ``unjudged``. ``findings``: a row for each violation, with checker,
    what, member, run, n, partition, assignment, position and key; usable as long as the session is.
    """

    verdicts: tuple[AuditVerdict, ...]
    rows: int
    processes: int
    duplicates: Mapping[str, int]
    unfinished: int = 0
    findings: DataFrame = field(repr=False, compare=False)

    @property
    def status(self) -> int:
        """The exit status, as of ``lanes check``: 0 when all promises held, 1 when one was violated, else 2."""
        statuses = {verdict.status for verdict in self.verdicts}
        return 1 if "violated" in statuses else 2 if "unproven" in statuses else 0

    @property
    def unjudged(self) -> str:
        """What no verdict speaks of, and why, as a sentence; "" for nothing. It changes no ``status``."""
        if not self.unfinished:
            return ""
        if self.unfinished == 1:
            return "1 unfinished file: of a writer that runs still, or was killed; what it held is not judged"
        return (
            f"{self.unfinished:,} unfinished files: of writers that run still, or were killed; what these held is not "
            "judged"
        )


def audit(
    spark: SparkSession,
    journal: str | Sequence[str],
    *,
    source: ParquetTable | KafkaTopic | DataFrame | None = None,
    findings_to: str | None = None,
) -> Audit:
    """Judge the journal that ``lanes.run(journal=…)`` has written into these folders, of all processes together.

    Blocks while Spark works; nothing is done by Python for a row. One pass tells which messages have to be looked at
    closely, which are few. ``source``: all of it had to be handled; of a part, a DataFrame with the columns
    ``partition``, as ``orders/3``, and ``position``. One that has nothing proves nothing: AtLeastOnce is ``unproven``
    then. ``findings_to``: a folder for the findings as Parquet, which must not exist. Idempotent but for that.

    The verdicts are those of ``lanes check``: PerKeyOrder, NoOverlap, ExclusiveOwner, AtLeastOnce,
    NoCommitPastUnfinished and DeadLetterBeforeSettle. It differs where less can be said without going through the rows
    one by one:

    - Where rows are missing, nothing is judged within that process, nor across processes; that is ``unproven``, even if
      what is there would convict. AtLeastOnce then convicts nobody, as there.
    - Of violations that follow from each other another number may be counted, and in an assignment whose commits fall
      not every commit is looked at.
    - With a ``source``, what it has and nobody handled was lost; without it, it was left at the broker.
    - A task that was killed before its first file had its name is in none of it: ``Audit.unfinished`` counts its file.

    All other checkers of ``lanes check`` are not there: take that for them.

    Raises ``ConfigError`` for what is no journal, and ``SourceError`` for what Spark cannot read or write.
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
            raise ConfigError(f"journal {', '.join(paths)}: no row is in it; give the folder of a run that has begun")
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
