"""Batches skip the gaps between distant positions, and follow a topic that grows; no JVM runs."""

from __future__ import annotations

import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from lanes.config import Settings
from lanes.errors import ConfigError, SourceError
from lanes_spark.driver import batch as batch_run
from lanes_spark.driver import scope as driver_scope
from lanes_spark.driver.batch import BatchRun
from lanes_spark.driver.offset_server import OffsetServer, ask_offsets
from lanes_spark.driver.progress import ProgressTracker
from lanes_spark.driver.query import BatchRanges, RangeOptions
from lanes_spark.driver.run import SparkRun
from lanes_spark.driver.scope import ReplayScope, open_scope
from lanes_spark.driver.selection import Selection
from lanes_spark.driver.stream import Stream
from lanes_spark.plan import Plan
from lanes_spark.positions import Span, clipped, islands_of, narrowed, next_positions, wanted_count
from lanes_spark.tables.journal_selection import Chosen, JournalFacts
from lanes_spark.tables.table import Spans

GAP = 10


def with_small_gaps(positions: set[int]) -> set[int]:
    found = set(positions)
    for one, other in pairwise(sorted(positions)):
        if other - one - 1 < GAP:
            found |= set(range(one, other))
    return found


@given(
    st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 200), min_size=1, max_size=40), min_size=1),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(0, 2**16),
)
def test_batches_read_each_selected_position_once_and_no_gap(
    wanted: dict[int, set[int]], cap: int | None, seed: int
) -> None:
    random = Random(seed)
    parts = [
        (number, min(part), max(part))
        for number, positions in wanted.items()
        for at in range(0, 201, 7)
        if (part := [one for one in positions if at <= one < at + 7])
    ]
    random.shuffle(parts)
    islands = islands_of(parts, GAP)
    spans = narrowed(dict.fromkeys(range(5), (0, 300)), islands)
    assert spans == {number: (min(found), max(found) + 1) for number, found in wanted.items()}
    at = {number: first for number, (first, _) in spans.items()}
    eras = [{number: random.randrange(200) for number in range(4)}] if seed % 3 == 0 else []
    read: list[tuple[int, int]] = []
    era = 0
    while (after := next_positions(at, spans, cap, eras, islands)) != at:
        assert all(after[number] >= at[number] for number in at)
        taken = clipped({number: (at[number], after[number]) for number in at}, islands)
        count = sum(end - first for first, end in taken.values())
        assert count == wanted_count(taken, islands), "a batch has one island of a partition"
        assert cap is None or count <= cap
        new = [(number, one) for number, (first, end) in taken.items() for one in range(first, end)]
        if eras and new:
            [of_batch] = {int(one >= eras[0][number]) for number, one in new}
            assert of_batch >= era
            era = of_batch
        read += new
        at = after
    assert sorted(read) == sorted((number, one) for number, found in wanted.items() for one in with_small_gaps(found))
    assert len(read) == wanted_count(spans, islands)


def reader(spans: dict[int, Span], **more: Any) -> Any:
    options = {"topic": "orders", "replay": "one", "starts": {}, "cap": 100, "eras": (), **more}
    return BatchRanges(RangeOptions(spans=spans, **options).encoded()).streamReader(StructType([]))


def test_missing_positions_between_islands_are_no_loss() -> None:
    islands = {0: [(10, 20), (500, 520)], 1: [(0, 5)]}

    def of(first: int, end: int) -> Any:
        return reader({0: (min(max(first, 10), end), end), 1: (0, 5)}, islands=islands, starts={0: 10})

    begun = of(0, 520)
    start = begun.initialOffset()
    end = begun.latestOffset(start, ReadMaxRows(100))
    assert end["positions"] == {"0": 20, "1": 5}
    # The positions of the finished batch are gone, and so are the positions between the islands.
    assert of(500, 520).latestOffset(end, ReadMaxRows(100))["positions"] == {"0": 520, "1": 5}
    with pytest.raises(SourceError, match="orders/0: positions 500 … 504 are unread"):
        of(505, 520).latestOffset(end, ReadMaxRows(100))
    with pytest.raises(SourceError, match="orders/0: positions 10 … 14 are unread"):
        of(15, 520).latestOffset(start, ReadMaxRows(100))
    # The topic does not have the requested positions yet.
    assert of(0, 300).latestOffset(end, ReadMaxRows(100))["positions"] in (end["positions"], {"0": 300, "1": 5})


