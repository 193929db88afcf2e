"""Computes the scope of a replay: the positions of the source, the selected positions, and the plan for their rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from lanes.config import Settings
from lanes.errors import ConfigError
from lanes_spark.checkpoint import lock_checkpoint
from lanes_spark.driver.selection import Selection
from lanes_spark.plan import Effects, Plan, check_conf, make_plan, settings_of
from lanes_spark.positions import Islands, Positions, Span, check_kept, narrowed
from lanes_spark.tables.journal_selection import SMALL, Chosen, JournalSelection
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable, Spans

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ENDLESS: Final = 1 << 62


ReplaySource = ParquetTable | KafkaTopic
"""A source of stored messages: a Parquet table or a Kafka topic. The scopes of tables and topics have the same methods.
"""


@dataclass(frozen=True, kw_only=True)
class ReplayScope:
    """The scope of one replay. The caller closes the scope.

    Attributes:
        source: Source of the messages.
        selection: Selected keys, slots, partitions and positions.
        spans: Positions of the source, by partition.
        selected: Selected ranges of positions, without empty ranges.
        places: Selected ranges of positions. For a Kafka topic also empty ranges, because the topic has not lost an
            empty partition.
        starts: First positions of a new checkpoint, for partitions whose first position may differ from ``places``.
        plan: Plan that distributes the rows to the tasks.
        fixed: Whether partitions that are added later would break the order.
        chosen: Positions that a journal selects; None = no ``only=``.
        opened: Resources to close, which are the journal's positions and the lock on the checkpoint.
    """

    source: ReplaySource
    selection: Selection
    spans: Spans
    selected: Mapping[int, Span]
    places: Mapping[int, Span]
    starts: Positions
    plan: Plan
    fixed: bool
    chosen: Chosen | None = field(default=None, repr=False)
    opened: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def islands(self) -> Islands:
        """Ranges around the positions that a journal selects; empty = no journal."""
        return {} if self.chosen is None else self.chosen.islands

    @property
    def identity(self) -> str:
        """Digest of the replay, which a checkpoint stores.

        A replay with another digest cannot continue the checkpoint.
        """
        return self._identity(self.spans.incarnation)

    @property
    def unnamed(self) -> str:
        """Digest of the same replay over a topic without an id; "" = this topic has no id."""
        return self._identity("") if self.spans.incarnation else ""

    def _identity(self, incarnation: str) -> str:
        text = (
            f"{self.source.topic}\n{self.selection.digest()}\n{[sorted(era.items()) for era in self.source.eras]}"
            f"{'' if self.chosen is None else self.chosen.digest}{incarnation and chr(10) + incarnation}"
        )
        return blake3(text.encode()).hexdigest(length=8)

    def missing(self) -> int | None:
        """Count the journal's selected positions that are outside the source's ranges. Blocks.

        Returns:
            The number of positions; None without a journal, or if keys, slots or times also select messages.
        """
        if self.chosen is None or self.selection.by_row:
            return None
        asked = self.selection.places(dict.fromkeys(self.chosen.islands, (0, _ENDLESS)))
        return self.chosen.count(asked) - self.chosen.count(dict(self.selected))

    def close(self) -> None:
        """Free the journal's positions, and release the checkpoint. Idempotent."""
        self.opened.close()


