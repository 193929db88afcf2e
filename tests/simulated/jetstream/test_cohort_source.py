"""The source of a cohort member behaves correctly on a simulated server, from its join to its leave.

This file is longer than most, because all its tests share one member and its events.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import pytest

from lanes import ConfigError, SourceError
from lanes.clock import monotonic
from lanes.core.cohort.records import Lease, decode
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Backlog, Delivered, Destination, Generation, Lost, SourceEvent
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_jetstream.cohort.source import CohortSource
from memsource.memory.topic import Record
from memsource.sim.loop.virtual import until
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.stage import LATENCY, URL, Stage, played

ROOM: Final = Room(100, 1_000_000)
BUCKET: Final = "lanes_S_lanes"
NAME: Final = "jetstream S/c, member a"
LEASE: Final = 3.0


class Member:
    """A member of the cohort ``c`` on a stream ``S``, with all events that it has received."""

    def __init__(self, stage: Stage, client: Any, member: str, cohort: Any, **arguments: Any) -> None:
        settings = {"lease": LEASE, **(cohort or {})}
        arguments = {"key": subject_token(-1), **arguments}
        made = JetStreamSource(client, stream="S", cohort=Cohort("c", member=member, **settings), **arguments)._source
        assert isinstance(made, CohortSource)
        self.stage = stage
        self.source = made
        self.events: list[SourceEvent] = []
        self.room = ROOM

    async def receive(self) -> Sequence[SourceEvent]:
        events = await self.source.receive(self.room)
        self.events += events
        return events

    async def until(self, condition: Any, seconds: float = 60.0) -> None:
        """Receive until a condition is true."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.receive()

    async def pass_time(self, seconds: float) -> None:
        """Receive for some seconds."""
        with suppress(TimeoutError):
            await self.until(lambda: False, seconds)

    async def owns(self, *numbers: int) -> None:
        await self.until(lambda: sorted(self.owned) == sorted(numbers))

    @property
    def owned(self) -> dict[int, Partition]:
        """The newest assignment of each partition that was not lost."""
        found: dict[int, Partition] = {}
        for event in self.events:
            if isinstance(event, Assigned):
                found[event.partition.id.number] = event.partition
            elif isinstance(event, Lost):
                found.pop(event.partition.id.number, None)
        return found

    @property
    def messages(self) -> list[Message]:
        return [message for event in self.events if isinstance(event, Delivered) for message in event.run]

    @property
    def positions(self) -> list[int]:
        return [message.position for message in self.messages]

    async def settle(self, *messages: Message) -> None:
        await self.source.settle([Settlement(message.partition, [message]) for message in messages])
        await asyncio.sleep(2 * LATENCY)

    async def leave(self) -> None:
        await self.source.aclose()
        await self.source.connection.client.close()


async def made(stage: Stage, member: str = "a", *, partitions: int = 2, cohort: Any = None, **arguments: Any) -> Member:
    """A member that has not joined."""
    if "S" not in stage.server.api.streams:
        dest = f"S.{{{{partition({partitions},1)}}}}.{{{{wildcard(1)}}}}"
        await stage.stream("S", subjects=["S.*"], subject_transform={"src": "S.*", "dest": dest})
    return Member(stage, await stage.connect(), member, cohort, **arguments)


async def joined(stage: Stage, member: str = "a", **arguments: Any) -> Member:
    found = await made(stage, member, **arguments)
    await found.source.open()
    return found


def publish(stage: Stage, *partitions: int) -> None:
    """Store a message for each of these partitions, each with its own key."""
    for partition in partitions:
        end = stage.server.api.streams["S"].log.end
        record = Record(partition, end, None, b"x", (), f"S.{partition}.k{end}")
        stage.server.append("S", record, monotonic())
    stage.network.schedule()


def acks(stage: Stage) -> list[Any]:
    return [each for each in stage.sent if each.subject.startswith("$JS.ACK.") and each.payload == b"+ACK"]


