"""Panels as SVG, by matplotlib. The module only draws; it reads, measures and chooses nothing.

With one version of matplotlib, the same panels produce the same bytes. The background is transparent, and every colour
is visible on white and on black pages. Text in the SVG is text, not outlines.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullLocator

from bench.panels import Bars, Lines, Panels, gid

INK: Final = "#767676"
LOSS: Final = "#d9534f"
COLOURS: Final = ("#3b7dd8", "#c9620c", "#2f8f5b", "#9b5fd0", "#b8528d")
BAR, GOAL = COLOURS[:2]
MARKERS: Final = ("o", "s", "^", "D", "v")
DASHES: Final = ("--", ":")
SHADE: Final[dict[str, Any]] = {"facecolor": LOSS, "alpha": 0.15, "linewidth": 0, "zorder": 0}
STYLE: Final = {
    "svg.hashsalt": "lanes",  # otherwise ids are drawn at random
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
WIDTH, HEIGHT, BARS_HEIGHT, BAR_HEIGHT = 9.0, 3.8, 1.2, 0.32


def svg(panels: Panels) -> str:
    """Return the picture: panels of lines side by side, or bars."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # it takes any str, its stubs a literal
        if isinstance(panels, Bars):
            canvas = Canvas(figsize=(WIDTH, BARS_HEIGHT + BAR_HEIGHT * len(panels.bars)), layout="constrained")
            _bars(canvas.subplots(), panels)
            canvas.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=8.0)
        else:
            canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained")
            styles = _styles(panels)
            places = canvas.subplots(1, len(panels), squeeze=False)[0]
            for axes, panel in zip(places, panels, strict=True):
                _lines(axes, panel, styles)
            places[0].legend(loc="upper left", frameon=False, fontsize=8.0)
        sink = io.StringIO()
        # Without day and version, the same figures give the same file.
        canvas.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", sink.getvalue(), flags=re.MULTILINE)


def _styles(panels: Sequence[Lines]) -> dict[str, dict[str, Any]]:
    """Return the style of each line. Lines with the same label have the same style in all panels."""
    styles: dict[str, dict[str, Any]] = {}
    colours, markers, dashes = itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(DASHES)
    for line in itertools.chain.from_iterable(panel.lines for panel in panels):
        if line.label in styles:
            continue
        if line.reference:
            styles[line.label] = {"color": INK, "linestyle": next(dashes)}
        else:
            styles[line.label] = {"color": next(colours), "marker": next(markers), "markersize": 4.5}
    return styles


def _lines(axes: Axes, panel: Lines, styles: Mapping[str, Mapping[str, Any]]) -> None:
    for line in panel.lines:
        ticks = [panel.ticks.index(tick) for tick in line.values]
        (drawn,) = axes.plot(ticks, list(line.values.values()), label=line.label, **styles[line.label])
        drawn.set_gid(gid(panel.title, line.label))
    axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
    axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    values = [value for line in panel.lines for value in line.values.values()]
    if panel.zone is None:
        axes.set_ylim(0, 1.5 * max(values))  # the legend is above the lines
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        return
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 2, 4 * max(1.0, *values))
    axes.yaxis.set_major_formatter(FuncFormatter(_times))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhspan(axes.get_ylim()[0], 1, **SHADE)
    axes.axhline(1, color=LOSS, linewidth=0.8)
    axes.text(0.98, 0.03, panel.zone, color=LOSS, ha="right", va="bottom", transform=axes.transAxes)


def _bars(axes: Axes, panel: Bars) -> None:
    places = range(len(panel.bars))
    drawn = axes.barh(places, [bar.value for bar in panel.bars], height=0.55, color=BAR)
    for place, bar, patch in zip(places, panel.bars, drawn, strict=True):
        patch.set_gid(gid(panel.title, bar.label))
        right = max(bar.value, bar.goal or 0)
        axes.annotate(bar.text, (right, place), (6, 0), textcoords="offset points", va="center")
    goals = [(bar.goal, place) for place, bar in zip(places, panel.bars, strict=True) if bar.goal is not None]
    if goals:
        values, rows = zip(*goals, strict=True)
        axes.scatter(values, rows, marker="|", s=150, linewidths=2, color=GOAL, label="goal", zorder=3)
    axes.set(title=panel.title, xlabel=panel.across)
    axes.set_yticks(places, [bar.label for bar in panel.bars])
    axes.invert_yaxis()
    most = max(max(bar.value, bar.goal or 0) for bar in panel.bars)
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(bar.value for bar in panel.bars) / 2, 12 * most)
    else:
        axes.set_xlim(0, 1.6 * most)
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    if panel.zone is not None:
        axes.axvspan(axes.get_xlim()[0], 1, label=panel.zone, **SHADE)
        axes.axvline(1, color=LOSS, linewidth=0.8)


def _plain(value: float, _place: int) -> str:
    return f"{value:,.6g}"


def _times(value: float, _place: int) -> str:
    return f"{value:,.6g} ×"
