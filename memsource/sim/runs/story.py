"""What a run's histories and faults say, as strokes on lines: who ran which message of which lane, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Final

from memsource.checkers.verdict import printable
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline
from memsource.sim.runs.grid import SAME
from memsource.sim.world.injection import Moment

__all__ = ["MARKS", "Lane", "Note", "Story", "Stroke"]

MARKS: Final[dict[str, str]] = {
    ".": "ok",
    "!": "error",
    "x": "cancelled",
    "+": "its worker was gone",
    "r": "held for a retry",
    "d": "dead letter (d? unconfirmed)",
    "a": "archived",
    "b": "blocked",
    "-": "given up",
    "z": "zombie",
    "k": "ack sent",
    "^": "redelivered",
    "c": "commit (c? unconfirmed, c! failed)",
}
"""What stands for what."""

_RESULTS: Final = {"ok": ".", "error": "!", "cancelled": "x"}
_OF_A_MESSAGE: Final = {
    "retry": "r",
    "archived": "a",
    "blocked": "b",
    "abandoned": "-",
    "ack": "k",
    "redelivered": "^",
}
_ODD: Final = frozenset("!x+rdab-z^")
_OWNERSHIP: Final = frozenset({"assigned", "revoking", "revoked", "lost"})


@dataclass(slots=True, eq=False)
class Stroke:
    """Something that happened at a time, in seconds; ``mark``: what of ``MARKS`` it is. Equal only to itself."""

    at: float
    text: str
    mark: str = ""


@dataclass(slots=True, eq=False)
class _Track:
    """A line of a lane, at which one handler runs at a time. ``bars``: strokes from a start to an end."""

    strokes: list[Stroke] = field(default_factory=list)
    bars: list[tuple[Stroke, Stroke]] = field(default_factory=list)
    running: tuple[Segment, int] | None = None
    since: Stroke | None = None


@dataclass(slots=True, eq=False)
class Lane:
    """What happened to the messages of a key of a partition. ``odd``: not just ran once and well.

    It has one track, and more where handlers of it ran at the same time.
    """

    partition: str
    key: str | None
    tracks: list[_Track] = field(default_factory=lambda: [_Track()])
    positions: dict[int, int] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    odd: bool = False


@dataclass(slots=True, eq=False)
class Note:
    """A line above the lanes: a fault, or who came to own what. ``rank``: 0 = the most important ones."""

    stroke: Stroke
    rank: int
    text: str
    worker: Segment | None = None
    event: str = ""
    partitions: list[str] = field(default_factory=list)


class Story:
    """The lanes, notes and commits of these histories of one run, in the order in which it all happened.

    ``letters``: how each worker is called. ``crashes``: the members that a fault has crashed.
    """

    def __init__(self, segments: Sequence[Segment], moments: Sequence[Moment] = ()) -> None:
        self.strokes: list[Stroke] = []
        self.lanes: dict[tuple[str, str | None], Lane] = {}
        self.commits: dict[str, list[Stroke]] = {}
        self.notes: list[Note] = []
        self.letters = dict(zip(segments, _letters(), strict=False))
        self._now = 0.0
        self._pending: dict[tuple[Segment, str, int, int], Stroke] = {}
        self._left: dict[Segment, set[tuple[str, int]]] = {
            segment: {(row.partition, row.assignment) for row in segment.rows if row.event in ("revoked", "lost")}
            for segment in segments
        }
        self.crashes = {moment.whom for moment in moments if moment.fault.kind == "crash"}
        self._tell(Timeline(segments), list(moments))

    # --- inside

    def _tell(self, timeline: Timeline, moments: list[Moment]) -> None:
        due = iter(moments)
        moment = next(due, None)
        for event, segment, row in timeline:
            while moment is not None and moment.at < max(row.mono, self._now):
                self._fault(moment)
                moment = next(due, None)
            self._now = max(self._now, row.mono)
            self._row(event, segment, row)
        while moment is not None:
            self._fault(moment)
            moment = next(due, None)
        # What comes behind everything else is the end of the run, and says nothing of it.
        while self.notes and self.notes[-1].rank == 2 and self.notes[-1].stroke is self.strokes[-1]:
            self.notes.pop()
            self.strokes.pop()

    def _row(self, event: str, segment: Segment, row: Row) -> None:
        if event == "started":
            self._started(segment, row)
        elif event == "ended" or (event == "zombie" and row.event == "ended"):
            self._ended(segment, row.position, self._lane(row), _RESULTS.get(row.text, "?"))
            if event == "zombie":
                self._mark(row, "z")
        elif event == "zombie":
            self._mark(row, "z")
        elif event in _OF_A_MESSAGE:
            # What was given up in the queue has not been seen yet.
            if event != "abandoned" or row.position in self._lane(row).ran:
                self._mark(row, _OF_A_MESSAGE[event])
        elif event == "dlq_sent":
            self._pending[segment, row.partition, row.assignment, row.position] = self._mark(row, "d", "d?")
        elif event == "dlq_confirmed":
            self._settled(segment, row, row.position, "d")
        elif event == "commit_sent":
            text = f"{self.letters[segment]}c{row.floor}"
            stroke = self._stroke(f"{text}? ", "c")
            self.commits.setdefault(row.partition, []).append(stroke)
            self._pending[segment, row.partition, row.assignment, -1 - row.floor] = stroke
        elif event in ("commit_ok", "commit_failed"):
            end = " " if event == "commit_ok" else "! "
            self._settled(segment, row, -1 - row.floor, f"{self.letters[segment]}c{row.floor}{end}")
        elif event in _OWNERSHIP:
            self._owned(event, segment, row)
        elif event == "over" and segment.crashed and segment.member not in self.crashes:
            self._gone(segment)

    def _stroke(self, text: str, mark: str = "") -> Stroke:
        stroke = Stroke(self._now, text, mark)
        self.strokes.append(stroke)
        return stroke

    def _lane(self, row: Row) -> Lane:
        where = row.partition, row.key
        if where not in self.lanes:
            self.lanes[where] = Lane(*where)
        return self.lanes[where]

    def _started(self, segment: Segment, row: Row) -> None:
        lane = self._lane(row)
        free = next((number for number, track in enumerate(lane.tracks) if track.running is None), len(lane.tracks))
        if free == len(lane.tracks):
            lane.tracks.append(_Track())
        track = lane.tracks[free]
        track.since = self._stroke(f"{self.letters[segment]}{row.position}")
        track.strokes.append(track.since)
        track.running = segment, row.position
        lane.odd |= row.position in lane.ran
        lane.ran.add(row.position)
        lane.positions[row.position] = free

    def _ended(self, segment: Segment, position: int, lane: Lane, mark: str) -> None:
        for track in lane.tracks:
            if track.running == (segment, position):
                stroke = self._stroke(mark, mark)
                track.strokes.append(stroke)
                assert track.since is not None, "it runs"
                track.bars.append((track.since, stroke))
                track.running = track.since = None
                lane.odd |= mark in _ODD

    def _mark(self, row: Row, mark: str, text: str | None = None) -> Stroke:
        lane = self._lane(row)
        track = lane.tracks[lane.positions.setdefault(row.position, 0)]
        lane.odd |= mark in _ODD
        latest = next((position for position in reversed(lane.positions) if position in lane.ran), None)
        # Of what ran last the number stands right in front of it.
        clear = track.running is None and latest == row.position
        stroke = self._stroke((text or mark) if clear else f"{text or mark}{row.position}", mark)
        track.strokes.append(stroke)
        return stroke

    def _settled(self, segment: Segment, row: Row, which: int, text: str) -> None:
        stroke = self._pending.pop((segment, row.partition, row.assignment, which), None)
        if stroke is not None:
            stroke.text = text if which < 0 else stroke.text.replace("?", "")

    def _owned(self, event: str, segment: Segment, row: Row) -> None:
        if event == "revoking" and (row.partition, row.assignment) in self._left[segment]:
            return
        last = self.notes[-1] if self.notes else None
        if (
            last is not None
            and (last.worker, last.event) == (segment, event)
            and last.stroke is self.strokes[-1]
            and self._now - last.stroke.at < SAME
        ):
            last.partitions.append(row.partition)
        else:
            last = Note(self._stroke(""), 1 if event == "lost" else 2, "", segment, event, [row.partition])
            self.notes.append(last)
        last.text = f"{self.letters[segment]} {event} {_listed(last.partitions)}"

    def _fault(self, moment: Moment) -> None:
        fault = moment.fault
        self._now = max(self._now, moment.at)
        worker = next((segment for segment in self.letters if segment.member == moment.whom), None)
        whom = printable(moment.whom) if worker is None else self.letters[worker]
        amount = f", {fault.amount:g} s" if fault.amount else ""
        text = f"fault: {fault.kind}{f' of {whom}' if whom else ''}, at boundary {fault.at}{amount}"
        self.notes.append(Note(self._stroke(""), 0, text))
        if fault.kind == "crash" and worker is not None and worker.crashed:
            self._gone(worker)

    def _gone(self, segment: Segment) -> None:
        for lane in self.lanes.values():
            for track in lane.tracks:
                if track.running is not None and track.running[0] is segment:
                    self._ended(segment, track.running[1], lane, "+")


def _letters() -> Iterator[str]:
    """A, B … Z, AA, AB …: as many as there are workers."""
    yield from ascii_uppercase
    yield from (first + second for first in _letters() for second in ascii_uppercase)


def _listed(partitions: Sequence[str]) -> str:
    """``orders/0,2``: the numbers of one topic together."""
    topics: dict[str, list[str]] = {}
    for partition in partitions:
        topic, slash, number = partition.rpartition("/")
        topics.setdefault(topic + slash, []).append(number)
    return ", ".join(printable(topic + ",".join(numbers)) for topic, numbers in topics.items())
