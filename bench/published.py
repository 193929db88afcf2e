"""The published figures: the table of docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from bench.figures import Figure

PAGE: Final = Path(__file__).parents[1] / "docs" / "performance.md"
_COLUMNS: Final = 7


def published(page: Path = PAGE) -> dict[str, Figure]:
    """Return the rows of the table by the names of their cases.

    A ratio has the digits of the page, and a figure or baseline too.
    """
    rows: dict[str, Figure] = {}
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != _COLUMNS or not re.fullmatch(r"yes|no|", cells[-1]) or not re.match(r"[\d.]", cells[1]):
            continue
        case, figure, unit, baseline, ratio, goal, holds = cells
        rows[case] = Figure(
            case=case,
            figure=_number(figure),
            unit=unit,
            baseline=_number(baseline),
            ratio=_number(ratio),
            goal=_number(goal) if goal else None,
            holds=holds == "yes" if holds else None,
        )
    return rows


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))
