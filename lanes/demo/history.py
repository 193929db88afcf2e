"""What the histories of a run say: the checkers' verdicts, and why messages came again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lanes.errors import LanesError


class Verdict(NamedTuple):
    """One checker's: ``status`` is passed, violated or unproven, ``detail`` says why in one line."""

    name: str
    status: str
    detail: str


class Findings(NamedTuple):
    """All verdicts, how often messages came again, by cause (restart, held, settled, late), and the most in flight."""

    verdicts: Sequence[Verdict]
    redelivered: Mapping[str, int]
    peak_in_flight: int


def examine(directory: Path) -> Findings:
    """Read all segments of a directory and check them. Blocks: reads everything."""
    import memsource

    try:
        segments = memsource.read([directory])
    except LanesError as error:
        # No history proves nothing, which is not the same as nothing having happened.
        return Findings([Verdict("history", "unproven", str(error))], {}, 0)
    verdicts = [
        Verdict(found.name, found.status, _detail(found.violations, found.witnesses, found.reasons))
        for found in memsource.check(segments)
    ]
    counts = memsource.counts(segments)
    return Findings(verdicts, counts.redeliveries, counts.peak_in_flight)


def _detail(violations: int, witnesses: Sequence[str], reasons: Sequence[str]) -> str:
    first = next(iter((*witnesses, *reasons)), "")
    return f"{violations} violations, the first: {first}" if violations else first
