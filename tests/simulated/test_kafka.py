"""The real ``KafkaSource`` keeps every promise in the simulator, and a run repeats from its token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from memsource.adapters.campaign import seek
from memsource.adapters.choices import KINDS
from memsource.adapters.pairs import Pair
from memsource.adapters.runs import AdapterSchedule, run_schedule, schedule_of
from tests.simulated.figures import figures_of
from tests.simulated.kafka.adapter import KafkaAdapter
from tests.simulated.slices import ALL_PAIRS, CAMPAIGN, ENOUGH, SEEKS, tally, whole

SCHEDULES: Final = 6
"""Schedules of ``make test``, which are the first ones of ``make campaign``."""


@pytest.fixture
def adapter() -> KafkaAdapter:
    return KafkaAdapter()


@pytest.mark.timeout(300)
@pytest.mark.long
def test_no_schedule_of_the_kafka_adapter_breaks_a_promise() -> None:
    report = tally("kafka", range(SCHEDULES), processes=1)
    assert report.violations == []
    assert report.schedules == SCHEDULES


@pytest.mark.campaign
@pytest.mark.timeout(3600)  # minutes on two free cores
def test_no_schedule_of_the_campaign_of_the_kafka_adapter_breaks_a_promise(
    record_property: Callable[[str, object], None],
) -> None:
    report = whole("kafka", CAMPAIGN)
    record_property("campaign", figures_of("kafka", report))
    assert report.violations == []
    assert report.schedules >= CAMPAIGN
    assert CAMPAIGN < ALL_PAIRS or report.unreached == []
    assert CAMPAIGN < ENOUGH or set(report.faults) == set(KINDS)


def test_a_run_without_faults_handles_every_message(adapter: KafkaAdapter) -> None:
    made = run_schedule(AdapterSchedule("kafka", 0, ()), adapter)
    assert made.run.findings == {}
    assert made.run.happened["commit_ok"] > 0
    assert made.schedule.decisions == ()


def test_retention_deletes_messages_in_some_runs(adapter: KafkaAdapter) -> None:
    deleted = []
    for seed in (2, 17, 20):
        made = run_schedule(AdapterSchedule("kafka", seed, ()), adapter)
        assert made.run.findings == {}
        deleted.append(len(adapter.last.deleted))
    assert deleted[0] and deleted[1] and not deleted[2]


def test_members_wake_from_long_freezes_in_some_runs(adapter: KafkaAdapter) -> None:
    frozen, loading = [], []
    for seed in (15, 41, 1):
        made = run_schedule(AdapterSchedule("kafka", seed, ()), adapter)
        assert made.run.findings == {}
        frozen.append(made.run.happened["fault: freeze"])
        loading.append(adapter.last.events.loading_until > 0.0)
    assert frozen == [3, 1, 0] and loading == [True, True, False]


def test_topics_are_recreated_and_members_are_static_in_some_runs(adapter: KafkaAdapter) -> None:
    events = []
    for seed in (0, 1, 21):
        made = run_schedule(AdapterSchedule("kafka", seed, ()), adapter)
        assert made.run.findings == {}
        events.append((adapter.last.topic_id, adapter.last.events.extras.static))
    assert events == [("orders-1", True), ("orders-1", False), ("orders-2", False)]


def test_confirmed_dead_letters_are_in_their_topic(adapter: KafkaAdapter) -> None:
    counts = []
    for seed in (1, 4, 17):
        run_schedule(AdapterSchedule("kafka", seed, ()), adapter)
        counts.append((len(adapter.last.dead_letters), len(adapter.last.letters)))
    # The last run has no topic for dead letters.
    assert all(confirmed <= stored for confirmed, stored in counts[:2]) and counts[0][0] and counts[2][1] == 0


def test_a_seed_repeats_a_run_of_the_kafka_adapter(adapter: KafkaAdapter) -> None:
    schedule = AdapterSchedule("kafka", 3)
    first, second = run_schedule(schedule, adapter), run_schedule(schedule, adapter)
    assert first.schedule.decisions
    assert first.run.digest == second.run.digest
    assert first.schedule == second.schedule


def test_a_token_repeats_a_run_of_the_kafka_adapter(adapter: KafkaAdapter) -> None:
    first = run_schedule(AdapterSchedule("kafka", 3), adapter)
    second = run_schedule(schedule_of(first.schedule.token()), adapter)
    assert first.run.digest == second.run.digest
    fewer = replace(first.schedule, decisions=(first.schedule.decisions or ())[:1])
    assert run_schedule(fewer, adapter).run.digest != first.run.digest


def test_a_revoke_waits_for_a_silent_broker_only_after_an_answer_that_lacks_its_commit(
    adapter: KafkaAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for events in ("_LAGS", "_POLLS"):
        monkeypatch.setattr(f"tests.simulated.kafka.adapter.{events}", 0.0)
    # The request of the commit is lost. The broker answers that it has stored nothing, and then falls silent.
    token = '["kafka",4,[[114,"drop_request",52.8,0],[116,"drop_request",52.8,0]],null,false,false]'
    made = run_schedule(schedule_of(token), adapter)
    assert made.run.findings == {}
    assert len(made.schedule.decisions or ()) == 2


def test_a_process_that_starts_while_the_topic_is_absent_starts_again(adapter: KafkaAdapter) -> None:
    """Its source looks for similar topics, and ends with the name of the missing one."""
    faults = (
        '[15,"freeze",0.5,5],[17,"delay",2.0,5],[52,"freeze",1.1,0],[58,"restart",8.0,0],[59,"cut_off",3.0,2],'
        '[119,"duplicate",0.0,1],[145,"duplicate",0.0,1],[183,"callback",0.0,6],[184,"restart",8.0,0],'
        '[185,"cut_off",4.5,0],[220,"duplicate",0.0,1],[238,"duplicate",0.0,0]'
    )
    made = run_schedule(schedule_of(f'["kafka",2319,[{faults}],null,false,false]'), adapter)
    assert made.run.findings == {}


def test_a_run_leaves_the_adapter_as_it_was(adapter: KafkaAdapter) -> None:
    from lanes_kafka.client import mailbox, thread

    before = vars(thread).copy(), vars(mailbox).copy()
    run_schedule(AdapterSchedule("kafka", 0, ()), adapter)
    assert (vars(thread), vars(mailbox)) == before
    assert logging.getLogger("lanes").level != logging.CRITICAL + 1


def test_runs_seek_a_pair_of_faults(adapter: KafkaAdapter) -> None:
    """The token of the run that reached the pair makes the same run again."""
    pair = Pair("freeze", "cut_off", "drain")
    report = seek(adapter, pair, range(SEEKS))
    assert pair in report.pairs and report.violations == []
    assert 0 < report.schedules < SEEKS
    made = run_schedule(AdapterSchedule("kafka", report.schedules - 1, seeks=pair), adapter)
    assert pair in made.pairs.counts
    again = run_schedule(schedule_of(made.schedule.token()), adapter)
    assert again.pairs.counts == made.pairs.counts
