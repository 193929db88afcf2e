"""The content of a picture as data: lines over the ticks of an axis, or bars; `bench.drawing` draws it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a panel.

    Attributes:
        label: Name of the line.
        values: Value at each tick of the panel's axis; ticks may be missing.
        reference: Whether the panel compares the other lines with this line.
    """

    label: str
    values: Mapping[str, float]
    reference: bool = False


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A panel of lines. With ``zone`` the axis of values is logarithmic; otherwise the axis is linear from 0.

    Attributes:
        title: Title of the panel.
        across: Label of the horizontal axis.
        up: Label of the vertical axis.
        ticks: Ticks of the horizontal axis, evenly spaced.
        lines: The lines.
        zone: Name of the shaded area below 1; None = no shaded area.
    """

    title: str
    across: str
    up: str
    ticks: Sequence[str]
    lines: Sequence[Line]
    zone: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a panel.

    Attributes:
        label: Name of the bar.
        value: Length of the bar, more than 0.
        text: Text at the end of the bar.
        goal: Goal of the value; None = no goal.
    """

    label: str
    value: float
    text: str
    goal: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A panel of horizontal bars, one below the other.

    Attributes:
        title: Title of the panel.
        across: Label of the horizontal axis.
        bars: The bars, from top to bottom.
        logarithmic: Whether the axis is logarithmic.
        zone: Name of the shaded area below 1; None = no shaded area.
    """

    title: str
    across: str
    bars: Sequence[Bar]
    logarithmic: bool = False
    zone: str | None = None


Panels = Sequence[Lines] | Bars


def gid(title: str, label: str) -> str:
    """Return the SVG id of the line or bar with this label in the panel of this title."""
    return re.sub(r"[^\w-]+", "-", f"{title} {label}")
