"""The width of a queue changes under load and faults: nothing is stranded, or the alarm names the topics.

``make campaign`` runs 2,000 schedules, or as many as ``SCHEDULES`` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import pytest

from tests.effort import is_full, processes, runs
from tests.memsource.sim.widths import SOMETIMES, tally

SCHEDULES: Final = int(os.environ.get("SCHEDULES") or 2_000)


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(600)  # the campaign computes on both cores, which other tests keep busy
def test_no_change_of_a_width_strands_a_message() -> None:
    result = tally(runs(200), processes=processes())
    assert result.found == []
    assert result.runs == runs(200)
    assert not is_full() or [name for name in SOMETIMES if not result.happened[name]] == []


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
