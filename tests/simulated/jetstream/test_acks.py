"""Acknowledgements over a real client on a simulated server are sent, repeated and confirmed by their rules."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import nats.errors
import pytest
from nats.aio.client import Client

from lanes import SourceError
from lanes.clock import monotonic
from lanes.core.types import Room, Settlement
from lanes_jetstream import JetStreamSource
from lanes_jetstream.wire.acks import (
    ACK,
    CONFIRM_TIMEOUT,
    IN_PROGRESS,
    NAK,
    SYNC_DELAY,
    AckMode,
    Acks,
    ack_errors,
    give_back,
    keep_alive,
    send_all,
)
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.stage import LATENCY, Stage, played

ROUND_TRIP: Final = 2 * LATENCY

ROOM: Final = Room(10, 1_000_000)


async def delivered(stage: Stage, count: int, client: Client | None = None) -> list[str]:
    """Let a consumer deliver messages. Returns the reply subjects, which acknowledge them."""
    await stage.stream("S")
    config = {"name": "c", "durable_name": "c", "ack_policy": "explicit", "ack_wait": 300_000_000_000}
    await stage.api("CONSUMER.CREATE.S.c", {"stream_name": "S", "config": config})
    await stage.publish(*["S.a"] * count)
    inbox = stage.client.new_inbox()
    subscription = await stage.client.subscribe(inbox)
    request = b'{"batch": %d, "expires": 9000000000}' % count
    await stage.client.publish("$JS.API.CONSUMER.MSG.NEXT.S.c", request, reply=inbox)
    return [(await subscription.next_msg(timeout=5)).reply for _ in range(count)]


def acks_of(stage: Stage, mode: AckMode) -> Acks:
    return Acks(stage.client, mode, "jetstream S/c")


def unacknowledged(stage: Stage) -> list[int]:
    return stage.server.api.streams["S"].consumers["c"].unfinished


def bodies(stage: Stage) -> list[bytes]:
    return [each.payload for each in stage.sent if each.subject.startswith("$JS.ACK.")]


# --- one body to many subjects


@pytest.mark.parametrize("shortcut", [True, False])
def test_acknowledgements_are_sent_to_all_reply_subjects_in_order_and_counted(shortcut: bool) -> None:
    async def scene(stage: Stage) -> None:
        client: Any = stage.client
        if not shortcut:
            client._send_command = None
        before = dict(client.stats)
        if shortcut:
            await send_all(client, ["a.1", "a.2", "a.3"], b"+ACK")
            await asyncio.sleep(ROUND_TRIP)
            assert [(each.subject, each.reply, each.payload) for each in stage.sent] == [
                ("a.1", "", b"+ACK"),
                ("a.2", "", b"+ACK"),
                ("a.3", "", b"+ACK"),
            ]
            assert client.stats["out_msgs"] == before["out_msgs"] + 3
            assert client.stats["out_bytes"] == before["out_bytes"] + 12
        else:
            published: list[tuple[str, bytes]] = []

            async def publish(subject: str, body: bytes) -> None:
                published.append((subject, body))

            original, client.publish = client.publish, publish
            await send_all(client, ["a.1", "a.2"], b"-NAK")
            client.publish = original
            assert published == [("a.1", b"-NAK"), ("a.2", b"-NAK")]
            del client._send_command

    played(scene)


@pytest.mark.parametrize("state", ["connected", "draining"])
def test_a_client_whose_connection_is_not_plain_sends_acknowledgements_itself(state: str) -> None:
    """While the client reconnects, its own buffer bounds the unsent data.

    A draining client refuses further messages.
    """

    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        if state == "draining":
            await client.drain()
            with pytest.raises(nats.errors.Error):
                await send_all(client, ["a.1"], ACK)
            return
        stage.server.stop()
        await asyncio.sleep(0.05)
        sent = client.stats["out_msgs"]
        await send_all(client, ["a.1"], ACK)
        assert client.stats["out_msgs"] == sent + 1
        stage.server.start(monotonic())
        await asyncio.sleep(2.0)
        assert stage.subjects("a.") == ["a.1"]
        await client.close()

    played(scene)


def test_an_error_at_an_acknowledgement_says_whether_a_retry_helps() -> None:
    with (
        pytest.raises(SourceError, match=r"^source: the connection is closed permanently") as closed,
        ack_errors("source"),
    ):
        raise nats.errors.ConnectionClosedError
    assert not closed.value.retryable
    for error in (nats.errors.TimeoutError(), OSError("no")):
        said = rf"^source: acknowledgement failed \({type(error).__name__}\)"
        with pytest.raises(SourceError, match=said) as failed, ack_errors("source"):
            raise error
        assert failed.value.retryable
        assert failed.value.__cause__ is error
    with pytest.raises(ZeroDivisionError), ack_errors("source"):
        raise ZeroDivisionError


@pytest.mark.parametrize(("call", "body"), [(keep_alive, IN_PROGRESS), (give_back, NAK)])
def test_keep_alives_and_returned_messages_are_best_effort(
    call: Any, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 2)
        await call(stage.client, tokens, "source")
        await asyncio.sleep(ROUND_TRIP)
        assert bodies(stage) == [body] * 2
        await call(stage.client, [], "source")
        client: Any = stage.client

        async def fails(data: bytes) -> None:
            raise OSError("broken pipe")

        client._send_command = fails
        await call(client, tokens, "source")
        del client._send_command
        stage.server.stop()
        await asyncio.sleep(0.05)
        sent = stage.client.stats["out_msgs"]
        await call(stage.client, tokens, "source")
        assert stage.client.stats["out_msgs"] == sent, "without a connection, nothing is kept for later"

    with caplog.at_level(logging.DEBUG, logger="lanes.jetstream"):
        played(scene)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "lanes.jetstream"]
    assert line.startswith("source: ")
    assert line.endswith("broken pipe")


# --- the modes


@pytest.mark.parametrize("mode", ["fire-and-forget", "confirmed-at-drain"])
def test_acknowledgements_are_sent_without_a_wait(mode: Any) -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 3)
        acks, began = acks_of(stage, mode), monotonic()
        await acks.send(tokens[:2])
        assert monotonic() == began
        await asyncio.sleep(ROUND_TRIP)
        assert unacknowledged(stage) == [3]
        assert bodies(stage) == [ACK] * 2
        assert [each.reply for each in stage.sent if each.payload == ACK] == ["", ""]
        await acks.close()

    played(scene)


def test_confirmed_acknowledgements_were_read_by_the_server() -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 5)
        acks = acks_of(stage, "confirmed")
        for part in (tokens[:1], tokens[1:3], tokens[3:]):
            await acks.send(part)
        assert unacknowledged(stage) == []
        replies = [each.reply for each in stage.sent if each.payload == ACK]
        assert len({*replies}) == 5, "each confirmation has its own subject"
        assert all(each.startswith("_INBOX.") for each in replies), "no other client hears the confirmations"
        (session,) = stage.server.sessions
        inbox = replies[0].rpartition(".")[0]
        assert session.hears(f"{inbox}.9")
        await acks.close()
        await stage.client.flush()
        assert session.hears(f"{inbox}.9") == []
        await acks.close()

    played(scene)


@pytest.mark.parametrize("fate", ["drop_request", "drop_reply"])
def test_a_missing_confirmation_is_an_error_that_a_retry_mends(fate: Any) -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 3)
        acks = acks_of(stage, "confirmed")
        began = monotonic()
        stage.meet(tokens[1], Fate(fate))
        with pytest.raises(SourceError, match=r"^jetstream S/c: 1 acknowledgements are not confirmed") as missing:
            await acks.send(tokens)
        assert missing.value.retryable
        assert monotonic() - began == pytest.approx(CONFIRM_TIMEOUT, abs=0.1)
        await acks.send(tokens)
        assert unacknowledged(stage) == []

    played(scene)


def test_a_confirmation_of_an_earlier_settlement_confirms_no_later_one() -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 2)
        acks = acks_of(stage, "confirmed")
        stage.meet(tokens[0], Fate("delay_reply", CONFIRM_TIMEOUT + 1.0))
        with pytest.raises(SourceError):
            await acks.send(tokens[:1])
        began = monotonic()
        stage.meet(tokens[1], Fate("delay_reply", 3.0))
        await acks.send(tokens[1:])
        assert monotonic() - began == pytest.approx(3.0, abs=0.1)
        assert stage.errors == []

    played(scene)


def test_a_message_that_returns_during_its_settlement_is_not_settled_before_it_is_confirmed() -> None:
    """The engine replaces the token of such a message, and nothing else acknowledges the redelivery."""

    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        client: Any = await stage.connect()
        source: Any = JetStreamSource(
            client, stream="S", durable="c", key=None, acks="confirmed", ack_wait=300.0
        )._source
        await source.open()
        (assigned,) = await source.receive(ROOM)
        await stage.publish("S.a")
        (first,) = await source.receive(ROOM)
        stage.meet("$JS.ACK.", Fate("drop_request"))
        settling = asyncio.create_task(source.settle([Settlement(assigned.partition, first.run)]))
        await asyncio.sleep(0.1)
        source._pulls.interrupt("ended", "409 Leadership Change")
        (again,) = await source.receive(ROOM)
        assert again.run[0].position == first.run[0].position and again.run[0].token != first.run[0].token
        with pytest.raises(SourceError, match="1 acknowledgements are not confirmed") as refused:
            await settling
        assert refused.value.retryable
        await source.settle([Settlement(assigned.partition, again.run)])
        assert unacknowledged(stage) == []
        await source.aclose()
        await client.close()

    played(scene)


def test_a_consumer_without_a_server_confirms_nothing() -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 2)
        stage.server.delete_consumer("S", "c")
        acks, began = acks_of(stage, "confirmed"), monotonic()
        with pytest.raises(SourceError, match=r"2 acknowledgements are not confirmed"):
            await acks.send(tokens)
        assert monotonic() - began == pytest.approx(CONFIRM_TIMEOUT, abs=0.1)

    played(scene)


# --- after a reconnect


@pytest.mark.parametrize("mode", ["fire-and-forget", "confirmed"])
def test_the_last_acknowledgements_are_repeated_once_after_a_reconnect(mode: Any) -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 2)
        acks = acks_of(stage, mode)
        await acks.send(tokens)
        await acks.resend()
        await asyncio.sleep(ROUND_TRIP)
        assert len(bodies(stage)) == 2
        stage.server.stop()
        await asyncio.sleep(0.05)
        stage.server.start(monotonic())
        await asyncio.sleep(1.0)
        for _ in range(2):
            await acks.resend()
            await asyncio.sleep(ROUND_TRIP)
            assert stage.subjects("$JS.ACK.") == tokens * 2

    played(scene)


def test_acknowledgements_that_were_not_sent_are_repeated_too() -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 1)
        acks = acks_of(stage, "fire-and-forget")
        client: Any = stage.client

        async def fails(data: bytes) -> None:
            raise OSError("broken pipe")

        client._send_command = fails
        with pytest.raises(OSError, match="broken pipe"):
            await acks.send(tokens)
        del client._send_command
        client.stats["reconnects"] += 1
        await acks.resend()
        await asyncio.sleep(ROUND_TRIP)
        assert unacknowledged(stage) == []

    played(scene)


# --- at the end


@pytest.mark.parametrize("mode", ["confirmed", "confirmed-at-drain"])
def test_the_end_waits_until_the_server_has_processed_the_last_acknowledgement(mode: Any) -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 2)
        acks = acks_of(stage, mode)
        began = monotonic()
        await acks.finish(loses_last_acks=True, failed=False)
        assert monotonic() == began, "nothing was acknowledged"
        await acks.send(tokens)
        sent = monotonic()
        await stage.client.flush()
        stage.meet(tokens[1], Fate("delay_reply", 0.1))
        await acks.finish(loses_last_acks=False, failed=False)
        assert monotonic() - sent == pytest.approx(0.1, abs=0.01)
        assert stage.subjects("$JS.ACK.")[-1] == tokens[1]
        await acks.finish(loses_last_acks=True, failed=False)
        assert monotonic() - sent == pytest.approx(SYNC_DELAY, abs=0.01), "the server writes acknowledgements later"
        await acks.finish(loses_last_acks=True, failed=False)
        assert monotonic() - sent < SYNC_DELAY + 0.1

    played(scene)


def test_the_end_after_a_repeat_waits_for_the_repeat() -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 1)
        acks = acks_of(stage, "confirmed-at-drain")
        await acks.send(tokens)
        await asyncio.sleep(5.0)
        stage.client.stats["reconnects"] += 1
        await acks.resend()
        repeated = monotonic()
        await acks.finish(loses_last_acks=True, failed=False)
        assert monotonic() - repeated == pytest.approx(SYNC_DELAY, abs=0.01)

    played(scene)


def test_the_end_of_the_mode_fire_and_forget_waits_for_nothing() -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 1)
        acks = acks_of(stage, "fire-and-forget")
        await acks.send(tokens)
        began = monotonic()
        await acks.finish(loses_last_acks=True, failed=False)
        assert monotonic() == began

    played(scene)


@pytest.mark.parametrize("fault", ["lost", "deleted"])
def test_an_unconfirmed_end_is_an_error_that_a_retry_mends(fault: str) -> None:
    async def scene(stage: Stage) -> None:
        tokens = await delivered(stage, 1)
        acks = acks_of(stage, "confirmed-at-drain")
        await acks.send(tokens)
        began = monotonic()
        if fault == "lost":
            await stage.client.flush()
            stage.meet(tokens[0], Fate("drop_reply"))
        else:
            stage.server.delete_consumer("S", "c")
        kind = "TimeoutError" if fault == "lost" else "NoRespondersError"
        said = rf"^jetstream S/c: the last acknowledgement is not confirmed \({kind}\)"
        with pytest.raises(SourceError, match=said) as missing:
            await acks.finish(loses_last_acks=False, failed=False)
        assert missing.value.retryable
        assert monotonic() - began == pytest.approx(CONFIRM_TIMEOUT if fault == "lost" else 0.0, abs=0.1)

    played(scene)
