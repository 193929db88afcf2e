"""The report of ``lanes check``: the counts of a history, and the verdicts of its checkers as plain text."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from memsource.checkers import BoundedInFlight, Verdict, check, feed
from memsource.checkers.verdict import printable
from memsource.history.reader import HistoryError, Segment, read
from memsource.history.rows import whole
from memsource.history.timeline import Timeline

PASSED: Final = 0
VIOLATED: Final = 1
UNPROVEN: Final = 2
UNREADABLE: Final = 3

_URGENCY: Final = ("violated", "unproven", "passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of one history.

    Attributes:
        segments: Number of segments, one for each run of a process.
        crashed: Number of segments without an ``end`` row.
        members: Number of distinct members.
        messages: Number of distinct messages, by partition and position.
        events: Number of rows by event.
        redeliveries: Number of redeliveries by cause: ``held``, ``settled``, ``late``, and ``restart`` (started again
            in another segment).
        dropped: Number of rows that the processes failed to write.
        gaps: Number of gaps in which rows are missing.
        peak_in_flight: Maximum number of messages in flight at one member.
    """

    segments: int
    crashed: int
    members: int
    messages: int
    events: Mapping[str, int]
    redeliveries: Mapping[str, int]
    dropped: int
    gaps: int
    peak_in_flight: int


class Checked(NamedTuple):
    """The result of ``check_files``.

    Attributes:
        verdicts: One verdict for each checker; empty without a readable history.
        text: The report, or the reason why the check read no history.
        status: Exit status for ``lanes check``.
    """

    verdicts: list[Verdict]
    text: str
    status: int


def check_files(paths: Iterable[str | os.PathLike[str]]) -> Checked:
    """Read histories and check every promise over them. Blocks.

    Invalid content raises no error, and the report names it.

    Args:
        paths: Files and directories to read.

    Returns:
        The verdicts, the report, and an exit status: 0 = the run kept all promises, 1 = it violated a promise, 2 = a
        promise is unproven, 3 = no history is readable.
    """
    try:
        segments = read(paths)
    except HistoryError as error:
        return Checked([], printable(str(error), limit=2000), UNREADABLE)
    verdicts = check(segments)
    return Checked(verdicts, render(verdicts, counts(segments)), exit_status(verdicts))


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """Return the exit status for some verdicts.

    Args:
        verdicts: Verdicts of one history.

    Returns:
        0 if all promises passed, 1 if a history violates a promise, 2 otherwise.
    """
    statuses = {verdict.status for verdict in verdicts}
    return VIOLATED if "violated" in statuses else UNPROVEN if "unproven" in statuses else PASSED


def counts(segments: Sequence[Segment]) -> Counts:
    """Count the figures of a history. Pure. Takes O(rows) time.

    Args:
        segments: Segments of the history, in any order.

    Returns:
        The figures of all segments together.
    """
    timeline = Timeline(segments)
    flow = BoundedInFlight(timeline)
    feed(timeline, [flow])
    events = Counter(row.event for segment in segments for row in segment.rows if row.event != "gap")
    redeliveries: Counter[str] = Counter(held=0, settled=0, late=0, restart=0)
    messages: set[tuple[str, int]] = set()
    started: dict[tuple[str, int], Segment] = {}
    dropped = 0
    for event, segment, row in timeline:
        if row.position >= 0:
            messages.add((whole(row.partition), row.position))
        if event == "redelivered":
            redeliveries[row.text] += 1
        elif event == "dropped":
            dropped += int(row.number)
        elif event == "started":
            place = whole(row.partition), row.position
            if started.setdefault(place, segment) is not segment:
                started[place] = segment
                redeliveries["restart"] += 1
    return Counts(
        segments=len(segments),
        crashed=sum(segment.crashed for segment in segments),
        members=len({segment.member for segment in segments}),
        messages=len(messages),
        events=dict(events),
        redeliveries=dict(redeliveries),
        dropped=dropped,
        gaps=sum(len(segment.gaps) for segment in segments),
        peak_in_flight=flow.peak,
    )


def render(verdicts: Sequence[Verdict], figures: Counts) -> str:
    """Return the report as text: the figures, then the verdicts with their witnesses and reasons, violations first.

    Args:
        verdicts: Verdicts of the history.
        figures: Figures of the same history.

    Returns:
        Lines of text, without a newline at the end.
    """
    rows = sum(figures.events.values())
    lines = [
        f"segments: {figures.segments}, {figures.crashed} of them without an end, of {figures.members} members",
        f"messages: {figures.messages}, in {rows} rows; {figures.dropped} rows dropped, {figures.gaps} gaps",
        "events: " + _listed(figures.events),
        "redeliveries: " + _listed(figures.redeliveries),
        "",
    ]
    for verdict in sorted(verdicts, key=lambda verdict: _URGENCY.index(verdict.status)):
        note = f", {verdict.note}" if verdict.note else ""
        found = f", {verdict.violations} violations" if verdict.violations else ""
        lines.append(f"{verdict.status:<9} {verdict.name:<23} {verdict.checked} checked{note}{found}")
        lines += [f"          ! {witness}" for witness in verdict.witnesses]
        if verdict.violations > len(verdict.witnesses):
            lines.append(f"          ! and {verdict.violations - len(verdict.witnesses)} more")
        lines += [f"          ? {reason}" for reason in verdict.reasons]
    return "\n".join(lines)


def _listed(figures: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(name)} {count}" for name, count in figures.items())