def durables(stage: Stage) -> list[str]:
    return sorted(stage.server.api.streams["S"].consumers)


def lease_of(stage: Stage, number: int) -> Lease | None:
    value = stage.server.api.buckets[f"KV_{BUCKET}"].data.read(f"l.{number}", monotonic()).value
    return None if not value else decode(Lease, f"l.{number}", value)


# --- open


def test_the_traits_follow_from_the_cohort_and_its_stream() -> None:
    async def scene(stage: Stage) -> None:
        cohort = {"consumer_target": 3}
        found = await made(stage, partitions=4, cohort=cohort, ack_wait=60.0, max_ack_pending=7)
        declared = found.source.declared()
        assert (declared.name, declared.system, declared.partitions) == (NAME, "nats", None)
        assert (declared.extend_interval, declared.max_in_flight, declared.consumer_target) == (20.0, 7, 3)
        assert (declared.remembers, declared.plans) == (True, True)
        traits = await found.source.open()
        assert (traits.partitions, traits.extend_interval, traits.max_in_flight) == (4, 20.0, 7)
        await found.owns(0, 1, 2, 3)
        partition = found.owned[2]
        assert partition.id == PartitionId("S", 2)
        assert partition.incarnation == stage.server.api.stamp(stage.server.api.streams["S"].created)
        assert partition.fencing_token == partition.epoch
        assert 0 < partition.deadline - monotonic() <= LEASE
        assert any(isinstance(event, Generation) for event in found.events)
        configs = [each["config"] for each in stage.fields("CONSUMER.CREATE")]
        assert {(each["ack_wait"], each["max_ack_pending"]) for each in configs} == {(60_000_000_000, 7)}
        assert {each["metadata"]["lanes-lease"] for each in configs} == {"3"}
        assert repr(found.source) == f"<CohortSource {NAME}>"
        await found.leave()

    played(scene)


def test_a_member_that_may_not_join_is_refused_and_leaves_nothing_behind() -> None:
    async def scene(stage: Stage) -> None:
        first = await joined(stage)
        second = await made(stage)
        receiving = asyncio.create_task(first.until(lambda: False, 20.0))
        with pytest.raises(ConfigError, match=r"^member id 'a' is used by another live process of cohort 'c'"):
            await second.source.open()
        receiving.cancel()
        await asyncio.wait([receiving])
        await second.source.aclose()
        assert second.source._membership_task is not None
        assert second.source._membership_task.done()
        await second.leave()
        await first.leave()

    played(scene)


def test_a_bucket_without_an_answer_ends_the_start_after_a_while() -> None:
    async def scene(stage: Stage) -> None:
        found = await made(stage)
        stage.meet(f"$KV.{BUCKET}.", *[Fate("drop_request")] * 999)
        began = monotonic()
        said = rf"^{NAME}: not joined within 13 s, because the given connection .* for the bucket '{BUCKET}'. Check"
        with pytest.raises(SourceError, match=said) as late:
            await found.source.open()
        assert late.value.retryable
        assert monotonic() - began == pytest.approx(13.0, abs=0.5)
        await found.source.aclose()
        await found.source.connection.client.close()

    played(scene)


def test_a_connection_by_url_is_closed_with_the_source() -> None:
    async def scene(stage: Stage) -> None:
        await made(stage)
        found = Member(stage, URL, "a", None)
        before = len(stage.server.sessions)
        await found.source.open()
        assert len(stage.server.sessions) == before + 1
        await found.source.aclose()
        await asyncio.sleep(2 * LATENCY)
        assert len(stage.server.sessions) == before
        await found.source.aclose()

    played(scene)


# --- messages


def test_messages_of_all_partitions_arrive_with_their_keys() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0, 1, 0)
        await found.until(lambda: len(found.messages) == 3)
        seen = {(each.partition.id.number, each.position, each.key) for each in found.messages}
        assert seen == {(0, 1, b"k1"), (1, 2, b"k2"), (0, 3, b"k3")}
        assert all(each.partition is found.owned[each.partition.id.number] for each in found.messages)
        await found.leave()

    played(scene)


