"""What a replay finds before its first batch: which positions there are, which of them are asked for, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from blake3 import blake3

from lanes.config import Settings
from lanes.dead_letter import error_text
from lanes.errors import ConfigError, SourceError
from lanes_spark.checkpoint import Held, hold
from lanes_spark.driver.batch import BatchRun, ReplaySource
from lanes_spark.driver.progress import TaskReports
from lanes_spark.driver.selection import Selection
from lanes_spark.plan import Effects, Plan, check_conf, make_plan, settings_of
from lanes_spark.positions import Islands, Positions, Span, check_kept, narrowed
from lanes_spark.tables.journal_selection import SMALL, Chosen, JournalSelection
from lanes_spark.tables.table import Spans
from lanes_spark.task.job import TaskJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Prepared", "prepare"]

_ENDLESS: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """``spans``: what the source has. ``selected``: what is to be handled of it, by partition and position.
    ``places``: the same, with partitions of which that is nothing now. ``starts``: where a checkpoint begins that is
    new, of partitions where that is not the first position of ``places``. ``fixed``: partitions that come up
    later break the order. ``chosen``: by a journal. ``held``: the checkpoint, which no other replay has meanwhile."""

    source: ReplaySource
    selection: Selection
    spans: Spans
    selected: Mapping[int, Span]
    places: Mapping[int, Span]
    starts: Positions
    plan: Plan
    fixed: bool
    chosen: Chosen | None = field(default=None, repr=False)
    held: Held | None = field(default=None, repr=False)

    @property
    def islands(self) -> Islands:
        """What a journal selects lies in these; without one everything is read."""
        return {} if self.chosen is None else self.chosen.islands

    @property
    def identity(self) -> str:
        """Tells replays apart: none goes on from another one's checkpoint."""
        return self._identity(self.spans.incarnation)

    @property
    def unnamed(self) -> str:
        """The same of a source that does not tell its incarnation; "" = this one does not."""
        return self._identity("") if self.spans.incarnation else ""

    def _identity(self, incarnation: str) -> str:
        text = (
            f"{self.source.topic}\n{self.selection.digest()}\n{[sorted(era.items()) for era in self.source.eras]}"
            f"{'' if self.chosen is None else self.chosen.digest}{incarnation and chr(10) + incarnation}"
        )
        return blake3(text.encode()).hexdigest(length=8)

    def run(self, job: TaskJob, results: Any, results_to: str | None, reports: TaskReports | None) -> BatchRun:
        """What runs its batches. Raises ``ConfigError`` for a job that cannot be sent to the workers."""
        return BatchRun(
            source=self.source,
            selection=self.selection,
            plan=self.plan,
            name=job.name,
            payload=_pickled(job),
            results=results,
            results_to=results_to,
            incarnation=self.spans.incarnation,
            journal=job.journal,
            chosen=self.chosen,
            reports=reports,
        )

    def missing(self) -> int | None:
        """Positions that the journal selects, and that the source does not have, as far as it says where it begins and
        ends; None without a journal, or where more is selected by than partition and position. Blocks."""
        if self.chosen is None or self.selection.by_row:
            return None
        asked = {
            partition: place
            for partition in self.chosen.islands
            if (place := self.selection.place(partition, (0, _ENDLESS))) is not None
        }
        return self.chosen.count(asked) - self.chosen.count(dict(self.selected))

    def close(self) -> None:
        """Forget what is in memory, and let the checkpoint go. Idempotent."""
        _close(self.chosen, self.held)


def prepare(
    spark: SparkSession,
    source: ReplaySource,
    settings: Settings,
    selection: Selection,
    *,
    only: JournalSelection | None,
    checkpoint: str | None,
    restartable: bool,
    rows_per_batch: int,
    tasks: int | None,
    effects: Effects,
) -> Prepared:
    """Look at all that is asked for. Blocks; to be closed. ``checkpoint``: where the choice of a journal is kept, and
    which no other replay has until then; None = neither. ``restartable``: whether there are batches.

    Raises ``ConfigError`` for what cannot be kept, ``SourceError`` for positions that are gone.
    """
    check_conf(settings_of(spark), effects)
    # First: what the other one does may keep all cores busy, and looking at the source needs one.
    held = None if checkpoint is None else hold(spark, source.topic, checkpoint)
    chosen = None
    try:
        spans = source.spans(spark)
        _check_timestamps(selection, spans)
        chosen = None if only is None else only.choose(spark, source.topic, checkpoint, spans.incarnation)
        found = _prepared(spark, source, settings, selection, spans, chosen, restartable, rows_per_batch, tasks)
        return replace(found, held=held)
    except BaseException:
        _close(chosen, held)
        raise