def test_a_stream_reads_the_positions_before_every_batch() -> None:
    has: dict[int, Span] = {0: (0, 50), 1: (0, 0)}
    asked: list[dict[int, int]] = []

    def read(at: Any) -> dict[int, Span]:
        asked.append(dict(at))
        if has[0][0] < 0:
            raise SourceError("orders: Kafka at h:1: TimeoutException: it is away")
        return dict(has)

    ends = OffsetServer(read)
    ends.start()
    try:
        of = reader({0: (0, 50), 1: (0, 0)}, live=ends.path, fixed=True)
        start = of.initialOffset()
        first = of.latestOffset(start, ReadMaxRows(100))
        assert of.latestOffset(first, ReadMaxRows(100)) == first
        has[0] = (40, 500)
        second = of.latestOffset(first, ReadMaxRows(100))
        assert second["positions"] == {"0": 150, "1": 0}
        assert asked == [{0: 0, 1: 0}, {0: 50, 1: 0}, {0: 50, 1: 0}]
        assert of.reportLatestOffset()["positions"] == {"0": 500, "1": 0}
        has[0] = (160, 500)
        with pytest.raises(SourceError, match="orders/0: positions 150 … 159 are unread"):
            of.latestOffset(second, ReadMaxRows(100))
        has[0] = (40, 500)
        has[2] = (0, 9)
        with pytest.raises(SourceError, match=r"partition 2 is new since .*from_=\{0: 150, 1: 0, 2: 0\} and eras="):
            of.latestOffset(second, ReadMaxRows(100))
        free = reader({0: (0, 50), 1: (0, 0)}, live=ends.path)
        assert free.latestOffset(second, ReadMaxRows(1_000))["positions"] == {"0": 500, "1": 0, "2": 9}
        has[0] = (-1, 0)
        with pytest.raises(SourceError, match="TimeoutException: it is away"):
            of.latestOffset(second, ReadMaxRows(100))
        assert not ends.stopped.is_set()
        ends.stop()
        assert of.latestOffset(second, ReadMaxRows(100)) == second
        assert ends.stopped.is_set()
    finally:
        ends.close()
    ends.close()
    with pytest.raises(SourceError, match="the driver sent no offset ranges"):
        of.latestOffset(second, ReadMaxRows(100))


def test_a_socket_that_cannot_be_made_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    ends = OffsetServer(lambda at: {})
    with pytest.raises(
        ConfigError, match=r"a stream cannot create its socket .*: AF_UNIX path too long; set TMPDIR to"
    ):
        ends.start()
    assert list(folder.iterdir()) == []


def test_a_removed_socket_fails_the_request_for_positions_and_delays_no_close() -> None:
    ends = OffsetServer(lambda at: {})
    ends.start()
    Path(ends.path).unlink()
    with pytest.raises(SourceError, match="the driver sent no offset ranges"):
        ask_offsets(ends.path, {})
    ends.close()
    ends._thread.join(10)
    assert not ends._thread.is_alive()


class Ended:
    """A query that has ended."""

    isActive = False  # noqa: N815 (as Spark calls it)

    def awaitTermination(self) -> None:  # noqa: N802
        """At once."""


def test_a_waiting_caller_returns_at_the_end_of_a_stream_in_spite_of_errors() -> None:
    closed: list[str] = []

    def fail(what: str) -> None:
        closed.append(what)
        raise ValueError(f"{what} cannot be closed")

    running: Any = object.__new__(Stream)
    running._query, running._ended = Ended(), threading.Event()
    running._offsets = SimpleNamespace(close=lambda: fail("offsets"))
    running._run = SparkRun(
        scope=cast(Any, SimpleNamespace(source=SimpleNamespace(topic="orders"), close=lambda: fail("scope"))),
        batches=cast(Any, None),
        tracker=cast(Any, SimpleNamespace(started=0.0, check=lambda: None, close=lambda: fail("tracker"))),
        rows_per_batch=1,
    )
    with pytest.raises(ValueError, match="cannot be closed"):
        running._watch()
    assert running.join(0)
    # The scope, which is closed last, releases the checkpoint.
    assert closed == ["offsets", "tracker", "scope"]


