"""The checker of the message order within a key."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.verdict import at
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Timeline


class _Lane:
    """The positions of one key in an assignment or a partition: known, finally ended, and highest started."""

    __slots__ = ("_known", "_unfinished", "highest", "started")

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}  # position -> ended for good
        self._unfinished: list[int] = []  # heap; ended positions are removed when they reach its top
        self.highest = -1
        self.started: tuple[Segment, Row] | None = None  # the start of ``highest``

    def know(self, position: int) -> bool:
        """Record a position, and return whether the position is new."""
        if position in self._known:
            return False
        self._known[position] = False
        heappush(self._unfinished, position)
        return True

    def knows(self, position: int) -> bool:
        return position in self._known

    def finish(self, position: int) -> None:
        self._known[position] = True

    def finished(self, position: int) -> bool:
        return self._known.get(position, False)

    def first_unfinished(self) -> int | None:
        heap = self._unfinished
        while heap and self._known.get(heap[0], True):
            heappop(heap)
        return heap[0] if heap else None

    def start(self, segment: Segment, row: Row) -> None:
        if row.position >= self.highest:
            self.highest = row.position
            self.started = segment, row

    def highest_start(self) -> str:
        """Return the highest started position and its row, for a witness."""
        return f"position {self.highest} of its key" + (f" ({at(*self.started)})" if self.started else "")

    def forget(self, position: int) -> None:
        """Forget a position, because the row of its end may be in a gap."""
        self._known.pop(position, None)

    def forget_all(self) -> None:
        """Forget all positions except the highest started position, because any message may have ended in a gap."""
        self._known.clear()
        self._unfinished.clear()


class PerKeyOrder(PromiseChecker):
    """A message of a key starts only after all earlier messages of the key have finally ended.

    A message finally ends when its handler returns or its dead letter is confirmed, before the fence of its assignment.
    Within one assignment, the handlers of a key start in rising positions, and a retry repeats its own position. A
    message starts only after each earlier delivered message of its key has finally ended in the same assignment.
    Across assignments, members and restarts, a message starts only after each known earlier message of its key has
    finally ended in any assignment. First completions therefore follow the source order of the key. A message with
    outputs ends when the outputs are confirmed; in a batch, when its handler returns.

    The source may deliver a message too late (``redelivered``, cause ``late``). If a later message of its key has
    already started, a late message that had not ended before is a violation. If a late message had ended before, the
    broker had forgotten its settlement, and the note counts its repeat. The checker judges neither messages without a
    key nor messages with ``order="none"``. If keys share a lane, the checker judges each key separately.

    Args:
        timeline: History to judge.
        deleted: Messages that the broker has deleted, by the name of the partition and the position. After the end of
            an assignment, no message waits for the end of a deleted message. A former owner may still see deleted
            messages.
    """

    _needs_order = True

    def __init__(self, timeline: Timeline, *, deleted: Collection[tuple[str, int]] = ()) -> None:
        super().__init__(timeline)
        self._deleted = deleted
        self._gaps: set[Segment] = set()  # segments with a gap
        self._late: set[tuple[Segment, str, int, int]] = set()
        # Deleted messages that were first seen too late. A process that a freeze has kept from its loss may deliver
        # them, but must not start them.
        self._not_to_start: dict[tuple[str, int], str] = {}
        self._repeats = 0
        self._across: dict[tuple[str, str], _Lane] = {}
        self._within: dict[Segment, dict[tuple[str, int, str], _Lane]] = {segment: {} for segment in timeline.segments}

    def _note(self) -> str:
        return f"{self._repeats} late repeats" if self._repeats else ""

    @on("produced")
    def _produced(self, segment: Segment, row: Row) -> None:
        if row.key is not None:
            self._know_across(segment, row, row.key)

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        if row.key is not None:
            if (segment, row.partition, row.assignment, row.position) not in self._late:
                # A late message waits after queued messages, also when the broker delivers it once more.
                self._lane(segment, row, row.key).know(row.position)
            self._know_across(segment, row, row.key)

    def _know_across(self, segment: Segment, row: Row, key: str) -> _Lane:
        # A key may move from one piece of its partition to another.
        name = whole(row.partition), key
        lane = self._across.get(name)
        if lane is None:
            lane = self._across[name] = _Lane()
        if lane.know(row.position) and row.position < lane.highest and self._comparable(row):
            what = f"first seen after the start of {lane.highest_start()}"
            if row.event == "delivered" and (row.partition, row.position) in self._deleted:
                self._not_to_start[row.partition, row.position] = what
            else:
                self._findings.violation(segment, row, what)
        return lane

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.key is None:
            return
        if row.text == "settled":
            self._lane(segment, row, row.key).finish(row.position)
        elif row.text == "held" and segment in self._gaps:
            # The message may have ended in the gap and wait for its settlement, or may still wait for its handler.
            self._lane(segment, row, row.key).forget(row.position)
        elif row.text == "late":
            lane = self._lane(segment, row, row.key)
            lane.forget(row.position)
            repeats = self._know_across(segment, row, row.key).finished(row.position)
            if not repeats or lane.first_unfinished() is None:
                # Otherwise the queued messages that were delivered before the late message start before it.
                lane.know(row.position)
            self._late.add((segment, row.partition, row.assignment, row.position))

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        key, position = row.key, row.position
        if key is None or segment.rules.order == "none":
            return
        self._findings.checked += 1
        across = self._know_across(segment, row, key)
        lane = self._lane(segment, row, key)
        name = (segment, row.partition, row.assignment, position)
        if segment in self._gaps and not lane.knows(position):
            # The message was delivered before or in a gap, and the gap may hide its late delivery.
            self._late.add(name)
        lane.know(position)
        what = ""
        if late := self._not_to_start.pop((row.partition, position), ""):
            what = late
        elif name in self._late and across.finished(position):
            self._repeats += 1
        elif name in self._late and not self._comparable(row):
            # The message may have ended in rows that cannot be compared.
            pass
        elif position < lane.highest:
            what = f"started after {lane.highest_start()}"
        elif position > lane.highest:
            what = self._started_too_early(segment, row, lane, across)
        elif lane.finished(position):
            what = "started again after it had ended for good in the same assignment"
        # Otherwise the start is a retry. The first start of this message was judged, and lower unfinished positions
        # were delivered late.
        if what:
            self._findings.violation(segment, row, what)
        lane.start(segment, row)
        across.start(segment, row)

    def _started_too_early(self, segment: Segment, row: Row, lane: _Lane, across: _Lane) -> str:
        if segment in self._gaps and row.attempt > 1:
            # The start is a retry, and the first start is in the gap.
            return ""
        first = lane.first_unfinished()
        if first is not None and first < row.position:
            return f"started before position {first} of its key had ended for good in the same assignment"
        while (first := across.first_unfinished()) is not None and (row.partition, first) in self._deleted:
            across.finish(first)
        first = first if self._comparable(row) else None
        if first is not None and first < row.position:
            return f"started before position {first} of its key had ended for good"
        return ""

    @on("published", "dlq_confirmed")
    def _finished(self, segment: Segment, row: Row) -> None:
        if row.key is not None:
            self._lane(segment, row, row.key).finish(row.position)
            self._know_across(segment, row, row.key).finish(row.position)

    @on("ended")
    def _ended(self, segment: Segment, row: Row) -> None:
        # A batch handles later messages of a key before the outputs of an earlier one are confirmed.
        if row.text == "ok" or (row.text == "outputs" and segment.rules.batch):
            self._finished(segment, row)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._gaps.add(segment)
        for lane in self._within[segment].values():
            lane.forget_all()

    def _comparable(self, row: Row) -> bool:
        # An earlier position may have ended in a gap of any segment.
        return not self._gaps and row.partition not in self._incomparable

    def _lane(self, segment: Segment, row: Row, key: str) -> _Lane:
        lanes = self._within[segment]
        name = (row.partition, row.assignment, key)
        lane = lanes.get(name)
        if lane is None:
            lane = lanes[name] = _Lane()
        return lane