def open_scope(
    spark: SparkSession,
    source: ReplaySource,
    settings: Settings,
    selection: Selection,
    *,
    only: JournalSelection | None,
    checkpoint: str | None,
    cap: int | None,
    tasks: int | None,
    effects: Effects,
) -> ReplayScope:
    """Read the positions of the source, and decide the plan. Blocks.

    Args:
        spark: Session that reads the positions.
        source: Source of the messages.
        settings: Settings of the handler.
        selection: Selected keys, slots, partitions and positions.
        only: Selection by a journal; None = no journal.
        checkpoint: Folder to lock, which also stores the positions of a journal; None = no checkpoint.
        cap: Maximum number of positions of a batch; None = one batch.
        tasks: Number of shuffle tasks; None = 4 per core.
        effects: Effects of the handler.

    Returns:
        The scope, which the caller closes.

    Raises:
        ConfigError: An argument is invalid, or the arguments contradict a promise.
        SourceError: The source has lost positions or does not answer, or another replay uses the checkpoint.
    """
    check_conf(settings_of(spark), effects)
    with ExitStack() as opened:
        # Lock first, because reading the positions needs a core, and another replay may use all cores.
        if checkpoint is not None and (lock := lock_checkpoint(spark, source.topic, checkpoint)) is not None:
            opened.callback(lock.release)
        spans = source.spans(spark)
        if not spans.timed and (isinstance(selection.start, datetime) or isinstance(selection.end, datetime)):
            raise ConfigError(
                "from_ or to is a time, and the source has no column for timestamp: select by positions, or name the "
                "column in columns="
            )
        chosen = None if only is None else only.choose(spark, source.topic, checkpoint, spans.incarnation)
        if chosen is not None:
            opened.callback(chosen.close)
        selected, places, starts = _positions(spark, source, selection, spans, chosen, restartable=cap is not None)
        plan = make_plan(
            order=settings.order,
            keyless=settings.keyless,
            cores=_cores(spark),
            partitions=len(selected),
            aligned=source.aligned,
            eras=source.eras,
            tasks=tasks,
        )
        return ReplayScope(
            source=source,
            selection=selection,
            spans=spans,
            selected=selected,
            places=places if spans.cut else selected,
            starts=starts,
            plan=plan if chosen is None else _joined(plan, chosen, cap),
            # A table shows only partitions with rows, but a topic has a known number of partitions.
            fixed=spans.cut and settings.order in ("key", "serial"),
            chosen=chosen,
            opened=opened.pop_all(),
        )


def _positions(
    spark: SparkSession,
    source: ReplaySource,
    selection: Selection,
    spans: Spans,
    chosen: Chosen | None,
    *,
    restartable: bool,
) -> tuple[dict[int, Span], dict[int, Span], dict[int, int]]:
    """Return ``selected``, ``places`` and ``starts``, see ``ReplayScope``."""
    wanted = selection.starts(spans.by_partition) if spans.cut else {}
    if not restartable:
        check_kept(source.topic, wanted, spans.by_partition)
    places, starts = selection.places(spans.by_partition), dict(wanted)
    if chosen is not None:
        if spans.cut:
            begins = {partition: islands[0][0] for partition, islands in chosen.islands.items() if partition in places}
            starts = {partition: max(begin, wanted.get(partition, 0)) for partition, begin in begins.items()}
            if not restartable:
                check_kept(source.topic, starts, spans.by_partition, only=True)
        places = narrowed(places, chosen.islands)
    selected = {partition: (first, end) for partition, (first, end) in places.items() if first < end}
    # The positions of a checkpoint may already be above a lost start. The first batch of the checkpoint checks the
    # start.
    starts = {partition: min(start, places[partition][0]) for partition, start in starts.items()}
    if isinstance(selection.start, datetime):
        # Begin a new checkpoint at these positions, because all rows below them are earlier than ``start``.
        since = source.since(spark, selection.start, selected)
        starts |= since
        selected = {
            partition: (max(first, since.get(partition, first)), end)
            for partition, (first, end) in selected.items()
            if since.get(partition, first) < end
        }
    return selected, places, starts


def _joined(plan: Plan, chosen: Chosen, cap: int | None) -> Plan:
    small = chosen.small(cap)
    if not small and plan.kind != "reshard":
        raise ConfigError(
            f"only=… selects {chosen.facts.positions:,} positions, more than the {SMALL:,} that an executor may have "
            f'in memory, and the plan "{plan.kind}" has no shuffle. Give a checkpoint with rows_per_batch={SMALL} or '
            "less, or set aligned=False if the source is aligned"
        )
    islands = sum(map(len, chosen.islands.values()))
    why = (
        f"only=… selects {chosen.facts.positions:,} positions as {chosen.facts.of} in {islands} range(s) of "
        f"{len(chosen.islands)} partition(s); rows are joined to these positions "
        + ("in memory, without a shuffle" if small else "by a shuffle before the sort")
    )
    return replace(
        plan, why=(*plan.why, why, *(f"the journal may be incomplete: {one}" for one in chosen.facts.doubts))
    )


def _cores(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:
        # Spark Connect has no context, so estimate the number of cores from the default number of shuffle tasks.
        return max(1, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or "200") // 4)
