"""The stream of position ranges that gives a replay with a checkpoint its batches, without a JVM."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from lanes.errors import SourceError
from lanes_spark.driver.query import BatchRanges, RangeOptions
from lanes_spark.positions import Span

CAP = 100


def reader(spans: dict[int, Span], starts: dict[int, int] | None = None, *, replay: str = "one") -> Any:
    options = RangeOptions(topic="orders", replay=replay, spans=spans, starts=starts or {}, cap=CAP, eras=()).encoded()
    return BatchRanges(options).streamReader(StructType([]))


def run(of: Any, start: dict[str, Any]) -> list[list[tuple[int, int, int]]]:
    """Return the batches from the start to the end."""
    batches = []
    while (end := of.latestOffset(start, ReadMaxRows(CAP))) != start:
        [one] = of.partitions(start, end)
        batches.append(list(of.read(one)))
        start = end
    return batches


def test_each_batch_begins_where_the_last_one_ended_in_each_partition() -> None:
    of = reader({0: (10, 150), 1: (0, 60), 2: (7, 7)})
    batches = run(of, of.initialOffset())
    assert [sum(stop - first for _, first, stop in batch) for batch in batches] == [100, 100]
    assert [batch[2] for batch in batches] == [(2, 7, 7), (2, 7, 7)]
    assert batches[0][0] == (0, 10, batches[1][0][1])
    assert [batch[:2] for batch in batches[-1:]] == [[(0, batches[0][0][2], 150), (1, batches[0][1][2], 60)]]
    at = of.initialOffset()
    assert of.partitions(at, at) == []


def test_a_replay_continues_although_the_read_positions_were_deleted() -> None:
    first = reader({0: (0, 80), 1: (0, 10)}, {0: 0})
    end = first.latestOffset(first.initialOffset(), ReadMaxRows(CAP))
    later = reader({0: (80, 90), 1: (10, 10)}, {0: 0})
    assert run(later, end) == [[(0, 80, 90), (1, 10, 10)]]
    with pytest.raises(SourceError, match="orders/0: positions 80 … 84 are unread, and the source has lost them"):
        run(reader({0: (85, 90), 1: (10, 10)}), end)
    with pytest.raises(
        SourceError, match="orders/0: the replay continues at position 80, but the source has lost that partition"
    ):
        run(reader({}), end)
    assert run(reader({}), reader({}).initialOffset()) == []
    with pytest.raises(SourceError, match="the checkpoint belongs to another replay"):
        run(reader({0: (80, 90)}, replay="two"), end)


def test_a_new_replay_whose_start_was_deleted_is_refused() -> None:
    of = reader({0: (20, 90)}, {0: 15})
    with pytest.raises(SourceError, match="orders/0: positions 15 … 19 are unread"):
        run(of, of.initialOffset())