class Asked(Exception):
    """The source was asked for these positions."""


class Source:
    topic, aligned, eras = "orders", True, ()

    def rows(self, spark: Any, ranges: Any, incarnation: str) -> Any:
        raise Asked(ranges, incarnation)


def test_a_scope_releases_its_checkpoint_although_the_positions_in_memory_cannot_be_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ConnectionError("the session is gone")

    released: list[bool] = []
    lock = SimpleNamespace(release=lambda: released.append(True))
    monkeypatch.setattr(driver_scope, "lock_checkpoint", lambda *of: lock)
    monkeypatch.setattr(driver_scope, "settings_of", lambda spark: {})
    monkeypatch.setattr(driver_scope, "_cores", lambda spark: 1)
    facts = JournalFacts(of="unfinished", topic="orders", runs=1, positions=9)
    positions = cast(Any, SimpleNamespace(unpersist=fail))
    chosen = Chosen(positions=positions, islands={0: [(0, 9)]}, facts=facts, digest="")
    opened = open_scope(
        cast(Any, None),
        cast(Any, Pausing(0)),
        Settings(),
        Selection.of(),
        only=cast(Any, SimpleNamespace(choose=lambda *of: chosen)),
        checkpoint="checkpoint",
        cap=9,
        tasks=None,
        effects="none",
    )
    assert released == []
    with pytest.raises(ConnectionError, match="the session is gone"):
        opened.close()
    assert released == [True]


def scope(incarnation: str = "", **more: Any) -> ReplayScope:
    """The scope of a replay of a topic with two partitions."""
    spans = Spans(by_partition={0: (0, 9), 1: (5, 9)}, rows=13, timed=True, cut=True, incarnation=incarnation)
    found: dict[str, Any] = {"source": Source(), "selection": Selection.of()}
    found |= {"selected": spans.by_partition, "places": spans.by_partition, "starts": {}, "fixed": True}
    return ReplayScope(
        spans=spans,
        plan=Plan(kind="aligned"),
        **{**found, **more},
    )


def batches_of(found: ReplayScope) -> BatchRun:
    """The batches of a replay without a handler."""
    return BatchRun(
        scope=found, job=cast(Any, None), payload=b"", results_to=None, tracker=ProgressTracker(cast(Any, None), None)
    )


def reader_of(found: ReplayScope) -> Any:
    return reader(dict(found.places), replay=found.identity, unnamed=found.unnamed)


def test_checkpoints_with_and_without_a_topic_id_differ() -> None:
    before, now, other = scope(), scope("one"), scope("two")
    assert (before.unnamed, now.unnamed) == ("", before.identity)
    assert len({found.identity for found in (before, now, other)}) == 3
    begun = reader_of(before)
    start = begun.initialOffset()
    end = begun.latestOffset(start, ReadMaxRows(6))
    # The replay continues as long as no broker reports an id.
    assert reader_of(before).partitions(start, end)
    told = r"orders: the checkpoint has no topic id, because its replay began .*, use another checkpoint with from_="
    with pytest.raises(
        SourceError, match=told + r"\{0: 5, 1: 6\}; for another topic, begin again with another checkpoint$"
    ):
        reader_of(now).latestOffset(end, ReadMaxRows(6))
    # A started batch that is not done is refused too: the first batch, and a later batch.
    for first in (reader_of(now).initialOffset(), start):
        with pytest.raises(SourceError, match=told + r"\{0: 0, 1: 5\}; for another topic"):
            reader_of(now).partitions(first, end)
    # A checkpoint with a recorded id identifies the topic by this id.
    with pytest.raises(SourceError, match=r"belongs to another replay .* a topic that was recreated since"):
        reader_of(other).latestOffset(reader_of(now).initialOffset(), ReadMaxRows(6))


