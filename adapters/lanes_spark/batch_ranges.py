"""The batches of a replay as a stream of Spark, so that its checkpoint says which of them are done.

The stream holds no messages: a row of it is the range of positions that a batch takes of one partition. Spark logs the
end of a batch before it runs it, and that it is done afterwards; a replay that was killed goes on with the very ranges
that were logged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from lanes.errors import SourceError
from lanes_spark.plan import Eras
from lanes_spark.positions import Positions, Span, check_start, next_positions

__all__ = ["NAME", "BatchRanges", "ranges_options"]

NAME = "lanes_batch_ranges"
"""What the source is registered as."""


def ranges_options(
    *, topic: str, replay: str, spans: Mapping[int, Span], starts: Positions, cap: int, eras: Eras
) -> dict[str, str]:
    """The options of the source. ``replay``: tells replays apart: none goes on from another one's checkpoint.
    ``starts``: where a new one begins, of partitions where that is not the first position there is."""
    return {
        "topic": topic,
        "replay": replay,
        "cap": str(cap),
        "spans": json.dumps(sorted([partition, *span] for partition, span in spans.items())),
        "starts": json.dumps(sorted(starts.items())),
        "eras": json.dumps([sorted(era.items()) for era in eras]),
    }


class BatchRanges(DataSource):
    """See the module; the options are those of ``ranges_options``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options

    @classmethod
    def name(cls) -> str:
        """See ``NAME``."""
        return NAME

    def schema(self) -> str:
        """The first position, and the one behind the last."""
        return "partition int, start long, stop long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (as Spark calls it)
        """The reader."""
        return _Reader(self.options)


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._topic = options["topic"]
        self._replay = options["replay"]
        self._cap = int(options["cap"])
        self._spans: dict[int, Span] = {number: (first, end) for number, first, end in json.loads(options["spans"])}
        self._starts: dict[int, int] = dict(json.loads(options["starts"]))
        self._eras: list[dict[int, int]] = [dict(era) for era in json.loads(options["eras"])]

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What there is was looked up before the query began."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._cap)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        firsts = {partition: first for partition, (first, _) in self._spans.items()}
        return self._offset({**firsts, **self._starts})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        at = self._positions(start)
        check_start(self._topic, at, self._spans)
        cap = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._offset(next_positions(at, self._spans, cap, self._eras))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._offset({partition: end for partition, (_, end) in self._spans.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, until = self._positions(start), self._positions(end)
        ranges = []
        for partition, stop in until.items():
            # A partition that has come up since begins with its first position.
            first = before.get(partition, self._spans[partition][0] if partition in self._spans else stop)
            ranges.append((partition, first, stop))
        # Those that have nothing in this batch are told too: how far they are is part of how far the replay is.
        return [InputPartition(ranges)] if any(first < stop for _, first, stop in ranges) else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int, int]]:
        yield from partition.value

    def _offset(self, positions: Mapping[int, int]) -> dict[str, Any]:
        return {"replay": self._replay, "positions": {str(number): at for number, at in sorted(positions.items())}}

    def _positions(self, offset: Mapping[str, Any]) -> dict[int, int]:
        if offset.get("replay") != self._replay:
            raise SourceError(
                f"{self._topic}: the checkpoint is of another replay (other topic, selection or eras): give this one a "
                "checkpoint of its own"
            )
        return {int(number): at for number, at in offset["positions"].items()}
