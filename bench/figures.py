"""A figure, how it is measured beside its baseline, and how it is written down."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

OUT: Final = Path(__file__).parent / "out"

Run = Callable[[], float]
"""Does the work once; returns the figure of that once."""

Pair = tuple[float, float]
"""A figure and its baseline, from one run or from two that followed each other."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done. ``scale`` multiplies the number of messages, ``repeats`` is how often each is measured."""

    scale: float = 1.0
    repeats: int = 5

    def messages(self, count: int) -> int:
        """So many of ``count`` messages."""
        return max(1, round(count * self.scale))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measurement.

    ``ratio`` is ``figure`` to ``baseline``. ``goal``: the most a cost may be; of a rate, the least its ratio may be, or
    the rate itself (``at_least``).
    ``holds``: whether the goal is met; None without one.
    """

    case: str
    figure: float
    unit: str
    baseline: float
    ratio: float
    goal: float | None
    holds: bool | None

    def within(self, times: float) -> Figure:
        """The same with a goal: at most so many times the baseline."""
        return replace(self, goal=times, holds=self.ratio <= times)

    def at_least(self, figure: float) -> Figure:
        """The same with a goal: no less than this, whatever the baseline."""
        return replace(self, goal=figure, holds=self.figure >= figure)


def cost(case: str, unit: str, figure: float, baseline: float, goal: float | None = None) -> Figure:
    """The figure of something that should be low."""
    made = Figure(
        case=case, figure=figure, unit=unit, baseline=baseline, ratio=figure / baseline, goal=goal, holds=None
    )
    return made if goal is None else replace(made, holds=figure <= goal)


def rate(case: str, unit: str, figure: float, baseline: float, goal: float | None = None) -> Figure:
    """The figure of something that should be near its baseline."""
    made = cost(case, unit, figure, baseline)
    return made if goal is None else replace(made, goal=goal, holds=made.ratio >= goal)


def interleaved(runs: Sequence[Run], repeats: int) -> list[float]:
    """The median of each: in turns, so that whatever else the machine does meets all of them alike."""
    measured: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, values in zip(runs, measured, strict=True):
            # What the run before left behind is not this one's to clear away.
            gc.collect()
            values.append(run())
    return [median(values) for values in measured]


def pairs(figure: Run, baseline: Run, count: int) -> list[Pair]:
    """So many measurements of each, in turns."""
    measured = []
    for _ in range(count):
        gc.collect()
        before = baseline()
        gc.collect()
        measured.append((figure(), before))
    return measured


def middle(measured: Sequence[Pair]) -> Pair:
    """The pair whose ratio is the median; of an even number, the upper one."""
    return sorted(measured, key=lambda pair: pair[0] / pair[1])[len(measured) // 2]


def cpu_micros(work: Callable[[], object], messages: int) -> float:
    """Microseconds of this thread's CPU a message: what other processes do is not counted."""
    begin = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begin) / 1_000 / messages


def write(name: str, figures: Sequence[Figure], folder: Path) -> Path:
    """Write the figures of one case as JSON; the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps([asdict(figure) for figure in figures], indent=2, ensure_ascii=False) + "\n")
    return file


def table(figures: Sequence[Figure]) -> str:
    """The figures as plain text."""
    rows = [("case", "figure", "unit", "baseline", "ratio", "goal", "holds")]
    rows += [
        (
            one.case,
            f"{one.figure:,.3g}" if one.figure < 1_000 else f"{one.figure:,.0f}",
            one.unit,
            f"{one.baseline:,.3g}" if one.baseline < 1_000 else f"{one.baseline:,.0f}",
            f"{one.ratio:.2f}",
            "" if one.goal is None else f"{one.goal:g}",
            {None: "", True: "yes", False: "no"}[one.holds],
        )
        for one in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 2)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
