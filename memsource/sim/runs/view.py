"""A run as text: the lanes over virtual time, and what happened to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from memsource.checkers.verdict import printable
from memsource.history.reader import Segment
from memsource.sim.runs.grid import GridRow, draw
from memsource.sim.runs.run import Run
from memsource.sim.runs.story import MARKS, Lane, Note, Story, Stroke
from memsource.sim.world.injection import Moment

__all__ = ["LINES", "render", "render_history"]

LINES: Final = 40
"""Lines of a view, at most."""

_NOTES: Final = 12
_LANES: Final = (12, 8, 5, 3, 2, 1)
_KEY_DIGITS: Final = 8
_NAME: Final = 16

_NAMED_KEY: Final = re.compile(r"key ([0-9a-f]{16})")
_NAMED_POSITION: Final = re.compile(r"(\S+) position (\d+)")


def render(run: Run, width: int = 100) -> str:
    """The lanes of a run over virtual time: plain text of at most ``LINES`` lines of ``width`` characters (40 or more).

    Of a run that is too large for it, the lanes that its findings name are shown, or else those to which something
    happened. Pure; O(rows).
    """
    plan = run.plan
    title = [plan.personality, f"seed {plan.seed}"]
    if plan.limit is not None:
        title.append(f"at most {_counted(plan.limit, 'message')}")
    title += [_counted(len(plan.faults), "fault"), _counted(len(plan.schedule.deviations), "deviation")]
    if plan.schedule.jumps:
        title.append(_counted(len(plan.schedule.jumps), "jump"))
    head = f"{', '.join(title)}; {run.seconds:g} virtual seconds"
    return "\n".join(_fit([head, *_history(run.segments, run.moments, run.findings.values(), width, LINES - 1)], width))


def render_history(
    segments: Sequence[Segment], moments: Sequence[Moment] = (), *, about: Iterable[str] = (), width: int = 100
) -> str:
    """The same of histories alone, which are on one clock. ``about``: texts that name what is to be seen."""
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
    # One lane of very many messages: what is last is what was found.
    kept = room - len(head) - 1
    return [*head, f"… {len(body) - kept} lines before are left out", *body[-kept:]]


def _body(story: Story, notes: Sequence[Note], lanes: Sequence[Lane], left: int, width: int, merged: bool) -> list[str]:
    """An empty line, the panels, what is left out, and the legend."""
    rows, columns = _rows(story, notes, lanes)
    times = [stroke.at for stroke in columns]
    alone = frozenset(range(len(columns))).intersection(rows[0].cells)
    lines: list[str] = []
    for panel in draw(times, rows, width=width, merged=merged, alone=alone):
        lines += ["", *panel]
    if left:
        lines += ["", f"{_counted(left, 'lane')} left out"]
    cut = any("~" in line for line in lines)
    return [*lines, "", *_legend(columns, cut, width)]


def _rows(story: Story, notes: Sequence[Note], lanes: Sequence[Lane]) -> tuple[list[GridRow], list[Stroke]]:
    """The rows of the grid, and the stroke of each of its columns."""
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
                if track.since is not None:
                    row.bars.append((column[track.since], last))
                rows.append(row)
    return rows, columns


def _ending(segment: Segment, story: Story) -> str:
    return "" if not segment.crashed else " (crashed)" if segment.member in story.crashes else " (without an end)"


def _ranked(story: Story, about: Iterable[str]) -> tuple[list[Lane], int]:
    """The lanes, those first that are to be seen, and how many of them the texts name."""
    text = "\n".join(about)
    keys = set(_NAMED_KEY.findall(text))
    named = {(partition, int(position)) for partition, position in _NAMED_POSITION.findall(text)}

    def rank(lane: Lane) -> int:
        names = (printable(lane.partition), lane.partition.rpartition("/")[2])
        if lane.key in keys or any((name, position) in named for name in names for position in lane.positions):
            return 0
        return 1 if lane.odd else 2

    ranks = {lane: rank(lane) for lane in story.lanes.values()}
    return sorted(ranks, key=lambda lane: ranks[lane]), sum(found == 0 for found in ranks.values())


def _counted(count: int, what: str) -> str:
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
