"""Text in columns over time: rows of short marks and bars, in panels of a limited width.

A column is one event. Columns follow the order of time, but distances between columns are not to scale. A blank between
two columns stands for a pause, and ``~`` for a pause of ``CUT`` seconds or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

CUT: Final = 0.5
"""Minimum length in seconds of a pause with the symbol ``~``."""

SAME: Final = 1e-3
"""Minimum length in seconds of a pause with a blank as symbol. A shorter pause is not drawn."""

_WIDEST: Final = 24
_MARGIN: Final = 2


@dataclass(slots=True)
class GridRow:
    """A row of the grid.

    Attributes:
        label: Text before the row.
        cells: Text of each column of the row.
        bars: First and last column of each bar.
    """

    label: str
    cells: dict[int, str] = field(default_factory=dict)
    bars: list[tuple[int, int]] = field(default_factory=list)


def draw(
    times: Sequence[float], rows: Sequence[GridRow], *, width: int, merged: bool, alone: AbstractSet[int] = frozenset()
) -> list[list[str]]:
    """Draw panels of lines. Each panel begins with a line of times, and omits rows that are empty in the panel. Pure.

    Args:
        times: Time of each column in seconds, in rising order.
        rows: Rows to draw.
        width: Characters of a line, at least 40.
        merged: Whether the grid draws columns of the same time as one column.
        alone: Columns that the grid draws separately even with ``merged``.

    Returns:
        One list of lines for each panel, in order of time.
    """
    if not times:
        return []
    groups = _merged(times, rows, alone) if merged else [[column] for column in range(len(times))]
    label = max(len(row.label) for row in rows) + _MARGIN
    room = max(width, 40) - label
    lines = [_Line(row, groups) for row in rows]
    widths = [min(room - 1, max(1, *(len(line.texts[i]) for line in lines))) for i in range(len(groups))]
    starts = [times[group[0]] for group in groups]
    gaps = [""] + [_gap(times[one[-1]], times[other[0]]) for one, other in pairwise(groups)]
    panels = []
    for first, last in _folded(gaps, widths, room):
        shown = [line for line in lines if not line.empty(first, last)]
        axis = _axis(starts, gaps, widths, first, last, room)
        texts = [(line.label.ljust(label) + line.text(gaps, widths, first, last)).rstrip() for line in shown]
        panels.append(["seconds".ljust(label) + axis, *texts])
    return panels


class _Line:
    """One row of a panel by groups of columns: the text of each group, and the groups where bars begin and end."""

    def __init__(self, row: GridRow, groups: Sequence[Sequence[int]]) -> None:
        self.label = row.label
        self.texts = ["".join(row.cells.get(column, "") for column in group) for group in groups]
        self.enters = [False] * len(groups)
        self.leaves = [False] * len(groups)
        group_of = {column: number for number, group in enumerate(groups) for column in group}
        for start, end in row.bars:
            for number in range(group_of[start], group_of[end]):
                self.leaves[number] = self.enters[number + 1] = True

    def empty(self, first: int, last: int) -> bool:
        return not any(self.texts[first:last]) and not any(self.leaves[first:last])

    def text(self, gaps: Sequence[str], widths: Sequence[int], first: int, last: int) -> str:
        parts = []
        for number in range(first, last):
            gap = gaps[number]
            parts.append("=" if gap == " " and self.enters[number] else gap)
            text = self.texts[number]
            before = "=" if self.enters[number] and not text else ""
            parts.append((before + text)[: widths[number]].ljust(widths[number], "=" if self.leaves[number] else " "))
        return "".join(parts)


def _gap(before: float, after: float) -> str:
    return "" if after - before < SAME else " " if after - before < CUT else "~"


def _merged(times: Sequence[float], rows: Sequence[GridRow], alone: AbstractSet[int]) -> list[list[int]]:
    cells: list[list[tuple[int, int]]] = [[] for _ in times]
    for number, row in enumerate(rows):
        for column, text in row.cells.items():
            cells[column].append((number, len(text)))
    groups: list[list[int]] = []
    lengths: Counter[int] = Counter()
    for column, time in enumerate(times):
        if (
            groups
            and time - times[groups[-1][0]] < SAME
            and column not in alone
            and groups[-1][-1] not in alone
            and all(lengths[number] + length <= _WIDEST for number, length in cells[column])
        ):
            groups[-1].append(column)
            lengths.update(dict(cells[column]))
        else:
            groups.append([column])
            lengths = Counter(dict(cells[column]))
    return groups


def _folded(gaps: Sequence[str], widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Return the first group of each panel, and the group after its last group."""
    found, first, used = [], 0, 0
    for number, width in enumerate(widths):
        needed = len(gaps[number]) + width
        if used + needed > room:
            found.append((first, number))
            first, used = number, 0
        used += needed
    return [*found, (first, len(widths))]


def _axis(starts: Sequence[float], gaps: Sequence[str], widths: Sequence[int], first: int, last: int, room: int) -> str:
    """Return a line with times of columns. Columns after long pauses have precedence for a label."""
    offset = 0
    wanted: list[tuple[bool, int, str]] = []
    for number in range(first, last):
        offset += len(gaps[number])
        if gaps[number] or number == first:
            wanted.append((gaps[number] == " " and number > first, offset, _seconds(starts[number])))
        offset += widths[number]
    placed: list[tuple[int, str]] = []
    for _, at, text in sorted(wanted):
        # At the right edge, the text of a time may be wider than its column.
        at = max(min(at, room - len(text)), 0)
        if all(at + len(text) < other or at > other + len(taken) for other, taken in placed):
            placed.append((at, text))
    axis = ""
    for at, text in sorted(placed):
        axis = axis.ljust(at) + text
    return axis


def _seconds(time: float) -> str:
    return f"{time:.3f}".rstrip("0").rstrip(".")
