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
from lanes_spark.driver.live_ends import ask_ends
from lanes_spark.plan import Eras
from lanes_spark.positions import Islands, Positions, Span, check_start, next_positions, next_wanted

__all__ = ["NAME", "BatchRanges", "ranges_options"]

NAME = "lanes_batch_ranges"
"""What the source is registered as."""


def ranges_options(
    *,
    topic: str,
    replay: str,
    spans: Mapping[int, Span],
    starts: Positions,
    cap: int,
    eras: Eras,
    islands: Islands | None = None,
    fixed: bool = False,
    live: str | None = None,
    begin: Positions | None = None,
    unnamed: str = "",
) -> dict[str, str]:
    """The options of the source. ``replay``: tells replays apart: none goes on from another one's checkpoint.
    ``unnamed``: what it would be if the topic had no id, "" = it has none.
    ``starts``: where a new one begins, of partitions where that is not the first position there is. ``islands``: the
    only positions that are read, None = all. ``fixed``: a partition that comes up is refused. ``live``: who is
    asked how ``spans`` are by now, see ``LiveEnds``; None = they stay. ``begin``: in front of these positions nothing
    is asked for."""
    return {
        "topic": topic,
        "replay": replay,
        "cap": str(cap),
        "spans": json.dumps(sorted([partition, *span] for partition, span in spans.items())),
        "starts": json.dumps(sorted(starts.items())),
        "eras": json.dumps([sorted(era.items()) for era in eras]),
        "islands": json.dumps(sorted([partition, list(found)] for partition, found in (islands or {}).items())),
        "fixed": json.dumps(fixed),
        "live": live or "",
        "begin": json.dumps(sorted((begin or {}).items())),
        "unnamed": unnamed,
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
        self._islands: dict[int, list[Span]] = {
            number: [(first, end) for first, end in found] for number, found in json.loads(options["islands"])
        }
        self._fixed: bool = json.loads(options["fixed"])
        self._live = options["live"]
        self._begin: dict[int, int] = dict(json.loads(options["begin"]))
        self._unnamed = options["unnamed"]

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What there is was looked up before the query began."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._cap)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        firsts = {partition: first for partition, (first, _) in self._spans.items()}
        return self._offset({**firsts, **self._starts})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        at = self._positions(start)
        if self._live:
            spans = ask_ends(self._live, at)
            if spans is None:
                return start
            self._spans = spans
        self._check(at)
        cap = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._offset(next_positions(at, self._spans, cap, self._eras, self._islands))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._offset({partition: end for partition, (_, end) in self._spans.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before = self._positions(start)
        until = self._positions(end, before)
        ranges = []
        for partition, stop in until.items():
            # A partition that has come up since begins with its first position.
            first = before.get(partition, self._spans[partition][0] if partition in self._spans else stop)
            ranges.append((partition, first, stop))
        # Those that have nothing in this batch are told too: how far they are is part of how far the replay is.
        return [InputPartition(ranges)] if any(first < stop for _, first, stop in ranges) else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int, int]]:
        yield from partition.value

    def _check(self, at: Positions) -> None:
        # What is gone of positions that nobody wants is no loss; where the source ends in front of the next ones, it
        # has to be as far as the replay is.
        ends = {partition: span[1] for partition, span in self._spans.items()}
        begun = {number: max(one, self._begin.get(number, 0)) for number, one in at.items()}
        wanted = next_wanted(begun, self._islands)
        reached = {number: max(one, min(wanted[number], ends.get(number, one))) for number, one in at.items()}
        check_start(self._topic, reached, self._spans)
        added = sorted(set(self._spans) - set(at))
        if self._fixed and added:
            begin = {**dict(sorted(at.items())), **dict.fromkeys(added, 0)}
            raise SourceError(
                f"{self._topic}: partition {added[0]} has come up since this replay was begun: keys have moved, and "
                f"what was before has to be handled first; go on with another checkpoint, aligned=False, from_={begin} "
                "and eras=[…], which says from which positions on there were more partitions"
            )

    def _offset(self, positions: Mapping[int, int]) -> dict[str, Any]:
        return {"replay": self._replay, "positions": {str(number): at for number, at in sorted(positions.items())}}

    def _positions(self, offset: Any, done: Positions | None = None) -> dict[int, int]:
        """``done``: what is in front of it was handled; None = of the offset itself."""
        # Spark hands over whatever a checkpoint has, of a query of any kind.
        if not isinstance(offset, dict) or not isinstance(offset.get("positions"), dict):
            raise SourceError(
                f"{self._topic}: the checkpoint is of another query, which is no replay: give this one a checkpoint of "
                "its own"
            )
        at = {int(number): position for number, position in offset["positions"].items()}
        if self._unnamed and offset.get("replay") == self._unnamed:
            # Positions do not say whose they are: of a topic that was copied, or made anew, they are of other messages.
            raise SourceError(
                f"{self._topic}: the checkpoint was begun when the topic told no id, by brokers before 2.8 or as a "
                "table, and now it has one: nobody can tell whether it is the same topic; where it is, as behind an "
                f"upgrade in place, go on with another checkpoint and from_={at if done is None else done}, else begin "
                "again with another one"
            )
        if offset.get("replay") != self._replay:
            raise SourceError(
                f"{self._topic}: the checkpoint is of another replay (other topic, selection or eras, or a topic that "
                "was made anew since): give this one a checkpoint of its own"
            )
        return at