def test_a_paused_partition_delivers_later_and_uses_no_room() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0, 1)
        found.room = Room(1, 9999, frozenset({found.owned[0]}))
        await found.until(lambda: found.messages)
        with pytest.raises(TimeoutError):
            await found.until(lambda: len(found.messages) > 1, 5.0)
        assert found.positions == [2]
        found.room = ROOM
        await found.until(lambda: len(found.messages) == 2)
        await found.leave()

    played(scene)


def test_messages_beyond_the_room_wait_for_the_next_call() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0, 0, 1, 1)
        found.room = Room(100, 9999, frozenset(found.owned.values()))
        await found.pass_time(3.0)
        for owned in found.source._partitions.by_number.values():
            assert owned.pulls is not None
            await owned.pulls.request_exactly(2)
        await asyncio.sleep(0.1)
        counts = []
        for messages in (3, 0, 9):
            found.room = Room(messages, 9999)
            before = len(found.messages)
            await (found.receive() if messages == 3 else found.pass_time(0.5))
            counts.append(len(found.messages) - before)
        assert counts == [3, 0, 1]
        assert found.source._partitions.in_flight == 100, "the largest room so far"
        await found.leave()

    played(scene)


def test_a_settled_message_is_acknowledged_and_from_time_to_time_confirmed() -> None:
    """A confirmation shows that the durable exists."""

    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, *[0] * 4)
        await found.until(lambda: len(found.messages) == 4)
        await found.settle(found.messages[0])
        await found.settle(found.messages[1])
        owned = found.source._partitions.by_number[0]
        assert owned.pulls is not None
        assert [each.reply for each in acks(stage)] == [owned.pulls.confirmation, ""]
        assert [each.subject for each in acks(stage)] == [message.token for message in found.messages[:2]]
        await asyncio.sleep(0.5)
        await found.settle(found.messages[2])
        assert acks(stage)[-1].reply == owned.pulls.confirmation
        await found.source.extend(found.messages[3:])
        await asyncio.sleep(2 * LATENCY)
        assert [each.subject for each in stage.sent if each.payload == b"+WPI"] == [found.messages[3].token]
        (name,) = [name for name in durables(stage) if name.startswith("lanes-p0")]
        assert stage.server.api.streams["S"].consumers[name].unfinished == [4]
        await found.leave()

    played(scene)


def test_a_message_that_its_handler_settled_is_logged_with_the_name_of_the_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 1)
        await found.until(lambda: found.messages)
        raw: Any = found.messages[0].raw
        await raw.ack()
        await found.settle(found.messages[0])
        await found.leave()

    played(scene)
    assert any(
        text.startswith(f"{NAME}: the handler has settled the message at S/1 position 1") for text in caplog.messages
    )


@pytest.mark.parametrize("refines", [True, False])
def test_a_key_in_two_partitions_stops_a_member_that_relies_on_the_promise_of_its_user(refines: bool) -> None:
    def constant(message: Any) -> bytes:
        return b"k"

    async def scene(stage: Stage) -> None:
        if not refines:
            found = await made(stage, key=constant)
            with pytest.raises(ConfigError, match="key=constant: the server partitions by subject tokens"):
                await found.source.open()
            return
        found = await joined(stage, key=constant, cohort={"key_refines_partition": True})
        await found.owns(0, 1)
        publish(stage, 0, 0, 1)
        with pytest.raises(SourceError, match=r"arrived in cohort partitions (0 and 1|1 and 0), so its order cannot"):
            await found.until(lambda: len(found.messages) == 3)
        await found.leave()

    played(scene)


