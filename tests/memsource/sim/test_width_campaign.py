"""The width of a queue changes under load and faults: nothing is stranded, or the alarm names the topics.

``make campaign`` runs 2,000 schedules, or as many as ``SCHEDULES`` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import pytest

from tests.memsource.sim.widths import SOMETIMES, tally

SCHEDULES: Final = int(os.environ.get("SCHEDULES") or 2_000)
_QUICK: Final = 20
_ENOUGH: Final = 200
"""Schedules that have every case and every kind of fault."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_change_of_a_width_strands_a_message() -> None:
    """These schedules are the first ones of ``make campaign``."""
    result = tally(_QUICK, processes=1)
    assert result.found == []
    assert result.runs == _QUICK


@pytest.mark.campaign
@pytest.mark.timeout(3600)  # minutes on two free cores
def test_no_change_of_a_width_in_the_campaign_strands_a_message(
    record_property: Callable[[str, object], None],
) -> None:
    result = tally(SCHEDULES)
    figures = {"schedules": result.runs, "width_schedules": result.runs, "violations": len(result.found)}
    record_property("campaign", figures)
    assert result.found == []
    assert result.runs == SCHEDULES
    assert SCHEDULES < _ENOUGH or [name for name in SOMETIMES if not result.happened[name]] == []
