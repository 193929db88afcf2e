"""Draw the figures of `bench/out` as `docs/plots/<plot>.svg`: `python -m bench plots [--published] [PLOT...]`.

With `--published`, the figures come from the table of docs/performance.md, which has no rows for `zone` and `scaling`.

The command measures nothing. If a figure of a plot is missing, the error names its file and the case to run, and the
command writes no plot. The exit status is 0 when the command has drawn every plot, 1 when a figure is missing or
unreadable, and 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from bench import scaling, zone
from bench.figures import OUT, Figure
from bench.panels import Bar, Bars, Line, Lines, Panels
from bench.published import published

ROOT: Final = Path(__file__).parents[1]
PLOTS: Final = ROOT / "docs" / "plots"

LOSS: Final = "loss zone: slower than without lanes"
FIELDS: Final = [field.name for field in fields(Figure)]


class MissingFigureError(Exception):
    """A figure that a plot needs is missing or unreadable. The message names the case to run."""


class Measured:
    """The figures that cases have written to a folder. The class reads each file once, at the first use of the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, dict[str, Figure]] = {}

    def figure(self, case: str, name: str) -> Figure:
        """Return the figure of this name and case. Raises `MissingFigureError`."""
        if case not in self._read:
            self._read[case] = {one.case: one for one in self._figures(case)}
        try:
            return self._read[case][name]
        except KeyError:
            raise self._unusable(case, f'has no figure "{name}"') from None

    def _figures(self, case: str) -> list[Figure]:
        try:
            rows = json.loads(self._file(case).read_text())
        except FileNotFoundError:
            raise self._unusable(case, "is missing") from None
        except ValueError as error:
            raise self._unusable(case, f"is not JSON: {error}") from None
        if not isinstance(rows, list):
            raise self._unusable(case, f"is not a list of figures but {type(rows).__name__}")
        return [self._checked(case, row) for row in rows]

    def _checked(self, case: str, row: object) -> Figure:
        if not isinstance(row, dict) or sorted(row) != sorted(FIELDS) or not isinstance(row["case"], str):
            raise self._unusable(case, f"holds {row!r}, which is not {{{', '.join(FIELDS)}}}")
        for field in ("figure", "baseline", "ratio"):
            # A bar without a length, or a point without a place, shows nothing.
            if not _is_positive(row[field]):
                raise self._unusable(case, f'says {field}={row[field]!r} of "{row["case"]}", not a number above 0')
        if row["goal"] is not None and not _is_positive(row["goal"]):
            raise self._unusable(case, f'says goal={row["goal"]!r} of "{row["case"]}", not a number above 0 or null')
        return Figure(**row)

    def _file(self, case: str) -> Path:
        return self._folder / f"{case}.json"

    def _unusable(self, case: str, why: str) -> MissingFigureError:
        file = self._file(case)
        shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        return MissingFigureError(f"{shown} {why}; measure it with `python -m bench {case}`")


class Published(Measured):
    """The figures of the table in docs/performance.md."""

    def __init__(self) -> None:
        super().__init__(OUT)
        self._rows = published()

    def figure(self, case: str, name: str) -> Figure:
        """Return the figure of this name. Raises `MissingFigureError`."""
        try:
            return self._rows[name]
        except KeyError:
            raise MissingFigureError(f'docs/performance.md has no row "{name}"; measure `{case}` instead') from None


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# --- the plots


def _zone(measured: Measured) -> Panels:
    def line(keys: int, beside: str) -> Line:
        ratios = {wait: measured.figure("zone", zone.name(wait, keys, beside)).ratio for wait in zone.WAITS}
        return Line(label=_keys(keys), values=ratios)

    computing = {
        wait: measured.figure("zone", zone.name(f"{wait} of CPU", zone.KEYS[-1])).ratio for wait in zone.COMPUTING
    }
    return [
        Lines(
            title="Beside a plain loop",
            across="handler waits for",
            up="times the messages a second",
            ticks=list(zone.WAITS),
            lines=[
                *(line(keys, "") for keys in zone.KEYS),
                Line(label="computes, does not wait", values=computing, reference=True),
            ],
            zone=LOSS,
        ),
        Lines(
            title="Beside a bare task for each key",
            across="handler waits for",
            up="times the messages a second",
            ticks=list(zone.WAITS),
            lines=[line(keys, "tasks") for keys in zone.KEYS],
            zone=LOSS,
        ),
    ]


def _keys(number: int) -> str:
    return f"{number:,} key{'s' if number > 1 else ''}"


def _scaling(measured: Measured) -> Panels:
    def panel(title: str, across: str, numbers: Sequence[int], of: str, whats: dict[str, tuple[str, str]]) -> Lines:
        lines = []
        for what, (label, baseline) in whats.items():
            figures = {f"{number:,}": measured.figure("scaling", scaling.name(what, number, of)) for number in numbers}
            lines.append(Line(label=label, values={tick: one.figure for tick, one in figures.items()}))
            bare = {tick: one.baseline for tick, one in figures.items()}
            lines.append(Line(label=baseline, values=bare, reference=True))
        return Lines(
            title=title, across=across, up="µs of CPU a message", ticks=[f"{one:,}" for one in numbers], lines=lines
        )

    engine = {"engine": ("the engine alone", "a dict and a queue")}
    return [
        panel(
            "Over keys",
            "keys",
            scaling.KEYS,
            "keys",
            {"run": ("a whole run, no-op handler", "a plain loop")} | engine,
        ),
        panel("Over messages in flight", "delivered before any is taken", scaling.IN_FLIGHT, "in flight", engine),
    ]