class Pausing(Source):
    """A topic whose brokers fail the first ``times`` questions, with a retryable error or another one."""

    def __init__(self, times: int, *, retryable: bool = True, incarnation: str = "one") -> None:
        self.times, self.retryable, self.incarnation = times, retryable, incarnation

    def spans(self, spark: Any) -> Spans:
        self.times -= 1
        if self.times >= 0:
            raise SourceError("orders: Kafka at h:1: TimeoutException: it is away", retryable=self.retryable)
        return Spans(by_partition={0: (0, 9)}, rows=9, timed=True, cut=True, incarnation=self.incarnation)


def test_after_a_batch_the_replay_waits_for_the_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_PAUSE", 0.0)

    def run(source: Pausing) -> BatchRun:
        return batches_of(scope("one", source=source))

    run(Pausing(3))._check_incarnation(cast(Any, None))
    # A topic that was created again during the pause is detected too.
    with pytest.raises(SourceError, match=r"recreated .*, and the last batch may have read messages of the new topic"):
        run(Pausing(3, incarnation="two"))._check_incarnation(cast(Any, None))
    # The retries end after a bound, after a stop, and for an error that no retry can change.
    gone, given_up = Pausing(9, retryable=False), run(Pausing(9))
    given_up.given_up.set()
    for hopeless in (run(gone), given_up):
        with pytest.raises(SourceError, match="it is away"):
            hopeless._check_incarnation(cast(Any, None))
        assert cast(Any, hopeless.scope.source).times == 8
    monkeypatch.setattr(batch_run, "_PATIENCE", -1.0)
    with pytest.raises(SourceError, match="it is away"):
        run(Pausing(1))._check_incarnation(cast(Any, None))


def test_a_start_above_the_end_of_the_topic_is_no_loss() -> None:
    # The replay asks for positions from 150 on, but the topic ended at 100.
    selection = Selection.of(from_=150)

    def of(first: int, end: int) -> Any:
        place = selection.place(0, (first, end))
        assert place is not None
        return reader({0: place}, starts={0: min(150, place[0])}, begin={0: 150})

    start = of(0, 100).initialOffset()
    assert start["positions"] == {"0": 100}
    assert of(0, 120).latestOffset(start, ReadMaxRows(100))["positions"] == {"0": 120}
    assert of(0, 160).latestOffset(start, ReadMaxRows(100))["positions"] == {"0": 160}
    assert of(150, 160).latestOffset(start, ReadMaxRows(100))["positions"] == {"0": 160}
    with pytest.raises(SourceError, match="orders/0: positions 150 … 154 are unread"):
        of(155, 160).latestOffset(start, ReadMaxRows(100))


def test_a_batch_reads_no_position_below_the_start() -> None:
    # The topic ended at 100 when the stream was begun.
    selection = Selection.of(from_={0: 150}, to={1: 20})
    run = batches_of(scope("one", selection=selection))
    run.run(cast(Any, None), {0: (100, 150), 1: (20, 30)}, batch=0)
    with pytest.raises(Asked) as asked:
        run.run(cast(Any, None), {0: (100, 200), 1: (0, 50), 2: (0, 5)}, batch=1)
    assert asked.value.args == ({0: (150, 200), 1: (0, 20), 2: (0, 5)}, "one")


def test_a_stream_ends_when_its_topic_is_recreated() -> None:
    def spans(incarnation: str) -> Spans:
        return Spans(by_partition={0: (0, 9)}, rows=9, timed=True, cut=True, incarnation=incarnation)

    running: Any = object.__new__(Stream)
    now = spans("one")
    source = SimpleNamespace(topic="orders", spans=lambda spark: now)
    within = SimpleNamespace(source=source, selection=Selection.of(), spans=spans("one"))
    running._spark = None
    running._run = SimpleNamespace(scope=within, tracker=SimpleNamespace(look=lambda spans, at: None))
    assert running._look({0: 5}) == {0: (0, 9)}
    now = spans("two")
    with pytest.raises(SourceError, match="orders: the topic was deleted and recreated after this run had begun"):
        running._look({0: 5})