def _close(chosen: Chosen | None, held: Held | None) -> None:
    try:
        if chosen is not None:
            chosen.close()
    finally:
        # Also where the session is gone, and with it what was in memory.
        if held is not None:
            held.release()


def _prepared(
    spark: SparkSession,
    source: ReplaySource,
    settings: Settings,
    selection: Selection,
    spans: Spans,
    chosen: Chosen | None,
    restartable: bool,
    rows_per_batch: int,
    tasks: int | None,
) -> Prepared:
    wanted = selection.starts(spans.by_partition) if spans.cut else {}
    if not restartable:
        check_kept(source.topic, wanted, spans.by_partition)
    places = {
        partition: place
        for partition, whole in spans.by_partition.items()
        if (place := selection.place(partition, whole)) is not None
    }
    starts = dict(wanted)
    if chosen is not None:
        if spans.cut:
            begins = {partition: islands[0][0] for partition, islands in chosen.islands.items() if partition in places}
            starts = {partition: max(begin, wanted.get(partition, 0)) for partition, begin in begins.items()}
            if not restartable:
                _check_chosen(source.topic, starts, spans.by_partition)
        places = narrowed(places, chosen.islands)
    selected = {partition: (first, end) for partition, (first, end) in places.items() if first < end}
    # Where one has been read beyond a start that is gone, that is no loss: the first batch is told of it.
    starts = {partition: min(start, places[partition][0]) for partition, start in starts.items()}
    if isinstance(selection.start, datetime):
        # No row in front of these is as late, so a new checkpoint begins there.
        since = source.since(spark, selection.start, selected)
        starts |= since
        selected = {
            partition: (max(first, since.get(partition, first)), end)
            for partition, (first, end) in selected.items()
            if since.get(partition, first) < end
        }
    plan = make_plan(
        order=settings.order,
        keyless=settings.keyless,
        cores=_cores(spark),
        partitions=len(selected),
        aligned=source.aligned,
        eras=source.eras,
        tasks=tasks,
    )
    if chosen is not None:
        plan = _joined(plan, chosen, rows_per_batch if restartable else None)
    return Prepared(
        source=source,
        selection=selection,
        spans=spans,
        selected=selected,
        # A partition that has been read, and is empty since, has to be told from one that is gone.
        places=places if spans.cut else selected,
        starts=starts,
        plan=plan,
        # A table tells of a partition when it has rows; only a topic knows how many there are.
        fixed=spans.cut and settings.order in ("key", "serial"),
        chosen=chosen,
    )


def _check_chosen(topic: str, starts: Positions, spans: Mapping[int, Span]) -> None:
    for partition, start in sorted(starts.items()):
        first, _ = spans[partition]
        if start < first:
            raise SourceError(
                f"{topic}/{partition}: positions {start} … {first - 1} are gone from the source, and only=… selects "
                f"some of them: leave them out by from_={{{partition}: {first}}}, or restore them"
            )


def _joined(plan: Plan, chosen: Chosen, cap: int | None) -> Plan:
    small = chosen.small(cap)
    if not small and plan.kind != "reshard":
        raise ConfigError(
            f"only=… selects {chosen.facts.positions:,} positions, more than the {SMALL:,} that every executor may "
            f'have in memory, and "{plan.kind}" has no shuffle: say aligned=False, or give a checkpoint, so that they '
            "come in batches"
        )
    islands = sum(map(len, chosen.islands.values()))
    why = (
        f"only=… selects {chosen.facts.positions:,} positions as {chosen.facts.of} in {islands} place(s) of "
        f"{len(chosen.islands)} partition(s); rows are joined to them "
        + ("in memory, without a shuffle" if small else "by a shuffle in front of the sort")
    )
    return replace(
        plan, why=(*plan.why, why, *(f"the journal may not say everything: {one}" for one in chosen.facts.doubts))
    )


def _pickled(job: TaskJob) -> bytes:
    from pyspark import cloudpickle

    try:
        payload: bytes = cast(Any, cloudpickle).dumps(job)
    except Exception as error:
        raise ConfigError(
            f"the handler, or something it uses, cannot be sent to the workers ({type(error).__name__}: "
            f"{error_text(error)}): make clients, locks and open files in setup=…, in variables of the module"
        ) from error
    return payload


def _cores(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:
        # Spark Connect has no context; what a shuffle has by default is what its administrator thought right.
        return max(1, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or "200") // 4)


def _check_timestamps(selection: Selection, spans: Spans) -> None:
    asked = isinstance(selection.start, datetime) or isinstance(selection.end, datetime)
    if asked and not spans.timed:
        raise ConfigError(
            "from_ or to is a time, and the source has no column for timestamp: select by positions, or name the column"
        )