def test_nothing_is_sent_without_a_connection_or_after_the_end_of_a_lease() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0, 0)
        await found.until(lambda: len(found.messages) == 2)
        stage.server.stop()
        await asyncio.sleep(0.05)
        sent = found.source.connection.client.stats["out_msgs"]
        await found.settle(found.messages[1])
        await found.source.extend(found.messages)
        assert found.source.connection.client.stats["out_msgs"] == sent
        stage.server.start(monotonic())
        await found.pass_time(3.0)
        assert len(acks(stage)) == 1
        assert acks(stage)[0].subject.split(".")[5] == "2", "acknowledged at its redelivery"
        assert found.source._partitions.by_number[0].again == []
        found.owned[0].deadline = monotonic() - 0.001
        await found.settle(found.messages[0])
        await found.source.extend(found.messages)
        assert len(acks(stage)) == 1
        await found.leave()

    played(scene)


def test_a_settlement_that_cannot_be_sent_is_tried_again() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)

        async def broken(*_: Any, **__: Any) -> None:
            raise OSError("broken pipe")

        client: Any = found.source.connection.client
        client.publish = broken
        with pytest.raises(SourceError, match=rf"^{NAME}: acknowledgement failed \(OSError\)") as failed:
            await found.settle(found.messages[0])
        assert failed.value.retryable
        del client.publish
        await found.leave()

    played(scene)


def test_requests_that_cannot_be_sent_are_sent_later(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)

        async def broken(pulling: Any, busy: Any, room: Any, now: float) -> None:
            found.source._turns.pull = pull  # type: ignore[method-assign]
            raise OSError("broken pipe")

        pull = found.source._turns.pull
        found.source._turns.pull = broken  # type: ignore[method-assign,assignment]
        publish(stage, 0)
        await found.until(lambda: found.messages)
        await found.leave()

    with caplog.at_level(logging.DEBUG, logger="lanes.jetstream"):
        played(scene)
    assert f"{NAME}: nothing requested: OSError" in [record.getMessage() for record in caplog.records]


# --- interruptions


def test_a_lost_delivery_makes_a_new_durable_that_delivers_in_order(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        partition = found.owned[0]
        (name,) = [name for name in durables(stage) if name.startswith("lanes-p0")]
        stage.server.api.streams["S"].consumers[name].losing = 1
        publish(stage, 0, 0)
        await found.until(lambda: len(found.messages) == 2)
        assert found.positions == [1, 2]
        assert found.owned[0] is partition, "the partition was kept"
        assert f"{name}-1" in durables(stage)
        assert name not in durables(stage)
        await found.leave()

    with caplog.at_level(logging.INFO, logger="lanes.jetstream"):
        played(scene)
    said = f"{NAME}: partition 0 continues with a new consumer (delivery 1 missing, got 2)"
    assert said in [record.getMessage() for record in caplog.records]


def test_a_deleted_durable_loses_its_partition_alone() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        before = dict(found.owned)
        (name,) = [name for name in durables(stage) if name.startswith("lanes-p0")]
        await found.pass_time(1.0)
        stage.server.delete_consumer("S", name)
        await found.until(lambda: any(isinstance(event, Lost) for event in found.events))
        (lost,) = [event for event in found.events if isinstance(event, Lost)]
        assert (lost.partition, lost.reason) == (before[0], f"its consumer {name} was deleted")
        await found.until(lambda: len(found.owned) == 2)
        assert found.owned[1] is before[1]
        assert found.owned[0].epoch > before[0].epoch
        await found.leave()

    played(scene)


def test_an_acknowledgement_shows_that_a_durable_was_deleted() -> None:
    """The server that would report the deletion to the requests may have died with the durable."""

    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)
        before = found.owned[0]
        (name,) = [name for name in durables(stage) if name.startswith("lanes-p0")]
        del stage.server.api.streams["S"].consumers[name]
        await found.settle(found.messages[0])
        await found.until(lambda: any(isinstance(event, Lost) for event in found.events), 10.0)
        (lost,) = [event for event in found.events if isinstance(event, Lost)]
        assert (lost.partition, name in lost.reason) == (before, True)
        await found.leave()

    played(scene)


