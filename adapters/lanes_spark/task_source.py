"""A finite source over Arrow batches: what ``lanes`` consumes inside one task of Spark.

The batches come from the task's own thread, one call each; their rows become messages as there is room for them. What
a row belongs to is told by its columns: a topic partition is assigned when its first row comes, and stays assigned.

Two things that only a wrong plan brings about are found here, and stop the task: a position that does not rise within
its partition, and an era that falls. Rows of the next era wait until everything before them is settled: the same key
may live in another partition there, and lanes keep no order across partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import anyio
import pyarrow.compute as pc  # type: ignore[import-untyped]

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Delivered, Exhausted, SourceEvent, SourceTraits
from lanes_spark.task_rows import ERA, OFFSET, PARTITION, Row, RowReader, headers_size, windows

__all__ = ["ArrowSource"]

_AT_ONCE: Final = 4_096
"""Messages that one ``receive`` returns at most."""


class _Place:
    """Where a topic partition is. ``run``: what is about to be delivered of it, ``size`` bytes."""

    __slots__ = ("highest", "partition", "run", "size")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.highest = -1
        self.run: list[Message] = []
        self.size = 0


class ArrowSource:
    """The rows of Arrow batches as a source. ``topic``: what they are of.

    ``taken`` is called whenever all rows of a batch have been delivered, ``settled`` with messages that are finished,
    each once; both on the event loop.
    """

    def __init__(
        self,
        topic: str,
        *,
        taken: Callable[[], None] = lambda: None,
        settled: Callable[[Sequence[Message]], None] = lambda messages: None,
    ) -> None:
        self.delivered = 0
        self._topic = topic
        self._taken = taken
        self._settled = settled
        self._reader = RowReader(topic)
        self._places: dict[int, _Place] = {}
        self._batches: deque[Any] = deque()
        self._windows: Iterator[list[Row]] | None = None  # of the batch in front, which is still in ``_batches``
        self._window: list[Row] = []
        self._next_row = 0
        self._announced: list[SourceEvent] = []
        self._unsettled: set[Message] = set()
        self._era: int | None = None
        self._finite = False
        self._exhausted = False
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<ArrowSource {self._topic}: {self.delivered} delivered, {len(self._unsettled)} unsettled>"

    # --- what the task calls

    @property
    def left(self) -> bool:
        """Whether there are rows that were not delivered, or not settled."""
        return bool(self._batches or self._unsettled) or not self._exhausted

    def offer(self, batch: Any) -> None:
        """Rows that follow those offered before. Does not block."""
        self._batches.append(batch)
        self._wake.set()

    def finish(self) -> None:
        """No more rows follow. Does not block. Idempotent."""
        self._finite = True
        self._wake.set()

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """See ``lanes.source.Source.open``."""
        return SourceTraits(name=f"{self._topic} on Spark", system="spark", remembers=True)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """See ``lanes.source.Source.receive``. Raises ``SourceError`` for rows in an order that cannot be kept."""
        while True:
            # From the end of this call to the return nothing suspends: a cancelled receive has taken nothing.
            self._wake = anyio.Event()
            events = self._next(room)
            if events:
                return events
            await self._wake.wait()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """See ``lanes.source.Source.settle``."""
        unsettled = self._unsettled
        for settlement in settlements:
            messages = [message for message in settlement.messages if message in unsettled]
            unsettled.difference_update(messages)
            self._settled(messages)
        if not unsettled:
            # The next era may be waiting for it.
            self._wake.set()

    async def extend(self, messages: Sequence[Message]) -> None:
        """Nothing has to be kept alive; see ``lanes.source.Source.extend``."""

    async def release(self, partition: Partition) -> None:
        """Nobody waits for a partition; see ``lanes.source.Source.release``."""

    async def aclose(self) -> None:
        """See ``lanes.source.Source.aclose``."""
        self._batches.clear()
        self._windows = None
        self._window = []
        self._unsettled.clear()

    # --- in

    def _next(self, room: Room) -> list[SourceEvent]:
        if self._announced or self._more():
            # The partitions of a batch, alone: no message comes before the event that its partition begins with.
            announced, self._announced = self._announced, []
            if announced:
                return announced
        if room.messages <= 0:
            return []
        events = self._deliver(room)
        if not events and self._finite and not self._exhausted and not self._more():
            self._exhausted = True
            events.append(Exhausted())
        return events

    def _more(self) -> bool:
        """Whether there is a row, which is then in the window; begins the next batch where one is over."""
        while self._next_row >= len(self._window):
            if self._windows is not None:
                window = next(self._windows, None)
                if window is not None:
                    self._window, self._next_row = window, 0
                    continue
                self._windows, self._window, self._next_row = None, [], 0
                self._batches.popleft()
                self._taken()
            if not self._batches:
                return False
            self._windows = windows(self._batches[0])
            self._announce(self._batches[0])
        return True

    def _announce(self, batch: Any) -> None:
        for number in pc.unique(batch.column("partition")).to_pylist():
            if number is not None and number not in self._places:
                place = self._places[number] = _Place(Partition(PartitionId(self._topic, number), self._reader))
                self._announced.append(Assigned(place.partition))

    def _deliver(self, room: Room) -> list[SourceEvent]:
        begun: list[_Place] = []
        places, paused = self._places, room.paused
        left, size = min(room.messages, _AT_ONCE), 0
        # Runs of a batch that is begun now wait for its partitions to be announced.
        while left > 0 and self._more() and not self._announced:
            first = index = self._next_row
            for index in range(first, min(len(self._window), first + left)):
                # One pass without a call but for the message: this is the work of every row.
                row = self._window[index]
                key, number, offset, value, _, headers, era = row
                place = places.get(number)
                if place is None or offset is None or offset <= place.highest:
                    raise self._disorder(row)
                if place.partition in paused or (era != self._era and not self._era_begun(row, begun)):
                    left = 0
                    break
                bytes_of = (0 if value is None else len(value)) + (0 if key is None else len(key))
                if headers:
                    bytes_of += headers_size(headers)
                if size and size + bytes_of > room.bytes:
                    left = 0
                    break
                size += bytes_of
                place.highest = offset
                if not place.run:
                    begun.append(place)
                place.run.append(Message(place.partition, offset, key, bytes_of, row, None))
                place.size += bytes_of
            else:
                index += 1
            self._next_row = index
            left -= index - first
        return [self._delivered(place) for place in begun]

    def _delivered(self, place: _Place) -> Delivered:
        run, size = place.run, place.size
        place.run, place.size = [], 0
        self._unsettled.update(run)
        self.delivered += len(run)
        return Delivered(place.partition, run, size)

    def _disorder(self, row: Row) -> SourceError:
        number, offset = row[PARTITION], row[OFFSET]
        if number is None or offset is None or offset < 0:
            return SourceError(
                f"{self._topic}: a row has partition {number} and offset {offset}: both must be known and 0 or more, "
                "or no order can be kept; leave such rows out"
            )
        highest = self._places[number].highest
        what = "comes twice" if offset == highest else f"comes behind {highest}"
        return SourceError(
            f"{self._topic}/{number}: position {offset} {what}: the rows of a task must rise within a partition; "
            "leave out aligned=True, and remove rows that are in the table twice"
        )

    def _era_begun(self, row: Row, begun: Sequence[_Place]) -> bool:
        era = row[ERA]
        if era is None or (self._era is not None and era < self._era):
            raise SourceError(
                f"{self._topic}/{row[PARTITION]}: position {row[OFFSET]} is of era {era} and comes behind era "
                f"{self._era}: the rows of a task must be sorted by era first"
            )
        if self._unsettled or begun:
            return False
        self._era = era
        return True
