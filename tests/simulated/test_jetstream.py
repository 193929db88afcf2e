"""The real ``JetStreamSource`` and nats client keep every promise in the simulator; a token repeats a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import nats.aio.client
import pytest

from memsource.adapters.choices import KINDS
from memsource.adapters.runs import AdapterSchedule, run_schedule, schedule_of
from tests.simulated.figures import figures_of
from tests.simulated.jetstream.adapter import JetStreamAdapter
from tests.simulated.jetstream.broker import LETTERS
from tests.simulated.slices import ALL_PAIRS, CAMPAIGN, ENOUGH, tally, whole

SCHEDULES: Final = 4
"""Schedules of ``make test``, which are the first ones of ``make campaign``."""


@pytest.fixture
def adapter() -> JetStreamAdapter:
    return JetStreamAdapter()


@pytest.mark.timeout(300)
@pytest.mark.long
def test_no_schedule_of_the_jetstream_adapter_breaks_a_promise() -> None:
    report = tally("jetstream", range(SCHEDULES), processes=1)
    assert report.violations == []
    assert report.schedules == SCHEDULES


@pytest.mark.campaign
@pytest.mark.timeout(3600)  # minutes on two free cores
def test_no_schedule_of_the_campaign_of_the_jetstream_adapter_breaks_a_promise(
    record_property: Callable[[str, object], None],
) -> None:
    report = whole("jetstream", CAMPAIGN)
    record_property("campaign", figures_of("jetstream", report))
    assert report.violations == []
    assert report.schedules >= CAMPAIGN
    assert CAMPAIGN < ALL_PAIRS or report.unreached == []
    assert CAMPAIGN < ENOUGH or set(report.faults) == set(KINDS)


def test_runs_without_faults_handle_every_message(adapter: JetStreamAdapter) -> None:
    runs = [run_schedule(AdapterSchedule("jetstream", seed, ()), adapter) for seed in range(8)]
    assert [made.run.findings for made in runs] == [{}] * len(runs)
    assert all(made.run.happened["ack"] and made.schedule.decisions == () for made in runs)
    # Only members of a cohort have leases; the other runs have a durable.
    assert {bool(made.run.happened["leased"]) for made in runs} == {True, False}


def test_a_process_that_waits_for_its_turn_ends_before_a_later_one_starts(adapter: JetStreamAdapter) -> None:
    # A process starts again after the order to stop, while a stopped one waits to be the only process on its durable.
    made = run_schedule(schedule_of('["jetstream",795874642,[[52,"crash",5.0,7]],null,false,true]'), adapter)
    assert made.run.findings == {}
    assert made.run.happened["fault: crash"]


def test_confirmed_dead_letters_are_in_their_stream(adapter: JetStreamAdapter) -> None:
    counts = []
    for seed in (1, 2, 4):
        run_schedule(AdapterSchedule("jetstream", seed, ()), adapter)
        streams = adapter.last.server.api.streams
        counts.append(len(adapter.last.dead_letters))
        assert len(streams[LETTERS].stored if LETTERS in streams else ()) == counts[-1]
    assert any(counts)


def test_the_stream_removes_messages_and_the_user_loses_permissions_in_some_runs(adapter: JetStreamAdapter) -> None:
    events = []
    for seed in (7, 72, 47):
        made = run_schedule(AdapterSchedule("jetstream", seed, ()), adapter)
        assert made.run.findings == {}
        events.append((bool(adapter.last.deleted), bool(adapter.last.events.denials)))
    assert events == [(True, False), (False, True), (False, False)]


def test_several_processes_share_a_durable_or_compete_for_it_in_some_runs(adapter: JetStreamAdapter) -> None:
    for seed, refused in ((31, False), (42, True)):
        made = run_schedule(AdapterSchedule("jetstream", seed, ()), adapter)
        assert made.run.findings == {}
        handled = [sum(row.event == "ended" for row in segment.rows) for segment in made.run.segments]
        assert (sum(count > 0 for count in handled) > 1) is not refused
        assert bool(adapter.last.refused) is refused


@pytest.mark.parametrize("seed", [9, 11])
def test_a_seed_repeats_a_run_of_the_jetstream_adapter(adapter: JetStreamAdapter, seed: int) -> None:
    schedule = AdapterSchedule("jetstream", seed)
    first, second = run_schedule(schedule, adapter), run_schedule(schedule, adapter)
    assert first.schedule.decisions
    assert first.run.digest == second.run.digest
    assert first.schedule == second.schedule


def test_a_token_repeats_a_run_of_the_jetstream_adapter(adapter: JetStreamAdapter) -> None:
    first = run_schedule(AdapterSchedule("jetstream", 9), adapter)
    second = run_schedule(schedule_of(first.schedule.token()), adapter)
    assert first.run.digest == second.run.digest


def test_a_slow_processor_is_no_late_loss(adapter: JetStreamAdapter) -> None:
    # Soon after the freeze, time jumps by half a second while the tasks of the member are ready.
    token = '["jetstream",3305,[[55,"freeze",5.0,2],[67,"cut_off",1.35,4]],null,false,false]'
    made = run_schedule(schedule_of(token), adapter)
    assert made.run.findings == {}
    assert (made.run.happened["fault: freeze"], made.run.happened["lost"]) == (1, 2)


@pytest.mark.parametrize(
    "token",
    [
        # The server extends a message beyond the hold-back, and delivers new messages before it.
        '["jetstream",2576,[[39,"delay",11.0,7],[44,"cut_off",8.0,8],[46,"crash",1.0,1]],null,false,false]',
        # The server extends a message while it sorts more messages than the room holds.
        (
            '["jetstream",2249,[[74,"crash",0.0,0],[78,"crash",0.0,5],[85,"callback",0.0,0],[86,"cut_off",5.4,8],'
            '[97,"crash",0.1,4]],null,false,false]'
        ),
    ],
    ids=["hold-back", "one batch"],
)
def test_a_late_in_progress_acknowledgement_breaks_no_order(adapter: JetStreamAdapter, token: str) -> None:
    assert run_schedule(schedule_of(token), adapter).run.findings == {}


def test_a_late_shrink_of_a_dead_process_is_no_second_process(adapter: JetStreamAdapter) -> None:
    # The server processes the shrink of a dead process 14 s late, while the next process handles messages.
    token = '["jetstream",4281,[[32,"delay",14.0,4],[77,"drop_request",0.0,2]],null,false,false]'
    assert run_schedule(schedule_of(token), adapter).run.findings == {}


def test_the_server_redelivers_no_running_message_of_a_shared_durable(adapter: JetStreamAdapter) -> None:
    token = '["jetstream",3765,[[1,"restart",8.0,6],[28,"callback",0.0,1]],16,true,false]'
    made = run_schedule(schedule_of(token), adapter)
    assert made.run.findings == {}
    assert made.run.happened["fault: callback"] == 0


def test_a_run_leaves_clocks_and_client_as_they_were(adapter: JetStreamAdapter) -> None:
    def used() -> list[object]:
        return [time.monotonic, time.time, os.urandom, vars(nats.aio.client)["TcpTransport"]]

    before = used()
    run_schedule(AdapterSchedule("jetstream", 0, ()), adapter)
    assert used() == before