def test_a_refused_request_stops_the_member() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        await found.pass_time(1.0)
        for consumer in stage.server.api.streams["S"].consumers.values():
            stage.server.end_requests(consumer, "Exceeded MaxRequestBatch of 1")
        with pytest.raises(SourceError, match=rf"^{NAME}: pull refused .*max_batch"):
            await found.until(lambda: False)
        await found.leave()

    played(scene)


def test_a_durable_without_a_leader_keeps_its_partition() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        before = dict(found.owned)
        stage.server.lose_leader("S", monotonic() + 4.0, monotonic(), silent=False)
        stage.network.schedule()
        publish(stage, 0)
        await found.until(lambda: found.messages)
        assert found.owned == before
        await found.leave()

    played(scene)


def test_a_reconnect_keeps_the_partitions() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        before = dict(found.owned)
        stage.server.stop()
        await asyncio.sleep(0.05)
        stage.server.start(monotonic())
        publish(stage, 0, 1)
        await found.until(lambda: len(found.messages) == 2)
        assert found.owned == before
        assert [name.endswith("-1") for name in durables(stage)] == [True, True]
        await found.leave()

    played(scene)


# --- faults


@pytest.mark.parametrize(
    ("subject", "ours"),
    [
        ("$JS.API.CONSUMER.MSG.NEXT.S.lanes-p0-e1", True),
        ("$JS.ACK.S.lanes-p0-e1.1.1.1.1.1", True),
        ("$JS.ACK.T.lanes-p0-e1.1.1.1.1.1", False),
        ("$JS.API.CONSUMER.MSG.NEXT.T.x", False),
        ("T.a", False),
        ("inbox", True),
    ],
)
def test_a_denied_subject_that_the_member_needs_stops_it(subject: str, ours: bool) -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        denied = f"{found.source._inbox.subject}.1" if subject == "inbox" else subject
        stage.deny(denied)
        await found.source.connection.client.publish(denied, b"")
        if ours:
            with pytest.raises(
                SourceError, match=rf"^{NAME}: permissions violation .*; grant this permission, then start again$"
            ):
                await found.until(lambda: False)
        else:
            await found.pass_time(2.0)
        await found.leave()

    played(scene)


def test_a_failed_membership_stops_the_member() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        bucket = stage.server.api.buckets[f"KV_{BUCKET}"].data
        bucket.write("plan", b"nonsense", monotonic(), revision=bucket.read("plan", monotonic()).revision)
        with pytest.raises(SourceError, match=r"^the key 'plan' of the cohort's bucket"):
            await found.until(lambda: False)
        await found.leave()

    played(scene)


def test_a_closed_connection_stops_the_member() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        await found.source.connection.client.close()
        with pytest.raises(SourceError, match=r"the connection is closed permanently"):
            await found.until(lambda: False)
        await found.source.aclose()

    played(scene)


def test_a_stream_that_ends_below_a_ledger_stops_the_member() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)
        assert found.source._highest() == 1
        stage.server.api.streams["S"].log.end = 1
        with pytest.raises(SourceError, match=r"^stream 'S' ends at sequence 0 but was read up to 1"):
            await found.until(lambda: False)
        await found.leave()

    played(scene)


# --- the end


def test_a_member_that_leaves_gives_its_partitions_to_the_others() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)
        await found.settle(*found.messages)
        began = monotonic()
        await found.source.aclose()
        assert monotonic() - began < 1.0
        for number in (0, 1):
            lease = lease_of(stage, number)
            assert lease is None or lease.released
        value = stage.server.api.buckets[f"KV_{BUCKET}"].data.read("m.a", monotonic()).value
        assert not value
        await found.source.connection.client.flush()
        subjects = (f"{found.source._inbox.subject}.1", f"$KV.{BUCKET}.l.0")
        assert not any(session.hears(subject) for session in stage.server.sessions for subject in subjects)
        await found.leave()

    played(scene)


