"""The figure of a case, its measurement with a baseline, and the file of all figures of a case."""

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
"""A function that does the work once and returns its figure."""

Pair = tuple[float, float]
"""A figure and its baseline, from one run or from two consecutive runs."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount of work of a measurement.

    Attributes:
        scale: Factor for the number of messages.
        repeats: Number of measurements.
    """

    scale: float = 1.0
    repeats: int = 5

    def messages(self, count: int) -> int:
        """Return ``count``, scaled."""
        return max(1, round(count * self.scale))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measurement.

    Attributes:
        case: Name of the case.
        figure: The measured value.
        unit: Unit of ``figure`` and ``baseline``.
        baseline: The value of the baseline.
        ratio: ``figure`` divided by ``baseline``.
        goal: Highest allowed cost, or lowest allowed ratio of a rate. After ``within`` the highest allowed ratio, after
            ``at_least`` the lowest allowed rate.
        holds: Whether the figure meets the goal; None without a goal.
    """

    case: str
    figure: float
    unit: str
    baseline: float
    ratio: float
    goal: float | None
    holds: bool | None

    def within(self, times: float) -> Figure:
        """Return the figure with the goal of at most ``times`` the baseline."""
        return replace(self, goal=times, holds=self.ratio <= times)

    def at_least(self, figure: float) -> Figure:
        """Return the figure with the goal of at least ``figure``. The goal ignores the baseline."""
        return replace(self, goal=figure, holds=self.figure >= figure)


def cost(case: str, unit: str, figure: float, baseline: float, goal: float | None = None) -> Figure:
    """Return the figure of a cost, which should be low."""
    made = Figure(
        case=case, figure=figure, unit=unit, baseline=baseline, ratio=figure / baseline, goal=goal, holds=None
    )
    return made if goal is None else replace(made, holds=figure <= goal)


def rate(case: str, unit: str, figure: float, baseline: float, goal: float | None = None) -> Figure:
    """Return the figure of a rate, which should be high."""
    made = cost(case, unit, figure, baseline)
    return made if goal is None else replace(made, goal=goal, holds=made.ratio >= goal)


def interleaved(runs: Sequence[Run], repeats: int) -> list[float]:
    """Return the median of each run. The runs alternate, so the load of the machine affects all runs equally."""
    measured: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, values in zip(runs, measured, strict=True):
            # Collect the garbage of the previous run outside the measurement.
            gc.collect()
            values.append(run())
    return [median(values) for values in measured]


def pairs(figure: Run, baseline: Run, count: int) -> list[Pair]:
    """Return ``count`` measurements of each run. The runs alternate."""
    measured = []
    for _ in range(count):
        gc.collect()
        before = baseline()
        gc.collect()
        measured.append((figure(), before))
    return measured


def middle(measured: Sequence[Pair]) -> Pair:
    """Return the pair with the median ratio.

    With two middle pairs, the function returns the pair with the higher ratio.
    """
    return sorted(measured, key=lambda pair: pair[0] / pair[1])[len(measured) // 2]


def cpu_micros(work: Callable[[], object], messages: int) -> float:
    """Return the CPU time of this thread for one message, in microseconds."""
    begin = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begin) / 1_000 / messages


def write(name: str, figures: Sequence[Figure], folder: Path) -> Path:
    """Write the figures of one case as JSON, and return the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps([asdict(figure) for figure in figures], indent=2, ensure_ascii=False) + "\n")
    return file


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as plain text."""
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
