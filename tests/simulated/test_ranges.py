"""The real ``PostgresSource(ranges=…)`` keeps every promise in the simulator, while ranges move and split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

import pytest

from memsource.adapters.choices import KINDS
from memsource.adapters.runs import POISON, AdapterSchedule, Scenario, run_schedule, schedule_of
from tests.simulated.figures import figures_of
from tests.simulated.postgres.adapter import RangesAdapter
from tests.simulated.slices import ALL_PAIRS, ENOUGH, RANGED, tally, whole

SCHEDULES: Final = 4
"""Schedules of ``make test``, which are the first ones of ``make campaign``."""


@pytest.fixture
def adapter() -> RangesAdapter:
    return RangesAdapter()


@pytest.mark.timeout(300)
@pytest.mark.long
def test_no_schedule_with_ranges_breaks_a_promise() -> None:
    report = tally("ranges", range(SCHEDULES), processes=1)
    assert report.violations == []
    assert report.schedules == SCHEDULES


@pytest.mark.campaign
@pytest.mark.timeout(3600)  # minutes on two free cores
def test_no_schedule_of_the_campaign_with_ranges_breaks_a_promise(
    record_property: Callable[[str, object], None],
) -> None:
    report = whole("ranges", RANGED)
    record_property("campaign", figures_of("ranges", report))
    assert report.violations == []
    assert report.schedules >= RANGED
    assert RANGED < ALL_PAIRS or report.unreached == []
    assert RANGED < ENOUGH or set(report.faults) == set(KINDS) - {"duplicate"}


def test_ranges_move_and_split_in_runs_without_faults(adapter: RangesAdapter) -> None:
    moves = parts = keyless = 0
    for seed in range(8):
        made = run_schedule(AdapterSchedule("ranges", seed, ()), adapter)
        assert made.run.findings == {}
        rows = [row for segment in made.run.segments for row in segment.rows]
        moves += len(adapter.last.owners)
        parts += made.run.happened["abandoned"]
        keyless += sum(row.event == "started" and row.key is None for row in rows)
    assert moves > 20 and parts and keyless


def test_a_token_of_a_run_with_ranges_makes_the_same_run_again(adapter: RangesAdapter) -> None:
    first = run_schedule(AdapterSchedule("ranges", 2), adapter)
    assert first.schedule.decisions
    second = run_schedule(schedule_of(first.schedule.token()), adapter)
    assert first.run.digest == second.run.digest


class _Blocking(RangesAdapter):
    """Ranges in runs that block every lane, and whose pieces share two messages in flight."""

    def scenario(self, drawn: Scenario, rng: Random) -> Scenario:
        drawn = super().scenario(drawn, rng)
        bounds = {"concurrency": 2, "max_in_flight": 10, "max_in_flight_per_partition": 2, "max_ahead": 50}
        settings = replace(drawn.settings, poison="block_and_dlq", **bounds)  # type: ignore[arg-type]
        outcomes = tuple(POISON for _ in drawn.outcomes)
        return replace(drawn, settings=settings, outcomes=outcomes, keyless=0.2, workers=2, keys=3)


def test_a_blocked_piece_that_fills_its_partition_excuses_the_other_pieces_of_the_process() -> None:
    for seed in range(4):
        made = run_schedule(AdapterSchedule("ranges", seed, ()), _Blocking())
        assert made.run.findings == {}
        assert made.run.happened["blocked"]


def test_a_member_that_ends_during_its_acquisitions_waits_for_the_release_of_their_locks(
    adapter: RangesAdapter,
) -> None:
    """Before, its task used a processor during this wait, which the simulator reports as a livelock."""
    faults = (
        '[9,"delay",0.1,0],[10,"drop_request",2.0,0],[22,"drop_request",0.0,7],[23,"freeze",5.0,10],'
        '[27,"drop_request",2.0,0],[28,"delay",2.7,4],[29,"drop_request",9.166666666666668,2],'
        '[42,"crash",5.0,9],[43,"freeze",9.166666666666668,0],[94,"cut_off",0.2,6],[97,"restart",2.0,0],'
        '[111,"delay",2.7,1],[113,"drop_request",9.166666666666668,2],[114,"drop_request",11.0,0],'
        '[115,"drop_request",11.0,0]'
    )
    made = run_schedule(schedule_of(f'["ranges",784,[{faults}],null,false,false]'), adapter)
    assert made.run.findings == {}


def test_a_member_that_asks_between_two_freezes_may_keep_its_locks_for_a_lease_from_then(
    adapter: RangesAdapter,
) -> None:
    faults = '[63,"freeze",0.5,0],[66,"freeze",9.0,3],[68,"freeze",9.0,0],[69,"freeze",5.0,0],[72,"freeze",2.0,1]'
    made = run_schedule(schedule_of(f'["ranges",795856591,[{faults}],null,false,false]'), adapter)
    assert made.run.findings == {}