def test_a_release_waits_for_its_acknowledgements_and_gives_the_lease_up() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)
        await found.settle(*found.messages)
        client: Any = found.source.connection.client
        flushed: list[float] = []
        flush = client.flush

        async def counted(timeout: float = 10) -> None:
            flushed.append(monotonic())
            await flush(timeout)

        client.flush = counted
        await found.source.release(found.owned[0])
        assert flushed
        lease = lease_of(stage, 0)
        assert lease is None or lease.released
        await found.leave()

    played(scene)


def test_a_member_with_unfinished_messages_lets_its_leases_expire() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)
        began = monotonic()
        await found.source.aclose()
        assert monotonic() - began < 1.0
        lease = lease_of(stage, 0)
        assert lease is not None
        assert not lease.released
        assert found.source._membership_task is not None
        assert found.source._membership_task.done()
        await asyncio.sleep(LEASE + 1.0)
        assert lease_of(stage, 0) is None
        await found.leave()

    played(scene)


def test_a_leave_without_a_server_ends_after_four_seconds() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        stage.server.stop()
        await asyncio.sleep(0.05)
        began = monotonic()
        await found.source.aclose()
        assert 3.9 < monotonic() - began < 4.6
        await found.source.aclose()
        await found.source.connection.client.close()

    played(scene)


# --- what a status shows


def test_a_status_shows_lag_backlog_and_interruptions() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        await found.owns(0, 1)
        source, partition = found.source, found.owned[0]
        other = Partition(PartitionId("S", 0), partition.reader, "now")
        assert (source.lag(other), source.backlog(other)) == (None, Backlog(None))
        publish(stage, 0, 0, 0)
        found.room = Room(1, 9999)
        await found.until(lambda: found.messages)
        found.room = Room(0, 9999, frozenset({partition}))
        assert source.lag(partition) == 3
        assert source.backlog(partition)[0] == 2
        assert source.outage() is None
        owned = source._partitions.by_number[0]
        assert owned.pulls is not None
        owned.pulls.interrupt("ended", "409 Server Shutdown")
        assert source.backlog(partition)[:2] == (2, "409 Server Shutdown")
        owned.rest()
        assert source.backlog(partition)[0] == 2
        assert source.reads(Destination("nats", "S", "S.a"))
        assert not source.reads(Destination("nats", "T", "S.a"))
        assert source.retention(found.messages[0]) is None
        await found.leave()

    played(scene)


def test_a_message_has_the_retention_of_its_stream() -> None:
    async def scene(stage: Stage) -> None:
        found = await joined(stage)
        stage.server.api.streams["S"].config["max_age"] = 3600 * 10**9
        await found.owns(0, 1)
        publish(stage, 0)
        await found.until(lambda: found.messages)
        assert found.source.retention(found.messages[0]) is None, "the limits are read only on demand"
        await found.pass_time(4.0)
        retention = found.source.retention(found.messages[0])
        assert retention is not None
        assert retention.span == 3600.0
        await found.leave()

    played(scene)


def test_hints_of_other_members_make_a_move_quick() -> None:
    async def scene(stage: Stage) -> None:
        first = await joined(stage)
        await first.owns(0, 1)
        second = await joined(stage, "b")
        receiving = asyncio.create_task(first.until(lambda: False))

        async def answer() -> None:
            while True:
                for partition in first.owned.values():
                    if partition.id.number not in released and any(
                        type(event).__name__ == "Revoking" and event.partition is partition  # type: ignore[union-attr]
                        for event in first.events
                    ):
                        released.add(partition.id.number)
                        await first.source.release(partition)
                await asyncio.sleep(0.05)

        released: set[int] = set()
        answering = asyncio.create_task(answer())
        await second.until(lambda: len(second.owned) == 1, 10.0)
        assert await until(lambda: len(released) == 1, 1.0)
        for task in (receiving, answering):
            task.cancel()
        await asyncio.wait([receiving, answering])
        assert json.dumps(sorted(released)) == json.dumps(sorted(second.owned))
        await second.leave()
        await first.leave()

    played(scene)
