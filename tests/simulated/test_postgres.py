"""The real ``PostgresSource`` keeps every promise in the simulator; a token repeats a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import pytest

from lanes_postgres import connecting, lock_session, steps, transactions
from memsource.adapters.choices import KINDS
from memsource.adapters.runs import AdapterSchedule, run_schedule, schedule_of
from memsource.sim.loop.event_loop import SimLoop
from tests.simulated.figures import figures_of
from tests.simulated.postgres.adapter import PostgresAdapter
from tests.simulated.slices import ALL_PAIRS, CAMPAIGN, ENOUGH, tally, whole

SCHEDULES: Final = 4
"""Schedules of ``make test``, which are the first ones of ``make campaign``."""


@pytest.fixture
def adapter() -> PostgresAdapter:
    return PostgresAdapter()


@pytest.mark.timeout(300)
@pytest.mark.long
def test_no_schedule_of_the_postgres_adapter_breaks_a_promise() -> None:
    report = tally("postgres", range(SCHEDULES), processes=1)
    assert report.violations == []
    assert report.schedules == SCHEDULES


@pytest.mark.campaign
@pytest.mark.timeout(3600)  # minutes on two free cores
def test_no_schedule_of_the_campaign_of_the_postgres_adapter_breaks_a_promise(
    record_property: Callable[[str, object], None],
) -> None:
    report = whole("postgres", CAMPAIGN)
    record_property("campaign", figures_of("postgres", report))
    assert report.violations == []
    assert report.schedules >= CAMPAIGN
    assert CAMPAIGN < ALL_PAIRS or report.unreached == []
    assert CAMPAIGN < ENOUGH or set(report.faults) == set(KINDS) - {"duplicate"}


def test_runs_without_faults_handle_every_message(adapter: PostgresAdapter) -> None:
    runs = [run_schedule(AdapterSchedule("postgres", seed, ()), adapter) for seed in range(6)]
    assert [made.run.findings for made in runs] == [{}] * len(runs)
    assert all(made.run.happened["commit_ok"] and made.run.happened["leased"] for made in runs)


def test_confirmed_dead_letters_are_in_their_table(adapter: PostgresAdapter) -> None:
    counts = []
    for seed in (1, 15, 18, 19, 26):
        made = run_schedule(AdapterSchedule("postgres", seed, ()), adapter)
        assert made.run.findings == {}
        stored = {key[2] for key in adapter.last.server.rows if isinstance(key, tuple) and key[0] == "letter"}
        assert stored == adapter.last.letters
        counts.append(len(stored))
    # The members of the first run write their dead letters elsewhere.
    assert not counts[0] and any(counts)


@pytest.mark.parametrize("seed", [4, 12])
def test_a_seed_makes_the_same_run_again(adapter: PostgresAdapter, seed: int) -> None:
    schedule = AdapterSchedule("postgres", seed)
    first, second = run_schedule(schedule, adapter), run_schedule(schedule, adapter)
    assert first.schedule.decisions
    assert first.run.digest == second.run.digest
    assert first.schedule == second.schedule


def test_a_token_makes_the_same_run_again(adapter: PostgresAdapter) -> None:
    first = run_schedule(AdapterSchedule("postgres", 4), adapter)
    second = run_schedule(schedule_of(first.schedule.token()), adapter)
    assert first.run.digest == second.run.digest


def test_a_run_leaves_clocks_and_client_as_they_were(adapter: PostgresAdapter) -> None:
    def used() -> list[object]:
        clients = [vars(module).get("AsyncConnection") for module in (lock_session, connecting, transactions)]
        readers = [vars(SimLoop)["add_reader"], vars(SimLoop)["remove_reader"]]
        return [time.monotonic, time.time, os.urandom, vars(steps)["AsyncCursor"], *clients, *readers]

    before = used()
    run_schedule(AdapterSchedule("postgres", 0, ()), adapter)
    assert used() == before
