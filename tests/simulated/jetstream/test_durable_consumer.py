"""The durable consumer of a source is created, checked, watched and changed correctly on a simulated server."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final

import pytest

from lanes import ConfigError, SourceError
from lanes.clock import monotonic
from lanes_jetstream.durable.consumer import (
    ConsumerState,
    DurableConsumer,
    ack_waits,
    filtered,
)
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import API_TIMEOUT, Connection, NoAnswer
from tests.simulated.jetstream.stage import Stage, played, refusal

SECOND: Final = 1_000_000_000

CREATE: Final = "CONSUMER.CREATE.S.work"
INFO: Final = "CONSUMER.INFO.S.work"

FITS: Final[dict[str, Any]] = {
    "name": "work",
    "durable_name": "work",
    "ack_policy": "explicit",
    "ack_wait": 30 * SECOND,
    "max_deliver": -1,
}

MINE: Final = {"lanes-managed": "1"}
SHRUNK: Final = {**MINE, "lanes-original-ack-wait": str(30 * SECOND)}


def consumer_of(stage: Stage, **arguments: Any) -> DurableConsumer:
    wanted: dict[str, Any] = {
        "filter_subject": None,
        "ack_wait": 30.0,
        "max_ack_pending": 100,
        "start": {"deliver_policy": "all"},
        "modify": False,
        "hold_back": False,
    }
    return DurableConsumer(Connection(stage.client), "S", "work", **(wanted | arguments))


async def found(stage: Stage, config: dict[str, Any] | None = None, **arguments: Any) -> DurableConsumer:
    """A consumer that another program has created."""
    await stage.stream("S")
    await stage.api(CREATE, {"stream_name": "S", "config": FITS | (config or {}), "action": "create"})
    made = consumer_of(stage, **arguments)
    await made.ensure()
    return made


def consumer(stage: Stage) -> Any:
    return stage.server.api.streams["S"].consumers["work"]


async def deliver(stage: Stage, count: int) -> list[str]:
    """Let the consumer deliver messages. Returns their reply subjects."""
    inbox = stage.client.new_inbox()
    subscription = await stage.client.subscribe(inbox)
    request = json.dumps({"batch": count, "expires": SECOND}).encode()
    await stage.client.publish("$JS.API.CONSUMER.MSG.NEXT.S.work", request, reply=inbox)
    return [(await subscription.next_msg(timeout=5)).reply for _ in range(count)]


# --- start


@pytest.mark.parametrize("subject", [None, "S.a"])
def test_a_missing_consumer_is_created_with_the_wanted_settings(subject: str | None) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": 7}
        made = consumer_of(stage, filter_subject=subject, ack_wait=2.5, max_ack_pending=9, start=start)
        await made.ensure()
        assert stage.fields("CONSUMER.CREATE") == [
            {
                "stream_name": "S",
                "action": "create",
                "config": {
                    "durable_name": "work",
                    "name": "work",
                    "ack_policy": "explicit",
                    "ack_wait": 2_500_000_000,
                    "replay_policy": "instant",
                    "max_deliver": -1,
                    "max_ack_pending": 9,
                    "metadata": MINE,
                    **start,
                    **({} if subject is None else {"filter_subject": subject}),
                },
            }
        ]
        assert made.config == consumer(stage).config
        assert (str(made), made.tokens, made.stream) == ("S/work", "S.work", "S")
        assert made.next_subject == "$JS.API.CONSUMER.MSG.NEXT.S.work"
        assert (made.ack_waits, made.max_ack_pending, made.modifiable) == ((2.5, 2.5), 9, True)
        again = consumer_of(stage, filter_subject=subject)
        await again.ensure()
        assert len(stage.fields("CONSUMER.CREATE")) == 1

    played(scene)


@pytest.mark.parametrize("policy", ["all", "new"])
def test_a_start_that_an_existing_consumer_ignores_is_logged(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await found(stage, start={"deliver_policy": policy})

    with caplog.at_level(logging.INFO, logger="lanes.jetstream"):
        played(scene)
    lines = [record.getMessage() for record in caplog.records if record.name == "lanes.jetstream"]
    said = "consumer S/work: the consumer exists and continues; start=… applies to a new consumer only"
    assert [said.endswith(line) or line == said for line in lines] == [True] * (policy == "new")


@pytest.mark.parametrize(
    ("answer", "kind", "said", "retryable"),
    [
        (refusal(503, 10_008, "no leader"), SourceError, "^consumer S/work at the given connection: no leader", True),
        (
            refusal(400, 10_012, "bad"),
            ConfigError,
            "^consumer S/work cannot be created: bad .*; correct the setting",
            None,
        ),
        (
            refusal(400, 10_099, "multiple non-filtered consumers not allowed on workqueue stream"),
            ConfigError,
            "; a work queue allows one consumer for each subject, so use its existing consumer, or pass a filter_su",
            None,
        ),
    ],
)
def test_a_refused_creation_is_temporary_or_a_fault_of_the_setting(
    answer: dict[str, Any], kind: type[Exception], said: str, retryable: bool | None
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        stage.answer(CREATE, *[answer] * 5)
        with pytest.raises(kind, match=said) as refused:
            await consumer_of(stage).ensure()
        if isinstance(refused.value, SourceError):
            assert refused.value.retryable is retryable

    played(scene)


def test_a_consumer_whose_state_cannot_be_read_is_not_created() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        stage.answer(INFO, refusal(503, 10_008, "no leader"))
        with pytest.raises(
            SourceError, match=r"^consumer S/work at the given connection: no leader \(10008\)"
        ) as refused:
            await consumer_of(stage).ensure()
        assert refused.value.retryable
        assert stage.fields("CONSUMER.CREATE") == []

    played(scene)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"deliver_subject": "x"}, "it is a push consumer; use a pull consumer, on another durable"),
        ({"max_deliver": 5}, "max_deliver is 5, so the server would stop redelivering"),
        ({"backoff": [5 * SECOND, 9 * SECOND]}, "backoff is set, although lanes retries inside the lane"),
        ({"priority_groups": ["g"]}, "priority_groups are set"),
        ({"ack_wait": SECOND // 2}, "ack_wait is 0.5 s; set it to 1 s or more"),
        ({"ack_policy": "all"}, "ack_policy is 'all', which the server cannot change"),
    ],
)
def test_a_consumer_with_one_fault_is_refused_for_this_fault_alone(config: dict[str, Any], said: str) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(ConfigError) as refused:
            await found(stage, config)
        assert str(refused.value).startswith(f"consumer S/work does not fit: {said}")
        assert "; and" not in str(refused.value)
        fine = consumer_of(stage)
        assert fine.misfits(FITS) == ""
        assert fine.misfits({name: value for name, value in FITS.items() if name != "max_deliver"}) == ""

    played(scene)


def test_all_faults_of_a_consumer_are_listed_with_their_limits() -> None:
    async def scene(stage: Stage) -> None:
        made = consumer_of(stage)
        assert made.misfits({"ack_policy": "explicit", "ack_wait": SECOND}) == "", "1 s is enough"
        assert made.misfits({"ack_policy": "explicit"}) == "ack_wait is 0 s; set it to 1 s or more, for example 30 s"
        assert "ack_wait" not in made.misfits({"ack_policy": "none"}), "the server sets no ack_wait then"
        both = made.misfits({"ack_policy": "explicit", "backoff": [SECOND // 4], "ack_wait": 9 * SECOND})
        assert both.startswith("backoff is set")
        assert both.endswith("; backoff begins with 0.25 s; set it to 1 s or more, for example 30 s")
        modifying = consumer_of(stage, modify=True)
        assert modifying.misfits({"ack_policy": "explicit", "backoff": [SECOND, 2 * SECOND]}) == ""
        filtering = consumer_of(stage, filter_subject="S.a")
        assert filtering.misfits(FITS | {"filter_subject": "S.a"}) == ""
        assert filtering.misfits(FITS | {"filter_subject": "S.b"}) == "it filters 'S.b', not 'S.a'; use another durable"
        assert "it filters ['S.a', 'S.b'], not 'S.a'" in filtering.misfits(FITS | {"filter_subjects": ["S.a", "S.b"]})
        assert "it filters 'everything', not 'S.a'" in filtering.misfits(FITS)

    played(scene)


def test_a_filter_that_no_message_can_match_is_refused() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        with pytest.raises(ConfigError, match=r"^filter_subject='x\.y': matches no subject of stream 'S' \(S\.>\), so"):
            await consumer_of(stage, filter_subject="x.y").ensure()
        assert stage.fields("STREAM.INFO.S")[-1] == {"subjects_filter": "x.y"}
        # Messages remain after a change of the stream's subjects.
        await stage.publish("S.old")
        stage.server.api.streams["S"].config["subjects"] = [f"new.{number}" for number in range(12)]
        await consumer_of(stage, filter_subject="S.old").ensure()
        stage.server.delete_consumer("S", "work")
        with pytest.raises(ConfigError, match=r"\(new\.0, new\.1, new\.10, new\.11, .*, new\.7, …\)"):
            await consumer_of(stage, filter_subject="x.y").ensure()
        stage.server.api.streams["S"].config["subjects"] = [f"new.{number}" for number in range(10)]
        with pytest.raises(ConfigError, match=r"new\.8, new\.9\)"):
            await consumer_of(stage, filter_subject="x.y").ensure()
        stage.server.api.streams["S"].config["subjects"] = []
        with pytest.raises(ConfigError, match=r"\(none\)"):
            await consumer_of(stage, filter_subject="x.y").ensure()

    played(scene)


# --- properties


def test_the_times_until_a_redelivery_are_those_outside_of_a_takeover() -> None:
    async def scene(stage: Stage) -> None:
        made = consumer_of(stage)
        made.config = {"ack_wait": 1_000_000, "metadata": SHRUNK}
        assert made.ack_waits == (30.0, 30.0)
        backoff = json.dumps([2 * SECOND, 8 * SECOND, 4 * SECOND])
        made.config = {"ack_wait": 1_000_000, "metadata": SHRUNK | {"lanes-original-backoff": backoff}}
        assert made.ack_waits == (2.0, 8.0)
        for metadata in (
            {"lanes-original-ack-wait": "soon"},
            SHRUNK | {"lanes-original-backoff": "soon"},
            SHRUNK | {"lanes-original-backoff": "5"},
            SHRUNK | {"lanes-original-backoff": '["x"]'},
        ):
            made.config = {"ack_wait": 1, "metadata": metadata}
            with pytest.raises(
                ConfigError, match=r"^consumer S/work: its metadata 'lanes-original-ack-wait' or '.*unread"
            ):
                assert made.ack_waits

    played(scene)
    assert ack_waits({}) == (0.0, 0.0)
    assert ack_waits({"ack_wait": 3 * SECOND, "backoff": []}) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, None), ({"max_ack_pending": -1}, None), ({"max_ack_pending": 1}, 1), ({"max_ack_pending": 0}, None)],
)
def test_a_limit_of_unacknowledged_messages_is_above_0(config: dict[str, Any], expected: int | None) -> None:
    async def scene(stage: Stage) -> None:
        made = consumer_of(stage)
        made.config = config
        assert made.max_ack_pending == expected

    played(scene)


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize(("modify", "hold_back"), [(False, False), (False, True), (True, False)])
def test_only_an_own_consumer_or_an_allowed_one_is_modified(managed: bool, modify: bool, hold_back: bool) -> None:
    async def scene(stage: Stage) -> None:
        made = consumer_of(stage, modify=modify, hold_back=hold_back)
        made.config = {"metadata": MINE if managed else None}
        assert made.modifiable == (modify or (managed and not hold_back))

    played(scene)


def test_a_consumer_delivers_what_its_filter_and_its_stream_take() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage)
        assert [made.delivers("S", subject) for subject in ("S.a", "S.a.b", "x.a")] == [True, True, False]
        assert not made.delivers("T", "S.a")
        made.config = FITS | {"filter_subject": "S.a"}
        assert [made.delivers("S", subject) for subject in ("S.a", "S.b")] == [True, False]
        made.config = FITS | {"filter_subjects": ["S.a", "S.c.*"]}
        assert [made.delivers("S", subject) for subject in ("S.a", "S.c.1", "S.b")] == [True, True, False]
        # The stored subject of a transformed message is not known.
        stage.server.api.streams["S"].config["subject_transform"] = {"src": ">", "dest": "x.>"}
        made.stream_state = await made.check_stream(0)
        assert not made.delivers("S", "S.a")
        made.config = FITS
        assert made.delivers("S", "S.a")

    played(scene)
    assert [filtered(each) for each in ({}, {"filter_subject": "a"}, {"filter_subjects": ["a"]})] == [False, True, True]


@pytest.mark.parametrize(
    ("stream", "consumer", "loses"),
    [
        ({}, {}, True),
        ({"num_replicas": 3}, {}, False),
        ({"num_replicas": 3}, {"num_replicas": 1}, True),
        ({"num_replicas": 3}, {"num_replicas": 3}, False),
        ({"storage": "memory"}, {}, False),
    ],
)
def test_one_copy_on_disk_can_lose_the_last_acknowledgements(
    stream: dict[str, Any], consumer: dict[str, Any], loses: bool
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", **stream)
        made = consumer_of(stage)
        await made.ensure()
        made.config = FITS | consumer
        assert made.loses_last_acks == loses
        assert not made.drops_acknowledged

    played(scene)


def test_a_work_queue_drops_acknowledged_messages() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", retention="workqueue")
        made = consumer_of(stage)
        await made.ensure()
        assert made.drops_acknowledged

    played(scene)


# --- state


def test_the_state_of_a_consumer_counts_deliveries_and_acknowledgements() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage)
        assert await made.refresh() == ConsumerState(0, 0, 0, 0, False, 0, False)
        await stage.publish(*["S.a"] * 5)
        tokens = await deliver(stage, 3)
        assert await made.refresh() == ConsumerState(3, 0, 3, 3, False, 2, False)
        await stage.client.request(tokens[1], b"+ACK", timeout=5)
        assert await made.refresh() == ConsumerState(2, 0, 3, 3, True, 2, False)
        await stage.client.request(tokens[0], b"+ACK", timeout=5)
        assert await made.refresh() == ConsumerState(1, 0, 3, 3, False, 2, False)
        inbox = stage.client.new_inbox()
        await stage.client.subscribe(inbox)
        await deliver(stage, 2)
        request = json.dumps({"batch": 1, "expires": SECOND}).encode()
        await stage.client.publish("$JS.API.CONSUMER.MSG.NEXT.S.work", request, reply=inbox)
        state = await made.refresh()
        assert (state.waiting_pulls, state.undelivered, state.highest) == (1, 0, 5)
        stage.answer(INFO, {"created": "", "config": {"x": 1}, "paused": True})
        made._created = None
        assert await made.refresh() == ConsumerState(0, 0, 0, 0, False, 0, True)
        assert made.config == {"x": 1}

    played(scene)


def test_reading_the_consumer_changes_nothing_and_shows_a_takeover_of_another_process() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage)
        before = made.config
        consumer(stage).config = FITS | {"metadata": SHRUNK}
        seen = await made.inspect(0)
        assert (seen.in_takeover, seen.config["metadata"], made.config) == (True, SHRUNK, before)
        assert seen.stream == await made.check_stream(0)
        assert seen.state == await made.refresh()
        consumer(stage).config = FITS | {"metadata": None}
        assert not (await made.inspect(0)).in_takeover

    played(scene)


@pytest.mark.parametrize(("version", "stops"), [("2.12.0", True), ("2.11.4", False), ("3.0.0", True)])
def test_a_consumer_that_was_created_again_stops_the_source(version: str, stops: bool) -> None:
    """Before 2.12, a consumer has another creation time after a restart of the server."""

    async def scene(stage: Stage) -> None:
        made = await found(stage)
        await asyncio.sleep(5.0)
        stage.server.delete_consumer("S", "work")
        await stage.api(CREATE, {"stream_name": "S", "config": FITS, "action": "create"})
        for call in (made.refresh, lambda: made.inspect(0)):
            if stops:
                with pytest.raises(SourceError, match=r"^consumer S/work was deleted and created again during the run"):
                    await call()
            else:
                await call()

    played(scene, version=version)


def test_a_stream_that_was_replaced_or_lost_its_end_stops_the_source() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage)
        await stage.publish("S.a", "S.a")
        assert (await made.check_stream(2)).last == 2
        with pytest.raises(SourceError, match=r"^stream 'S' ends at sequence 2 but was read up to 3, so") as lost:
            await made.inspect(3)
        assert not lost.value.retryable
        await asyncio.sleep(5.0)
        await stage.api("STREAM.DELETE.S")
        with pytest.raises(SourceError, match=r"^stream 'S' was deleted during the run; create it again"):
            await made.check_stream(0)
        await stage.stream("S")
        with pytest.raises(SourceError, match=r"^stream 'S' was deleted and created again, so its sequences"):
            await made.check_stream(0)

    played(scene)


def test_an_error_of_the_api_names_what_was_deleted() -> None:
    async def scene(stage: Stage) -> None:
        made = consumer_of(stage)
        texts = [made.failure_text(ApiError(code, "text")) for code in (10_059, 10_014, 5)]
        assert texts[0].startswith("stream 'S' was deleted during the run")
        assert texts[1].startswith("consumer S/work was deleted; prevent the deletion")
        assert texts[2] == "consumer S/work: text (5)"
        assert made.second_puller.startswith("consumer S/work is pulled by another client")

    played(scene)


# --- timers


@pytest.mark.parametrize("backoff", [None, [2 * SECOND, 5 * SECOND]])
def test_a_requeue_redelivers_all_unacknowledged_messages_and_restores_the_timers(backoff: list[int] | None) -> None:
    async def scene(stage: Stage) -> None:
        config = {"metadata": {**MINE, "team": "x"}} | ({} if backoff is None else {"backoff": backoff})
        made = await found(stage, config, modify=True)
        await stage.publish(*["S.a"] * 3)
        await deliver(stage, 2)
        began = monotonic()
        await made.requeue_pending()
        assert monotonic() - began == pytest.approx(0.4, abs=0.05)
        shrunk, restored = (each["config"] for each in stage.fields("CONSUMER.CREATE")[1:])
        metadata = {**MINE, "team": "x", "lanes-original-ack-wait": str(30 * SECOND)}
        if backoff is not None:
            metadata["lanes-original-backoff"] = json.dumps(backoff)
        assert shrunk == FITS | {"ack_wait": 1_000_000, "metadata": metadata}
        assert restored == FITS | config == made.config
        assert {each["action"] for each in stage.fields("CONSUMER.CREATE")[1:]} == {"update"}
        assert {each["stream_name"] for each in stage.fields("CONSUMER.CREATE")} == {"S"}
        again = await deliver(stage, 3)
        assert [token.split(".")[5] for token in again] == ["1", "2", "3"]
        sent = len(stage.sent)
        await made.restore()
        assert len(stage.sent) == sent, "nothing is shrunk"

    played(scene)


def test_a_cancelled_requeue_restores_the_timers() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage, {"metadata": MINE})
        for after in (0.0005, 0.2):
            requeue = asyncio.create_task(made.requeue_pending())
            await asyncio.sleep(after)
            requeue.cancel()
            await asyncio.wait([requeue])
            assert consumer(stage).config == FITS | {"metadata": MINE}

    played(scene)


def test_a_consumer_that_a_dead_process_left_shrunk_is_restored() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage, {"ack_wait": 1_000_000, "metadata": SHRUNK})
        await made.restore()
        assert consumer(stage).config == FITS | {"metadata": MINE}

    played(scene)


@pytest.mark.parametrize("shows", [True, False])
def test_an_update_is_awaited_until_the_server_shows_it(shows: bool) -> None:
    """A server that has just restarted returns the configuration before the update."""

    async def scene(stage: Stage) -> None:
        made = await found(stage, {"ack_wait": 1_000_000, "metadata": SHRUNK})
        before = stage.server.api.described(consumer(stage), 0.0)
        stage.answer(INFO, *[before] * (3 if shows else 1000))
        began = monotonic()
        if shows:
            await made.restore()
            assert monotonic() - began == pytest.approx(0.15, abs=0.02)
            assert made.ack_waits == (30.0, 30.0)
        else:
            with pytest.raises(
                NoAnswer, match=r"^consumer S/work: the server accepted a new ack_wait, but does not show"
            ):
                await made.restore()
            assert monotonic() - began == pytest.approx(API_TIMEOUT, abs=0.1)

    played(scene)


def test_an_empty_backoff_counts_as_no_backoff() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage, {"ack_wait": 1_000_000, "metadata": SHRUNK})
        stage.answer(INFO, lambda answer: {**answer, "config": {**answer["config"], "backoff": []}})
        began = monotonic()
        await made.restore()
        assert monotonic() - began < 0.01

    played(scene)


def test_a_reset_redelivers_from_the_floor_in_order() -> None:
    async def scene(stage: Stage) -> None:
        made = await found(stage)
        await stage.publish(*["S.a"] * 3)
        tokens = await deliver(stage, 3)
        await stage.client.request(tokens[0], b"+ACK", timeout=5)
        await made.reset()
        assert stage.fields("CONSUMER.RESET.S.work") == [{}]
        assert [token.split(".")[5] for token in await deliver(stage, 2)] == ["2", "3"]

    played(scene, version="2.14.0")
