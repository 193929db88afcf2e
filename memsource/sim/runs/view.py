"""The picture of a run as text: the lanes over virtual time, and the events of their messages."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Final

from memsource.checkers.verdict import printable
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline
from memsource.sim.runs.grid import SAME, GridRow, draw
from memsource.sim.runs.run import Run
from memsource.sim.world.injection import Moment

LINES: Final = 40
"""The most lines of a view."""

_NOTES: Final = 12
_LANES: Final = (12, 8, 5, 3, 2, 1)
_KEY_DIGITS: Final = 8
_NAME: Final = 16

_NAMED_KEY: Final = re.compile(r"key ([0-9a-f]{16})")
_NAMED_POSITION: Final = re.compile(r"(\S+) position (\d+)")

MARKS: Final[dict[str, str]] = {
    ".": "ok",
    ">": "ok, with outputs",
    "p": "outputs confirmed",
    "f": "outputs failed",
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
"""The mark of each kind of event."""

_RESULTS: Final = {"ok": ".", "outputs": ">", "error": "!", "cancelled": "x"}
_OF_A_MESSAGE: Final = {
    "retry": "r",
    "published": "p",
    "publish_failed": "f",
    "archived": "a",
    "blocked": "b",
    "abandoned": "-",
    "ack": "k",
    "redelivered": "^",
}
_ODD: Final = frozenset("!x+rdab-z^f")
_OWNERSHIP: Final = frozenset({"assigned", "revoking", "revoked", "lost"})


@dataclass(slots=True, eq=False)
class Stroke:
    """An event in the view. Two different strokes are never equal.

    Attributes:
        at: Time in seconds.
        text: Text in the view.
        mark: Name of the event's mark in ``MARKS``; "" = no mark.
    """

    at: float
    text: str
    mark: str = ""


@dataclass(slots=True, eq=False)
class _Track:
    """A line of a lane, on which one handler runs at a time.

    Attributes:
        strokes: Events on the line.
        bars: First and last stroke of each handler.
        running: Worker, position and first stroke of the running handler; None = no handler runs.
    """

    strokes: list[Stroke] = field(default_factory=list)
    bars: list[tuple[Stroke, Stroke]] = field(default_factory=list)
    running: tuple[Segment, int, Stroke] | None = None


@dataclass(slots=True, eq=False)
class LaneView:
    """The events of one lane: the messages of a partition with one key.

    Attributes:
        partition: The partition.
        key: Hash of the key; None = messages without a key.
        tracks: Lines of the lane; more than one if handlers of the lane ran at the same time.
        positions: Number of the track of each message, by position.
        ran: Positions whose handler has started.
        odd: Whether a message of the lane had an unusual event, such as a failure or a second start.
    """

    partition: str
    key: str | None
    tracks: list[_Track] = field(default_factory=lambda: [_Track()])
    positions: dict[int, int] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    odd: bool = False


@dataclass(slots=True, eq=False)
class Note:
    """A line above the lanes: a fault, or a change of ownership.

    Attributes:
        stroke: The event.
        rank: Rank of importance; 0 = most important.
        text: Text of the line.
        worker: Worker whose ownership changes; None for a fault.
        event: Event of the history; "" for a fault.
        partitions: Partitions whose ownership changes.
    """

    stroke: Stroke
    rank: int
    text: str
    worker: Segment | None = None
    event: str = ""
    partitions: list[str] = field(default_factory=list)


class Story:
    """The lanes, notes and commits of the histories of one run, in order.

    Args:
        segments: Histories of the workers.
        moments: Faults that have happened.

    Attributes:
        strokes: All events, in order.
        lanes: Lanes by partition and key.
        commits: Commits by partition.
        notes: Faults and changes of ownership.
        letters: Letter of each worker in the view.
        crashes: Names of members that crashed by a fault.
    """

    def __init__(self, segments: Sequence[Segment], moments: Sequence[Moment] = ()) -> None:
        self.strokes: list[Stroke] = []
        self.lanes: dict[tuple[str, str | None], LaneView] = {}
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
        self._tell(Timeline(segments), moments)

    # --- inside

    def _tell(self, timeline: Timeline, moments: Sequence[Moment]) -> None:
        due = deque(moments)
        for event, segment, row in timeline:
            while due and due[0].at < max(row.mono, self._now):
                self._fault(due.popleft())
            self._now = max(self._now, row.mono)
            self._row(event, segment, row)
        for moment in due:
            self._fault(moment)
        # Changes of ownership after all other events belong to the end of the run, and are not shown.
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
            # A message that was given up before its first attempt is not shown.
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

    def _lane(self, row: Row) -> LaneView:
        where = row.partition, row.key
        if where not in self.lanes:
            self.lanes[where] = LaneView(*where)
        return self.lanes[where]

    def _started(self, segment: Segment, row: Row) -> None:
        lane = self._lane(row)
        free = next((number for number, track in enumerate(lane.tracks) if track.running is None), len(lane.tracks))
        if free == len(lane.tracks):
            lane.tracks.append(_Track())
        track = lane.tracks[free]
        stroke = self._stroke(f"{self.letters[segment]}{row.position}")
        track.strokes.append(stroke)
        track.running = segment, row.position, stroke
        lane.odd |= row.position in lane.ran
        lane.ran.add(row.position)
        lane.positions[row.position] = free

    def _ended(self, segment: Segment, position: int, lane: LaneView, mark: str) -> None:
        for track in lane.tracks:
            if track.running is not None and track.running[:2] == (segment, position):
                stroke = self._stroke(mark, mark)
                track.strokes.append(stroke)
                track.bars.append((track.running[2], stroke))
                track.running = None
                lane.odd |= mark in _ODD

    def _mark(self, row: Row, mark: str, text: str | None = None) -> Stroke:
        lane = self._lane(row)
        track = lane.tracks[lane.positions.setdefault(row.position, 0)]
        lane.odd |= mark in _ODD
        latest = next((position for position in reversed(lane.positions) if position in lane.ran), None)
        # The position of the last message is directly before the mark.
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
    """Yield A, B … Z, AA, AB … as letters of the workers."""
    yield from ascii_uppercase
    yield from (first + second for first in _letters() for second in ascii_uppercase)


def _listed(partitions: Sequence[str]) -> str:
    """Return partitions as text, with the numbers of a topic together, such as ``orders/0,2``."""
    topics: dict[str, list[str]] = {}
    for partition in partitions:
        topic, slash, number = partition.rpartition("/")
        topics.setdefault(topic + slash, []).append(number)
    return ", ".join(printable(topic + ",".join(numbers)) for topic, numbers in topics.items())


def render(run: Run, width: int = 100) -> str:
    """Draw the lanes of a run over virtual time, as plain text of at most ``LINES`` lines. Pure; O(rows).

    If the run is large, the view omits lanes. The view shows the lanes that a finding names, else lanes with unusual
    events first.

    Args:
        run: The run.
        width: Characters of a line, 40 or more.

    Returns:
        The text.
    """
    plan = run.plan
    title = [plan.personality, f"seed {plan.seed}"]
    if plan.limit is not None:
        title.append(f"at most {counted(plan.limit, 'message')}")
    title += [counted(len(plan.faults), "fault"), counted(len(plan.schedule.deviations), "deviation")]
    if plan.schedule.jumps:
        title.append(counted(len(plan.schedule.jumps), "jump"))
    head = f"{', '.join(title)}; {run.seconds:g} virtual seconds"
    return "\n".join(_fit([head, *_history(run.segments, run.moments, run.findings.values(), width, LINES - 1)], width))


def render_history(
    segments: Sequence[Segment], moments: Sequence[Moment] = (), *, about: Iterable[str] = (), width: int = 100
) -> str:
    """Draw the lanes of several histories, whose times are of one clock.

    Args:
        segments: Histories of the workers.
        moments: Faults that have happened.
        about: Texts of findings; the view shows the lanes that they name.
        width: Characters of a line, 40 or more.

    Returns:
        The text.
    """
    return "\n".join(_fit(_history(segments, moments, about, width, LINES), width))


def _history(
    segments: Sequence[Segment], moments: Sequence[Moment], about: Iterable[str], width: int, room: int
) -> list[str]:
    if not segments:
        return ["no worker has begun"]
    story = Story(segments, moments)
    workers = ", ".join(
        f"{letter} {printable(segment.member)}{_ending(segment, story)}" for segment, letter in story.letters.items()
    )
    chosen = sorted(story.notes, key=lambda note: (note.rank, note.stroke.at))[:_NOTES]
    notes = [note for note in story.notes if note in chosen]
    head = [f"workers: {workers}"]
    head += [f"{number:>3} {note.stroke.at:>9.3f} s  {note.text}" for number, note in enumerate(notes, 1)]
    if len(notes) < len(story.notes):
        head.append(f"    and {len(story.notes) - len(notes)} more")
    ranked, named = _ranked(story, about)
    body: list[str] = []
    counts = (len(ranked), *(min(count, named or len(ranked)) for count in _LANES))
    for count in dict.fromkeys(counts):
        if count > max(room - len(head), 1):
            continue
        for merged in (False, True):
            body = _body(story, notes, ranked[:count], len(ranked) - count, width, merged)
            if len(head) + len(body) <= room:
                return head + body
    # If a single lane has too many lines, only the last lines are shown, because they show the finding.
    kept = room - len(head) - 1
    return [*head, f"… {len(body) - kept} lines before are left out", *body[-kept:]]


def _body(
    story: Story, notes: Sequence[Note], lanes: Sequence[LaneView], left: int, width: int, merged: bool
) -> list[str]:
    """Return the panels, the count of omitted lanes and the legend as lines, separated by empty lines."""
    rows, columns = _rows(story, notes, lanes)
    times = [stroke.at for stroke in columns]
    alone = frozenset(range(len(columns))).intersection(rows[0].cells)
    lines: list[str] = []
    for panel in draw(times, rows, width=width, merged=merged, alone=alone):
        lines += ["", *panel]
    if left:
        lines += ["", f"{counted(left, 'lane')} left out"]
    cut = any("~" in line for line in lines)
    return [*lines, "", *_legend(columns, cut, width)]


def _rows(story: Story, notes: Sequence[Note], lanes: Sequence[LaneView]) -> tuple[list[GridRow], list[Stroke]]:
    """Return the rows of the grid, and the stroke of each of its columns."""
    partitions = sorted({lane.partition for lane in lanes}, key=_natural)
    shown = {note.stroke for note in notes}
    for lane in lanes:
        shown.update(stroke for track in lane.tracks for stroke in track.strokes)
    for partition in partitions:
        shown.update(story.commits.get(partition, ()))
    columns = [stroke for stroke in story.strokes if stroke in shown]
    column = {stroke: number for number, stroke in enumerate(columns)}
    last = len(columns) - 1
    rows = [GridRow("events", {column[note.stroke]: f"{number} " for number, note in enumerate(notes, 1)})]
    for partition in partitions:
        name = printable(partition, _NAME)
        commits = story.commits.get(partition)
        if commits:
            rows.append(GridRow(f"{name} commits", {column[stroke]: stroke.text for stroke in commits}))
        for lane in lanes:
            if lane.partition != partition:
                continue
            for number, track in enumerate(lane.tracks):
                key = "-" if lane.key is None else lane.key[:_KEY_DIGITS]
                row = GridRow(f"{name} {key}" if number == 0 else "")
                row.cells = {column[stroke]: stroke.text for stroke in track.strokes}
                row.bars = [(column[start], column[end]) for start, end in track.bars]
                if track.running is not None:
                    row.bars.append((column[track.running[2]], last))
                rows.append(row)
    return rows, columns


def _ending(segment: Segment, story: Story) -> str:
    return "" if not segment.crashed else " (crashed)" if segment.member in story.crashes else " (without an end)"


def _ranked(story: Story, about: Iterable[str]) -> tuple[list[LaneView], int]:
    """Return the lanes and the number of named lanes; named lanes precede lanes with unusual events."""
    text = "\n".join(about)
    keys = set(_NAMED_KEY.findall(text))
    named = {(partition, int(position)) for partition, position in _NAMED_POSITION.findall(text)}

    def rank(lane: LaneView) -> int:
        names = (printable(lane.partition), lane.partition.rpartition("/")[2])
        if lane.key in keys or any((name, position) in named for name in names for position in lane.positions):
            return 0
        return 1 if lane.odd else 2

    ranks = {lane: rank(lane) for lane in story.lanes.values()}
    return sorted(ranks, key=lambda lane: ranks[lane]), sum(found == 0 for found in ranks.values())


def counted(count: int, what: str) -> str:
    """Return a number with its noun.

    Args:
        count: The number.
        what: The noun, in the singular.

    Returns:
        The text.
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def _natural(partition: str) -> tuple[str, int, str]:
    topic, _, number = partition.rpartition("/")
    return topic, len(number), number


def _legend(columns: Sequence[Stroke], cut: bool, width: int) -> list[str]:
    used = {stroke.mark for stroke in columns}
    words = ["A7== A runs position 7", *(f"{mark} {what}" for mark, what in MARKS.items() if mark in used)]
    if cut:
        words.append("~ time cut out")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 2 > width:
            lines.append(word)
        else:
            lines[-1] += f", {word}"
    return lines


def _fit(lines: Iterable[str], width: int) -> list[str]:
    width = max(width, 40)
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
