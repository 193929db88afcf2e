"""The source over one durable behaves correctly on a simulated server, from its start to its end.

This file is longer than most, because all its tests share one opened source.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, Final

import pytest

from lanes import ConfigError, SourceError
from lanes.clock import monotonic
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Delivered
from lanes_jetstream import JetStreamSource, subject_token
from lanes_jetstream.durable.source import DurableSource
from memsource.sim.loop.virtual import until
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.stage import LATENCY, URL, Stage, played, refusal

SECOND: Final = 1_000_000_000

ROOM: Final = Room(10, 1_000_000)

NAME: Final = "jetstream S/work"
NEXT: Final = "$JS.API.CONSUMER.MSG.NEXT.S.work"
INFO: Final = "CONSUMER.INFO.S.work"


def source_of(client: Any, **arguments: Any) -> DurableSource:
    wanted: dict[str, Any] = {"stream": "S", "durable": "work", "key": subject_token(-1), "acks": "fire-and-forget"}
    inner = JetStreamSource(client, **(wanted | arguments))._source
    assert isinstance(inner, DurableSource)
    return inner


async def opened(stage: Stage, **arguments: Any) -> DurableSource:
    """A source with a separate client, whose consumer has received the assignment."""
    if "S" not in stage.server.api.streams:
        await stage.stream("S")
    source = source_of(await stage.connect(), **arguments)
    await source.open()
    (assigned,) = await source.receive(ROOM)
    assert assigned == Assigned(partition_of(source))
    return source


async def closed(source: DurableSource) -> None:
    await source.aclose()
    await source.connection.client.close()


def partition_of(source: DurableSource) -> Partition:
    assert source._partition is not None
    return source._partition


async def received(source: DurableSource, room: Room = ROOM) -> list[Message]:
    (event,) = await source.receive(room)
    assert isinstance(event, Delivered)
    return list(event.run)


async def all_received(source: DurableSource, count: int) -> list[int]:
    """The positions of this number of messages."""
    found: list[int] = []
    while len(found) < count:
        found += [message.position for message in await received(source)]
    return found


async def settle(source: DurableSource, messages: Sequence[Message]) -> None:
    await source.settle([Settlement(partition_of(source), list(messages))])
    await asyncio.sleep(2 * LATENCY)


def unfinished(stage: Stage) -> list[int]:
    return stage.server.api.streams["S"].consumers["work"].unfinished


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "lanes.jetstream" and each.levelno >= level]


async def pulled(stage: Stage, seconds: float) -> None:
    """Let another program, which does not use lanes, wait for messages."""
    inbox = stage.client.new_inbox()
    await stage.client.subscribe(inbox)
    request = json.dumps({"batch": 1, "expires": int(seconds * SECOND)}).encode()
    await stage.client.publish(NEXT, request, reply=inbox)
    await stage.client.flush()


# --- open


@pytest.mark.parametrize("shared", [True, False])
def test_the_traits_follow_from_the_consumer(shared: bool) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        source = source_of(stage.client, shared=shared, ack_wait=6.0, max_ack_pending=7)
        declared = source.declared()
        assert (declared.name, declared.system, declared.partitions, declared.ordered) == (NAME, "nats", 1, not shared)
        traits = await source.open()
        assert (traits.extend_interval, traits.max_in_flight) == (2.0, 7)
        assert (traits.name, traits.partitions, traits.ordered) == (NAME, 1, not shared)
        partition = partition_of(source)
        assert partition.id == PartitionId("S", 0)
        assert partition.incarnation == stage.server.api.stamp(stage.server.api.streams["S"].created)
        assert await source.receive(ROOM) == [Assigned(partition)]
        assert repr(source) == f"<DurableSource {NAME}>"
        await source.aclose()
        assert stage.client.is_connected, "the client of the caller stays open"
        assert not any(session.hears(f"{source._pulls.inbox}.1") for session in stage.server.sessions)
        await source.aclose()

    played(scene)


def test_a_connection_by_url_is_closed_with_the_source() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        source = source_of(URL)
        await source.open()
        assert len(stage.server.sessions) == 2
        await source.aclose()
        await asyncio.sleep(2 * LATENCY)
        assert len(stage.server.sessions) == 1
        await source.aclose()

    played(scene)


@pytest.mark.parametrize("existing", [False, True])
def test_one_key_for_every_subject_of_the_stream_is_refused(existing: bool) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", subjects=["ord.*.paid", "ord.eu.*"])
        if existing:
            await source_of(stage.client, key=None).open()
        created = len(stage.fields("CONSUMER.CREATE"))
        with pytest.raises(ConfigError) as refused:
            await source_of(stage.client, key=subject_token(0)).open()
        assert str(refused.value) == (
            "key=subject_token(0): is 'ord' for every subject of consumer S/work (ord.*.paid, ord.eu.*), so all "
            "messages have one key and run one at a time. Use another token, such as subject_token(1); or pass "
            'key=None with Settings(order="partition"), if all messages need one order'
        )
        assert len(stage.fields("CONSUMER.CREATE")) == created
        # A shared consumer keeps no order.
        await source_of(stage.client, key=subject_token(0), shared=True).open()

    played(scene)


def test_one_key_for_every_subject_of_an_existing_filter_is_refused() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        config = {"durable_name": "work", "ack_policy": "explicit", "max_deliver": -1, "ack_wait": 30 * SECOND}
        config["filter_subjects"] = ["S.eu.1", "S.eu.2"]
        await stage.api("CONSUMER.CREATE.S.work", {"stream_name": "S", "config": config, "action": "create"})
        with pytest.raises(ConfigError, match=r"'eu' for every .*\(S\.eu\.1, S\.eu\.2\).* subject_token\(2\);"):
            await source_of(stage.client, key=subject_token(1)).open()
        await source_of(stage.client, key=subject_token(2)).open()

    played(scene)


def test_an_old_server_is_refused() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        with pytest.raises(ConfigError, match=r"nats-server 2\.10 is too old"):
            await source_of(stage.client).open()

    played(scene, version="2.10.9")


@pytest.mark.parametrize(("timeout", "starts"), [(5.0, True), (1.0, False)])
def test_a_start_waits_for_leaders(timeout: float, starts: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        stage.server.lose_leader("S", 3.0, monotonic(), silent=False)
        stage.network.schedule()
        source = source_of(stage.client, start_timeout=timeout)
        began = monotonic()
        if starts:
            await source.open()
            assert monotonic() - began == pytest.approx(3.0, abs=0.6)
        else:
            with pytest.raises(SourceError, match=r"JetStream system temporarily unavailable"):
                await source.open()
            assert monotonic() - began == pytest.approx(1.0, abs=0.1)
        assert len(stage.fields("STREAM.INFO.S")) < 12, "twice a second, and not as often as possible"
        await source.aclose()

    played(scene)
    assert lines(caplog)[0].startswith(f"{NAME}: stream 'S' at the given connection: JetStream system temporarily")
    assert lines(caplog)[0].endswith("; retrying")


def test_a_permanent_fault_at_the_start_is_raised_at_once() -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(ConfigError, match=r"^stream 'S' does not exist"):
            await source_of(stage.client).open()
        await stage.stream("S")
        stage.answer(INFO, refusal(400, 7, "no"))
        with pytest.raises(SourceError, match=r"^consumer S/work at the given connection: no \(7\)$"):
            await source_of(stage.client).open()
        assert monotonic() < 1.0

    played(scene)


def test_a_silent_consumer_at_the_start_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        await (await opened(stage)).aclose()
        stage.answer(INFO, lambda answer: answer, refusal(503, 10_008, "no leader"))
        source = source_of(stage.client)
        await source.open()
        await source.aclose()

    played(scene)
    assert [line for line in lines(caplog) if "no leader" in line] == [
        f"{NAME}: consumer S/work at the given connection: no leader (10008); retrying"
    ]


# --- other processes


def test_a_second_process_is_refused_after_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        second = source_of(await stage.connect())
        began = monotonic()
        with pytest.raises(ConfigError) as refused:
            await second.open()
        assert str(refused.value).startswith("consumer S/work is pulled by another client, so no key's order")
        assert str(refused.value).endswith('; or give up order: shared=True and order="none"')
        assert 2.0 < monotonic() - began < 2.5
        await stage.publish("S.a")
        assert await all_received(first, 1) == [1], "the first process continues"
        await closed(first)

    played(scene)
    assert lines(caplog) == [f"{NAME}: another process consumes it; waiting up to 2 s until it stops"]


def test_a_process_that_stops_meanwhile_leaves_its_place() -> None:
    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        second = source_of(await stage.connect())
        starting = asyncio.create_task(second.open())
        await asyncio.sleep(1.0)
        assert not starting.done()
        await closed(first)
        await starting
        await closed(second)

    played(scene)


@pytest.mark.parametrize(("seconds", "starts"), [(1.0, True), (60.0, False)])
def test_pull_requests_of_another_program_are_awaited(seconds: float, starts: bool) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S")
        await (await opened(stage)).aclose()
        await pulled(stage, seconds)
        source = source_of(await stage.connect())
        if starts:
            await source.open()
            assert monotonic() > seconds
        else:
            with pytest.raises(ConfigError, match=r"is pulled by another client"):
                await source.open()
        await closed(source)

    played(scene)


@pytest.mark.parametrize(("seconds", "starts"), [(25.0, True), (60.0, False)])
def test_the_requests_of_a_lost_machine_are_awaited_for_31_seconds(
    seconds: float, starts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        second = source_of(await stage.connect())
        # The machine answers no question, and its requests are open at the server.
        stage.meet(first._presence._subject, *[Fate("drop_request")] * 999)
        await pulled(stage, seconds)
        began = monotonic()
        if starts:
            await second.open()
            assert monotonic() - began == pytest.approx(seconds, abs=2.0)
        else:
            with pytest.raises(ConfigError, match=r"is pulled by another client"):
                await second.open()
            assert 31.0 < monotonic() - began < 33.0
        await closed(second)
        await closed(first)

    played(scene)
    said = "another process pulls and does not answer, so its machine may be lost; waiting up to 31 s until it stops"
    assert lines(caplog) == [f"{NAME}: {said}"]


def test_processes_on_different_durables_do_not_disturb_each_other() -> None:
    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        second = await opened(stage, durable="other")
        assert monotonic() < 1.0
        await stage.publish("S.a")
        assert await all_received(first, 1) == await all_received(second, 1) == [1]
        await closed(first)
        await closed(second)

    played(scene)


def test_shared_processes_do_not_ask_for_each_other() -> None:
    async def scene(stage: Stage) -> None:
        first, second = await opened(stage, shared=True), await opened(stage, shared=True)
        assert monotonic() < 1.0
        await stage.publish(*["S.a"] * 4)
        both = asyncio.gather(first.receive(Room(2, 9999)), second.receive(Room(2, 9999)))
        events = [event for each in await both for event in each]
        assert sorted(m.position for each in events if isinstance(each, Delivered) for m in each.run) == [1, 2, 3, 4]
        await closed(first)
        await closed(second)

    played(scene)


@pytest.mark.parametrize("apart", [0.0, 70.0])
def test_a_late_shrink_of_a_dead_process_is_undone_and_a_soon_repeated_one_is_a_second_process(
    caplog: pytest.LogCaptureFixture, apart: float
) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("S.a", "S.b")
        run = await received(source)
        consumer = stage.server.api.streams["S"].consumers["work"]
        usual = dict(consumer.config)

        async def shrink() -> None:
            metadata = {**usual["metadata"], "lanes-original-ack-wait": str(usual["ack_wait"])}
            config = {**usual, "ack_wait": 1_000_000, "metadata": metadata}
            request = {"stream_name": "S", "config": config, "action": "update"}
            await stage.api("CONSUMER.CREATE.S.work", request)

        await shrink()
        receiving = asyncio.create_task(all_received(source, 1_000_000))
        assert await until(lambda: consumer.config == usual, 5.0)
        assert source._watch.failure is None
        assert await until(lambda: source._taken_over, 5.0)
        await settle(source, run)
        await asyncio.sleep(apart)
        await shrink()
        if apart:
            assert await until(lambda: consumer.config == usual, 5.0)
            assert source._watch.failure is None
            receiving.cancel()
            await asyncio.wait([receiving])
        else:
            with pytest.raises(SourceError, match=r"^consumer S/work is pulled by another client"):
                await receiving
        await closed(source)

    played(scene)
    said = "ack_wait is shrunk by a late request of an earlier process, or by another process"
    line = f"{NAME}: requesting the messages again, unacknowledged ones first ({said})"
    assert lines(caplog) == [line] * (2 if apart else 1)


def test_a_process_that_started_at_the_same_moment_is_refused_later() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        source._second()
        first = source._watch.failure
        source._second()
        assert source._watch.failure is first, "the first failure is kept"
        with pytest.raises(SourceError, match=r"^consumer S/work is pulled by another client"):
            await source.receive(ROOM)
        await closed(source)

    played(scene)


# --- messages


def test_messages_arrive_in_order_with_their_keys_within_the_room() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("S.a", "S.b", "S.c", "S.d")
        run = await received(source, Room(3, 1_000_000))
        while len(run) < 3:
            run += await received(source, Room(3 - len(run), 1_000_000))
        assert [(message.position, message.key, message.size) for message in run] == [
            (1, b"a", 4),
            (2, b"b", 4),
            (3, b"c", 4),
        ]
        assert {message.partition for message in run} == {partition_of(source)}
        assert source._pulls._average_size < 256
        assert await all_received(source, 1) == [4]
        assert source._reading().highest == 4
        await closed(source)

    played(scene)


@pytest.mark.parametrize("acks", ["fire-and-forget", "confirmed", "confirmed-at-drain"])
def test_settled_messages_are_acknowledged(acks: str) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, acks=acks)
        await stage.publish(*["S.a"] * 3)
        run: list[Message] = []
        while len(run) < 3:
            run += await received(source)
        await settle(source, run[:2])
        assert unfinished(stage) == [3]
        replies = [each.reply for each in stage.sent if each.payload == b"+ACK"]
        assert all(replies) == (acks == "confirmed")
        await source.settle([Settlement(partition_of(source), run[2:]), Settlement(partition_of(source), run[:1])])
        await source.release(partition_of(source))
        assert unfinished(stage) == []
        assert [bool(each.reply) for each in stage.sent if each.payload == b"+ACK"][-1] == (acks != "fire-and-forget")
        await closed(source)
        with pytest.raises(SourceError, match=rf"^{NAME}: the connection is closed permanently"):
            await source.settle([Settlement(partition_of(source), run)])

    played(scene)


def test_messages_in_progress_are_kept_alive() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("S.a")
        (message,) = await received(source)
        await source.extend([message])
        await asyncio.sleep(2 * LATENCY)
        assert [each.subject for each in stage.sent if each.payload == b"+WPI"] == [message.token]
        await closed(source)

    played(scene)


def test_a_lost_delivery_arrives_before_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish(*["S.a"] * 2)
        assert await all_received(source, 2) == [1, 2]
        stage.server.api.streams["S"].consumers["work"].losing = 1
        await stage.publish(*["S.a"] * 3)
        found = await all_received(source, 5)
        # The engine recognises the messages that are in flight.
        assert found == [1, 2, 3, 4, 5]
        await stage.publish("S.a")
        assert await all_received(source, 1) == [6], "deliveries count on after the takeover"
        await closed(source)

    played(scene)
    assert "delivery 3 missing, got 4" in lines(caplog)[0]


def test_messages_of_an_earlier_process_arrive_first() -> None:
    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        await stage.publish(*["S.a"] * 3)
        assert await all_received(first, 3) == [1, 2, 3]
        await closed(first)
        await stage.publish(*["S.a"] * 2)
        second = await opened(stage)
        assert await all_received(second, 5) == [1, 2, 3, 4, 5]
        await closed(second)

    played(scene)


def test_a_delivery_that_is_lost_after_a_takeover_is_missed() -> None:
    async def scene(stage: Stage) -> None:
        first = await opened(stage)
        await stage.publish(*["S.a"] * 2)
        assert await all_received(first, 2) == [1, 2]
        await closed(first)
        second = await opened(stage)
        assert await all_received(second, 2) == [1, 2]
        reading = second._reading()
        assert reading.delivery == stage.server.api.streams["S"].consumers["work"].data.deliveries
        stage.server.api.streams["S"].consumers["work"].losing = 1
        await stage.publish(*["S.a"] * 2)
        assert await all_received(second, 4) == [1, 2, 3, 4]
        await closed(second)

    played(scene)


def test_a_cancelled_takeover_begins_again() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish(*["S.a"] * 2)
        assert await all_received(source, 2) == [1, 2]
        source._pulls.interrupt("ended", "409 Server Shutdown")
        receiving = asyncio.create_task(source.receive(ROOM))
        await asyncio.sleep(0.2)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert not source._taken_over
        assert source._reading().delivery is None
        assert await all_received(source, 2) == [1, 2]
        assert source._reading().active
        await closed(source)

    played(scene)


@pytest.mark.parametrize("steady", [True, False])
def test_a_request_that_cannot_be_sent_is_an_interruption(steady: bool) -> None:
    """The request of a takeover, and one of the steady source."""

    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        if steady:
            await stage.publish("S.a")
            await settle(source, await received(source, Room(1, 9999)))
            assert source._takeover.count == 1
        client: Any = source.connection.client
        publish = client.publish
        failing = [True]

        async def broken(subject: str, *arguments: Any, **named: Any) -> None:
            if failing and subject == NEXT:
                failing.clear()
                raise OSError("broken pipe")
            await publish(subject, *arguments, **named)

        client.publish = broken
        await stage.publish("S.b")
        assert await all_received(source, 1) == [1 + steady]
        assert (failing, source._takeover.count) == ([], 2)
        del client.publish
        await closed(source)

    played(scene)


def test_a_reconnect_loses_no_message_and_repeats_acknowledgements() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish(*["S.a"] * 2)
        run: list[Message] = []
        while len(run) < 2:
            run += await received(source)
        await settle(source, run[:1])
        stage.server.stop()
        await asyncio.sleep(0.05)
        stage.server.start(monotonic())
        assert [message.position for message in await received(source)] in ([2], [1, 2])
        assert stage.subjects("$JS.ACK.").count(str(run[0].token)) == 2
        await closed(source)

    played(scene)


# --- a paused partition


def test_messages_of_a_paused_partition_wait_and_are_kept_alive() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, ack_wait=6.0)
        await stage.publish("S.a")
        await settle(source, await received(source))
        await source._pulls.pull(ROOM)
        await stage.publish("S.b")
        partition = partition_of(source)
        receiving = asyncio.create_task(source.receive(Room(10, 9999, frozenset({partition}))))
        begun = monotonic()
        await asyncio.sleep(20.0)
        assert not receiving.done()
        alive = [each for each in stage.sent if each.payload == b"+WPI"]
        assert 9 <= len(alive) <= 11, "every third of the ack_wait"
        receiving.cancel()
        await asyncio.wait([receiving])
        (message,) = await received(source)
        assert message.position == 2
        assert int(str(message.token).split(".")[4]) == 1, "it was not redelivered"
        assert monotonic() - begun < 21.0
        await closed(source)

    played(scene)


@pytest.mark.parametrize("shared", [True, False])
def test_a_paused_partition_reports_a_closed_connection(shared: bool) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, shared=shared)
        await stage.publish("S.a")
        await settle(source, await received(source))
        room = Room(10, 9999, frozenset({partition_of(source)}))
        receiving = asyncio.create_task(source.receive(room))
        await asyncio.sleep(1.0)
        await source.connection.client.close()
        with pytest.raises(SourceError, match=r"closed permanently"):
            await receiving

    played(scene)


@pytest.mark.parametrize("how", ["paused", "draining"])
def test_a_shared_partition_gives_back_what_it_does_not_take(how: str) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, shared=True)
        other = await opened(stage, shared=True)
        await stage.publish("S.a")
        await received(source)
        await source._pulls.request_exactly(1)
        await asyncio.sleep(2 * LATENCY)
        partition = partition_of(source)
        room = ROOM
        if how == "paused":
            room = Room(10, 9999, frozenset({partition}))
        else:
            partition.draining = True
        receiving = asyncio.create_task(source.receive(room))
        await asyncio.sleep(0.1)
        await stage.publish("S.b")
        began = monotonic()
        assert await all_received(other, 1) == [2]
        assert monotonic() - began < 0.1, "at once, and not after a pause"
        assert any(each.payload == b"-NAK" for each in stage.sent)
        receiving.cancel()
        await asyncio.wait([receiving])
        await closed(source)
        await closed(other)

    played(scene)


# --- release


@pytest.mark.parametrize("shared", [True, False])
def test_a_release_ends_the_requests_and_returns_what_arrived(shared: bool) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, shared=shared)
        await stage.publish("S.a")
        assert await all_received(source, 1) == [1]
        await source._pulls.request_exactly(3)
        await stage.publish("S.b", "S.c")
        await source.release(partition_of(source))
        assert stage.server.api.streams["S"].consumers["work"].requests == []
        returned = [each.subject.split(".")[5] for each in stage.sent if each.payload == b"-NAK"]
        assert returned == (["2", "3"] if shared else [])
        await source.release(partition_of(source))
        await closed(source)

    played(scene)


def test_a_release_that_cannot_flush_is_tried_again() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("S.a")
        await settle(source, await received(source))

        async def broken(*_: Any) -> None:
            raise OSError("broken pipe")

        source._acks.resend = broken  # type: ignore[method-assign]
        with pytest.raises(SourceError, match=rf"^{NAME}: flush failed \(OSError\); check the server$") as failed:
            await source.release(partition_of(source))
        assert failed.value.retryable
        assert isinstance(failed.value.__cause__, OSError)
        await closed(source)

    played(scene)


@pytest.mark.parametrize(("storage", "least"), [("file", 0.2), ("memory", 0.0)])
def test_a_release_waits_until_one_copy_is_on_disk(storage: str, least: float) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", storage=storage)
        source = await opened(stage, acks="confirmed-at-drain")
        await stage.publish("S.a")
        await settle(source, await received(source))
        began = monotonic()
        await source.release(partition_of(source))
        assert least <= monotonic() - began < least + 0.1
        await closed(source)

    played(scene)


# --- faults


@pytest.mark.parametrize(
    ("what", "said"), [("consumer", "the consumer was deleted"), ("stream", "^stream 'S' was deleted")]
)
def test_a_deletion_during_the_run_stops_the_source(what: str, said: str) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        receiving = asyncio.create_task(source.receive(ROOM))
        await asyncio.sleep(1.1)
        if what == "consumer":
            stage.server.delete_consumer("S", "work")
        else:
            await stage.api("STREAM.DELETE.S")
        with pytest.raises(SourceError, match=said):
            await receiving
        await closed(source)

    played(scene)


@pytest.mark.parametrize("answer", ["lost", "temporary"])
def test_a_deleted_consumer_is_reported_although_the_stream_does_not_answer(answer: str) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        receiving = asyncio.create_task(source.receive(ROOM))
        await asyncio.sleep(1.1)
        if answer == "lost":
            stage.meet("$JS.API.STREAM.INFO.S", *[Fate("drop_request")] * 9)
        else:
            stage.answer("STREAM.INFO.S", *[refusal(503, 10_008, "no leader")] * 9)
        stage.server.delete_consumer("S", "work")
        with pytest.raises(
            SourceError, match=rf"^{NAME}: pull refused \(409 Consumer Deleted\): the consumer was deleted"
        ):
            await receiving
        await closed(source)

    played(scene)


@pytest.mark.parametrize(
    ("subject", "ours"),
    [
        (NEXT, True),
        ("$JS.ACK.S.work.1.5.5.1.0", True),
        ("$JS.ACK.hub.hash.S.work.1.5.5.1.0.x", True),
        ("$JS.ACK.S.other.1.5.5.1.0", False),
        ("$JS.API.CONSUMER.MSG.NEXT.S.other", False),
        ("inbox", True),
        ("other", False),
    ],
)
def test_a_denied_subject_that_the_source_needs_stops_it(subject: str, ours: bool) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        assert not source._is_ours("anything"), "no inbox is known yet"
        receiving = asyncio.create_task(source.receive(ROOM))
        await asyncio.sleep(0.1)
        denied = f"{source._pulls.inbox}.1" if subject == "inbox" else subject
        assert source._is_ours(denied.casefold()) == ours
        stage.deny(denied)
        await source.connection.client.publish(denied, b"")
        if ours:
            with pytest.raises(
                SourceError, match=rf"^{NAME}: permissions violation .*; grant this permission, then start again$"
            ):
                await receiving
        else:
            await asyncio.sleep(5.0)
            assert not receiving.done()
            receiving.cancel()
            await asyncio.wait([receiving])
        await closed(source)

    played(scene)