# label -> case, figure
KAFKA: Final = {
    "no-op, beside a tuned loop": ("kafka", "kafka no-op"),
    "no-op, beside a loop at the client's defaults": ("kafka", "kafka no-op, loop at defaults"),
    "no-op, beside a loop of poll()": ("kafka", "kafka no-op, loop of poll()"),
    "10 µs of CPU, beside the tuned loop": ("kafka", "kafka 10 µs of CPU"),
    "100 µs of CPU, beside the tuned loop": ("kafka", "kafka 100 µs of CPU"),
    "10 ms of waiting, beside 1,000 bare tasks": ("kafka-handlers", "kafka-handlers 10 ms"),
    "1 ms of waiting, beside what the busiest key allows": ("kafka-handlers", "kafka-handlers zipf"),
}
SPARK: Final = {
    "no-op, beside a bare loop in the same plan": ("spark", "spark no-op"),
    "no-op, beside foreachPartition": ("spark", "spark no-op, foreachPartition"),
    "5 ms of waiting, beside as many bare tasks": ("spark", "spark 5 ms handler, 4,096 lanes a task"),
}
STUCK: Final = {
    "in-process source": ("runtime", "runtime stuck key with 1 % of the traffic"),
    "JetStream": ("jetstream-stuck", "jetstream-stuck key with 1 % of the traffic"),
    "Kafka": ("kafka-bounds", "kafka-bounds stuck key with 1 % of the traffic"),
}
HANDOVER: Final = {
    "JetStream: a partition moves": ("cohort", "cohort move"),
    "JetStream: 20 partitions move at once": ("cohort", "cohort move, 20 at once"),
    "JetStream: kill -9, lease 3 s": ("cohort", "cohort failover"),
    **{
        f"Kafka, {protocol}: {label}": ("kafka-recovery", f"kafka-recovery {way}, {protocol}")
        for way, label in (("leave", "a member leaves"), ("kill -9", "kill -9, session 3 s"))
        for protocol in ("eager", "cooperative", "KIP-848")
    },
}


def _ratios(title: str, rows: dict[str, tuple[str, str]]) -> Callable[[Measured], Panels]:
    """Return a function that draws rates as bars, as ratios to a baseline. A ratio below 1 is in the loss zone."""

    def panels(measured: Measured) -> Panels:
        bars = []
        for label, which in rows.items():
            one = measured.figure(*which)
            text = f"{_short(one.ratio)} × ({_short(one.figure)}/s){_goal(one, ' ×')}"
            bars.append(Bar(label=label, value=one.ratio, text=text, goal=one.goal))
        return Bars(title=title, across="times the rate of what it is compared with", bars=bars, zone=LOSS)

    return panels


def _stuck(measured: Measured) -> Panels:
    bars = []
    for label, which in STUCK.items():
        one = measured.figure(*which)
        text = f"{_short(one.figure)} ms, without it {_short(one.baseline)} ms{_goal(one, ' ×')}"
        bars.append(Bar(label=label, value=one.ratio, text=text, goal=one.goal))
    title = "One key hangs: 99th percentile of the others, to the handler's end"
    return Bars(title=title, across="times that of a run in which none hangs", bars=bars)


def _handover(measured: Measured) -> Panels:
    bars = []
    for label, which in HANDOVER.items():
        one = measured.figure(*which)
        text = f"{_short(one.figure)} s{_goal(one, ' s')}"
        bars.append(Bar(label=label, value=one.figure, text=text, goal=one.goal))
    title = "Until another member has handled a message of each partition"
    return Bars(title=title, across="seconds", bars=bars, logarithmic=True)


def _goal(figure: Figure, unit: str) -> str:
    return "" if figure.goal is None else f"; goal {figure.goal:g}{unit}"


def _short(value: float) -> str:
    return f"{value:,.3g}" if value < 1_000 else f"{value:,.0f}"


DRAWN: Final[dict[str, Callable[[Measured], Panels]]] = {
    "zone": _zone,
    "scaling": _scaling,
    "kafka": _ratios("Kafka: messages a second", KAFKA),
    "spark": _ratios("Spark: messages a second", SPARK),
    "stuck": _stuck,
    "handover": _handover,
}


FROM_PAGE: Final = ("kafka", "spark", "stuck", "handover")
"""Plots whose figures are in the table of docs/performance.md."""


def draw(names: Sequence[str], *, folder: Path = OUT, into: Path = PLOTS, measured: Measured | None = None) -> int:
    """Draw the named plots, or all plots without a name, and return the exit status."""
    unknown = [name for name in names if name not in DRAWN]
    if unknown:
        print(f"bench: unknown plot {unknown[0]!r}; use {', '.join(DRAWN)}", file=sys.stderr)
        return 2
    measured = measured or Measured(folder)
    try:
        panels = {name: DRAWN[name](measured) for name in dict.fromkeys(names or DRAWN)}
    except MissingFigureError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    # matplotlib caches a list of the machine's fonts. Keep the list in the project's cache, not in the user's home.
    os.environ.setdefault("MPLCONFIGDIR", str(ROOT / ".cache" / "matplotlib"))
    # Imported here, so that measuring does not load it.
    from bench.drawing import svg

    pictures = {name: svg(shown) for name, shown in panels.items()}
    into.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (into / f"{name}.svg").write_text(picture)
        print(into / f"{name}.svg")
    return 0


def command(arguments: Sequence[str]) -> int:
    """Run the command of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench plots")
    parser.add_argument(
        "plots", nargs="*", metavar="PLOT", help=f"plot to draw, by default every plot: {', '.join(DRAWN)}"
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help=f"draw the table of docs/performance.md instead, by default {', '.join(FROM_PAGE)}",
    )
    given = parser.parse_args(arguments)
    if given.published:
        return draw(given.plots or FROM_PAGE, measured=Published())
    return draw(given.plots)
