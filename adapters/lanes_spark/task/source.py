"""The source of one Spark task, which delivers a finite number of rows of Arrow batches.

The thread of the Spark task passes the batches to the source. A row becomes a message when the consumer has room. The
source assigns a partition at the first batch with its rows, and revokes no partition before the end of the task.

The task fails if a position does not rise within its partition, or if an earlier era follows a later era. Rows of the
next era wait until the consumer has settled all earlier rows. In the next era a key may have another partition, and a
lane keeps no order across partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import repeat
from operator import lt
from typing import Any, Final

import anyio
import pyarrow.compute as pc  # type: ignore[import-untyped]

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Delivered, Exhausted, SourceEvent, SourceTraits
from lanes_spark.task.rows import ERA, OFFSET, PARTITION, Row, RowReader, Window, windows

_AT_ONCE: Final = 4_096
"""Maximum number of messages that one ``receive`` returns."""


class _Place:
    """Progress in a topic partition.

    Args:
        partition: The partition.

    Attributes:
        partition: The partition.
        highest: Highest position that the source has read; -1 before the first row.
        run: Messages to deliver next.
        size: Bytes of the messages in ``run``.
    """

    __slots__ = ("highest", "partition", "run", "size")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.highest = -1
        self.run: list[Message] = []
        self.size = 0


class ArrowSource:
    """The rows of Arrow batches as a source.

    Args:
        topic: Topic of the rows.
        taken: Function that the source calls on the event loop when it has delivered the last row of a batch.
        settled: Function that receives settled messages on the event loop, once for each message.

    Attributes:
        delivered: Number of delivered rows.
        pace: Async function that each ``receive`` awaits first; None = no wait.
    """

    def __init__(
        self,
        topic: str,
        *,
        taken: Callable[[], None] = lambda: None,
        settled: Callable[[Sequence[Message]], None] = lambda messages: None,
    ) -> None:
        self.delivered = 0
        self.pace: Callable[[], Awaitable[None]] | None = None
        self._topic = topic
        self._taken = taken
        self._settled = settled
        self._reader = RowReader(topic)
        self._places: dict[int, _Place] = {}
        self._batches: deque[Any] = deque()
        self._windows: Iterator[Window] | None = None  # windows of the first batch in ``_batches``
        self._window: Window
        self._rows = self._next_row = self._next_run = 0  # of the window
        self._announced: list[SourceEvent] = []
        self._unsettled: set[Message] = set()
        self._era: int | None = None
        self._finite = False
        self._exhausted = False
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<ArrowSource {self._topic}: {self.delivered} delivered, {len(self._unsettled)} unsettled>"

    # --- calls of the task

    @property
    def left(self) -> bool:
        """Whether a row is undelivered or unsettled, or the source has not reported the end of the rows yet."""
        return bool(self._batches or self._unsettled) or not self._exhausted

    def offer(self, batch: Any) -> None:
        """Append a batch to the source's queue. Does not block."""
        self._batches.append(batch)
        self._wake.set()

    def finish(self) -> None:
        """Declare that no more rows follow. Does not block. Idempotent."""
        self._finite = True
        self._wake.set()

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """See ``lanes.source.Source.open``."""
        return SourceTraits(name=f"{self._topic} on Spark", system="spark", remembers=True, exclusive=False)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """See ``lanes.source.Source.receive``. Raises ``SourceError`` for wrong columns or a wrong order of rows."""
        if self.pace is not None:
            await self.pace()
        while True:
            # No await follows before the return, so a cancelled receive has removed no rows.
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
            # The next era may wait for these settlements.
            self._wake.set()

    async def extend(self, messages: Sequence[Message]) -> None:
        """Do nothing, because rows need no lease; see ``lanes.source.Source.extend``."""

    async def release(self, partition: Partition) -> None:
        """Do nothing, because no other task waits for a partition; see ``lanes.source.Source.release``."""

    async def aclose(self) -> None:
        """See ``lanes.source.Source.aclose``."""
        self._batches.clear()
        self._windows = None
        self._rows = self._next_row = 0
        self._unsettled.clear()

    # --- rows to messages

    def _next(self, room: Room) -> list[SourceEvent]:
        if self._announced or self._more():
            # Return assignments without messages, so that each message follows the assignment of its partition.
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
        """Load the next row into the window, from the next batch if necessary. Returns whether a row remains."""
        while self._next_row >= self._rows:
            if self._windows is not None:
                window = next(self._windows, None)
                if window is not None:
                    self._window, self._rows = window, len(window.rows)
                    self._next_row = self._next_run = 0
                    continue
                self._windows = None
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
        left, size = min(room.messages, _AT_ONCE), 0
        # Rows of a new batch wait until the source has assigned its partitions.
        while left > 0 and self._more() and not self._announced:
            # The work for single rows dominates the cost of a task, so each step handles a whole group of rows.
            window, first = self._window, self._next_row
            number, era, end = window.runs[self._next_run]
            place = None if number is None else self._places[number]
            if place is None:
                raise self._disorder(window.rows[first])
            if place.partition in room.paused or (era != self._era and not self._era_begun(window.rows[first], begun)):
                break
            last = min(end, first + left)
            more = sum(window.sizes[first:last])
            if size + more > room.bytes:
                # Deliver a message above the bound alone.
                last, more = self._fitting(window, first, last, room.bytes - size, alone=not size)
                left = last - first
                if not left:
                    break
            self._check_rising(place, window, first, last)
            if not place.run:
                begun.append(place)
            place.run += map(
                Message,
                repeat(place.partition),
                window.offsets[first:last],
                window.keys[first:last],
                window.sizes[first:last],
                window.rows[first:last],
                repeat(None),
            )
            place.size += more
            size += more
            left -= last - first
            self._next_row = last
            if last == end:
                self._next_run += 1
        return [self._delivered(place) for place in begun]

    def _fitting(self, window: Window, first: int, last: int, room: int, *, alone: bool) -> tuple[int, int]:
        """Return the end of the rows that fit into ``room`` bytes, and the size of these rows.

        With ``alone`` the first row always fits.
        """
        size = 0
        for index in range(first, last):
            more = window.sizes[index]
            if size + more > room and not (alone and index == first):
                return index, size
            size += more
        return last, size

    def _check_rising(self, place: _Place, window: Window, first: int, last: int) -> None:
        """Raise ``SourceError`` unless positions rise."""
        offsets = window.offsets[first:last]
        try:
            rising = offsets[0] > place.highest and all(map(lt, offsets, offsets[1:]))
        except TypeError:
            # An offset is null.
            rising = False
        if not rising:
            for row, offset in zip(window.rows[first:last], offsets, strict=True):
                if offset is None or offset <= place.highest:
                    raise self._disorder(row)
                place.highest = offset
        place.highest = offsets[-1]

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
                f"{self._topic}: a row has partition {number} and offset {offset}, but an order needs both, each 0 or "
                "more; remove such rows from the source"
            )
        highest = self._places[number].highest
        what = "is repeated" if offset == highest else f"follows position {highest}"
        return SourceError(
            f"{self._topic}/{number}: position {offset} {what}: positions of a task must rise within a partition; "
            "leave out aligned=True, and remove repeated rows from the table"
        )

    def _era_begun(self, row: Row, begun: Sequence[_Place]) -> bool:
        era = row[ERA]
        if era is None or (self._era is not None and era < self._era):
            raise SourceError(
                f"{self._topic}/{row[PARTITION]}: position {row[OFFSET]} is of era {era} and follows era "
                f"{self._era}: sort the rows of a task by era first"
            )
        if self._unsettled or begun:
            return False
        self._era = era
        return True
