"""The order of a key."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from memsource.checkers.verdict import Findings, Handler, Verdict, at
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["PerKeyOrder"]


class _Lane:
    """The positions of one key within some scope: which are known, which ended finally, the highest started."""

    __slots__ = ("_known", "_unfinished", "highest", "started")

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}  # position -> ended finally
        self._unfinished: list[int] = []  # heap; what ended is removed when it comes up
        self.highest = -1
        self.started: tuple[Segment, Row] | None = None  # the start of ``highest``

    def know(self, position: int) -> bool:
        """Note a position; True when it is new."""
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
        """For a witness: the highest position started, and where."""
        return f"position {self.highest} of its key" + (f" ({at(*self.started)})" if self.started else "")

    def forget(self, position: int) -> None:
        """It may have ended unseen, or not."""
        self._known.pop(position, None)

    def forget_all(self) -> None:
        """Anything may have ended unseen; what was started was started."""
        self._known.clear()
        self._unfinished.clear()


class PerKeyOrder:
    """Messages of a key are handled in source order: none starts before all earlier ones ended finally.

    *Finally* is: the handler returned, or the dead letter was confirmed; and the assignment was not fenced then.
    Within one assignment the handlers of a key start in rising positions (a retry repeats its own), and none
    starts before every earlier position that was delivered there has ended finally there. Across assignments,
    members and restarts a position starts only when every earlier one of its key that was ever delivered or
    produced has ended finally somewhere. So first completions follow source order per key.

    A message that the broker delivers too late (``redelivered``, cause ``late``) is a violation when it had not
    ended before: the order was broken, whoever broke it. When it had, it is a repeat of what the broker forgot,
    and the note counts it. Keyless messages have no order, and under the order ``none`` no message has. Where keys
    share a lane, or a whole partition is one, each key is judged by itself.
    """

    name = "PerKeyOrder"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._incomparable = timeline.incomparable
        self._gaps: set[Segment] = set()  # segments whose gap is behind
        self._late: set[tuple[Segment, str, int, int]] = set()
        self._repeats = 0
        self._across: dict[tuple[str, str], _Lane] = {}
        self._within: dict[Segment, dict[tuple[str, int, str], _Lane]] = {segment: {} for segment in timeline.segments}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "produced": self._produced,
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        note = f"{self._repeats} late repeats" if self._repeats else ""
        return self._findings.verdict(across=True, note=note)

    def _produced(self, segment: Segment, row: Row) -> None:
        if row.key is not None:
            self._know_across(segment, row, row.key)

    def _delivered(self, segment: Segment, row: Row) -> None:
        if row.key is not None:
            self._lane(segment, row, row.key).know(row.position)
            self._know_across(segment, row, row.key)

    def _know_across(self, segment: Segment, row: Row, key: str) -> _Lane:
        lane = self._across.get((row.partition, key))
        if lane is None:
            lane = self._across[row.partition, key] = _Lane()
        if lane.know(row.position) and row.position < lane.highest and self._comparable(row):
            self._findings.violation(segment, row, f"first seen after the start of {lane.highest_start()}")
        return lane

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.key is None:
            return
        if row.text == "settled":
            self._lane(segment, row, row.key).finish(row.position)
        elif row.text == "held" and segment in self._gaps:
            # It may have ended in the gap, and wait only to be settled; or it is still to be handled.
            self._lane(segment, row, row.key).forget(row.position)
        elif row.text == "late":
            lane = self._lane(segment, row, row.key)
            lane.forget(row.position)
            repeats = self._know_across(segment, row, row.key).finished(row.position)
            if not repeats or lane.first_unfinished() is None:
                # Else what was delivered before it, and is still queued, starts before it.
                lane.know(row.position)
            self._late.add((segment, row.partition, row.assignment, row.position))

    def _started(self, segment: Segment, row: Row) -> None:
        key, position = row.key, row.position
        if key is None or segment.rules.order == "none":
            return
        self._findings.checked += 1
        across = self._know_across(segment, row, key)
        lane = self._lane(segment, row, key)
        name = (segment, row.partition, row.assignment, position)
        if segment in self._gaps and not lane.knows(position):
            # Delivered in or before a gap: it may have been noted there that it came late.
            self._late.add(name)
        lane.know(position)
        what = ""
        if name in self._late and across.finished(position):
            self._repeats += 1
        elif name in self._late and not self._comparable(row):
            # It may have ended where this cannot be seen.
            pass
        elif position < lane.highest:
            what = f"started after {lane.highest_start()}"
        elif position > lane.highest:
            what = self._started_too_early(segment, row, lane, across)
        elif lane.finished(position):
            what = "started again after it had ended finally in the same assignment"
        # Else it is a retry: what is unfinished below it was so at its first start, or came late.
        if what:
            self._findings.violation(segment, row, what)
        lane.start(segment, row)
        across.start(segment, row)

    def _started_too_early(self, segment: Segment, row: Row, lane: _Lane, across: _Lane) -> str:
        if segment in self._gaps and row.attempt > 1:
            # A retry, whose first start is in the gap.
            return ""
        first = lane.first_unfinished()
        if first is not None and first < row.position:
            return f"started before position {first} of its key had ended finally in the same assignment"
        first = across.first_unfinished() if self._comparable(row) else None
        if first is not None and first < row.position:
            return f"started before position {first} of its key had ended finally"
        return ""

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        if row.key is not None:
            self._lane(segment, row, row.key).finish(row.position)
            self._know_across(segment, row, row.key).finish(row.position)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._gaps.add(segment)
        for lane in self._within[segment].values():
            lane.forget_all()

    def _comparable(self, row: Row) -> bool:
        # Behind any gap an earlier position may have ended unseen, in whichever segment it was.
        return not self._gaps and row.partition not in self._incomparable

    def _lane(self, segment: Segment, row: Row, key: str) -> _Lane:
        lanes = self._within[segment]
        name = (row.partition, row.assignment, key)
        lane = lanes.get(name)
        if lane is None:
            lane = lanes[name] = _Lane()
        return lane
