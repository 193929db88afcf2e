"""The content of a picture as data: lines over the ticks of an axis, or bars; `bench.drawing` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Line:
    """Values over some ticks of its panel's axis; the other lines are compared with a ``reference``."""

    label: str
    values: Mapping[str, float]
    reference: bool = False


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines over evenly spaced ``ticks``; ``zone`` names the part below 1, on a logarithmic axis."""

    title: str
    across: str
    up: str
    ticks: Sequence[str]
    lines: Sequence[Line]
    zone: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A value above 0, the text beside it, and its goal."""

    label: str
    value: float
    text: str
    goal: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars from left to right, one below the other; ``zone`` names the part below 1."""

    title: str
    across: str
    bars: Sequence[Bar]
    logarithmic: bool = False
    zone: str | None = None


Panels = Sequence[Lines] | Bars
