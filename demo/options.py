"""Parsers of durations and fractions, for the options of the demo."""

from __future__ import annotations

import re
from typing import Final

from lanes.cli.kit import stop

_SECONDS: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(us|ms|s|m)")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def seconds(option: str, text: str) -> float:
    """Convert a duration such as ``10ms`` to seconds. Any other text ends the process."""
    found = _SECONDS.fullmatch(text)
    if found is None:
        stop(f"{option} {text!r}: must be a number with a unit, such as 10ms, 0.5s or 2m")
    return float(found[1]) * _UNITS[found[2]]


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Convert a text of numbers with commas, or an empty text, to numbers. Any other text ends the process."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        stop(f"{option} {text!r}: must be fractions separated by commas, such as 0.2,0.8, or empty for none")
