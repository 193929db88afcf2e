"""A partitioned queue in one stream on a simulated server: a durable for each physical queue, and a shared room."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from lanes import ConfigError, PartitionedQueue, SourceError
from lanes.clock import monotonic
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Delivered, Destination
from lanes_jetstream import JetStreamSource, subject_token
from lanes_jetstream.durable.queue import QueueSource
from memsource.sim.loop.virtual import until
from tests.simulated.jetstream.stage import LATENCY, Stage, played, refusal

QUEUE: Final = PartitionedQueue("q", partitions=2)
SUBJECTS: Final = ["q", "q.>", "q__p1", "q__p1.>"]
ROOM: Final = Room(10, 1_000_000)


def source_of(client: Any, **arguments: Any) -> QueueSource:
    wanted: dict[str, Any] = {"stream": "S", "durable": "work", "key": subject_token(-1), "queue": QUEUE}
    inner = JetStreamSource(client, **(wanted | arguments))._source
    assert isinstance(inner, QueueSource)
    return inner


async def opened(stage: Stage, **arguments: Any) -> QueueSource:
    """A source with a separate client, whose consumer has received the assignments."""
    if "S" not in stage.server.api.streams:
        await stage.stream("S", subjects=SUBJECTS)
    source = source_of(await stage.connect(), **arguments)
    await source.open()
    assert await source.receive(ROOM) == [Assigned(partition) for partition in partitions(source)]
    return source


async def closed(source: QueueSource) -> None:
    await source.aclose()
    await source.connection.client.close()


def partitions(source: QueueSource) -> list[Partition]:
    return [part.partition for part in source.parts]


async def received(source: QueueSource, room: Room = ROOM) -> list[Message]:
    events = await source.receive(room)
    assert all(isinstance(event, Delivered) for event in events)
    return [message for event in events if isinstance(event, Delivered) for message in event.run]


async def all_received(source: QueueSource, count: int, room: Room = ROOM) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += await received(source, room)
    return found


async def settle(source: QueueSource, messages: list[Message]) -> None:
    await source.settle([Settlement(message.partition, [message]) for message in messages])
    await asyncio.sleep(2 * LATENCY)


def unfinished(stage: Stage) -> dict[str, list[int]]:
    return {name: each.unfinished for name, each in stage.server.api.streams["S"].consumers.items()}


async def delivered(stage: Stage) -> int:
    """Number of sent and unacknowledged messages."""
    return sum([(await stage.api(f"CONSUMER.INFO.S.{name}"))["num_ack_pending"] for name in ("work", "work__p1")])


def of(messages: list[Message]) -> dict[PartitionId, list[int]]:
    """The positions by partition, in the order of their deliveries."""
    found: dict[PartitionId, list[int]] = {}
    for message in messages:
        found.setdefault(message.partition.id, []).append(message.position)
    return found


ZERO: Final = PartitionId("q", 0)
ONE: Final = PartitionId("q__p1", 1)


def test_each_physical_queue_has_a_durable_and_is_a_partition() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", subjects=SUBJECTS)
        source = source_of(stage.client, ack_wait=6.0, max_ack_pending=7)
        declared = source.declared()
        assert (declared.name, declared.partitions, declared.queues) == ("jetstream S/work", 2, (QUEUE,))
        traits = await source.open()
        assert (traits.extend_interval, traits.max_in_flight, traits.ordered) == (2.0, 7, True)
        assert (traits.partitions, traits.queues) == (2, (QUEUE,))
        assert [partition.id for partition in partitions(source)] == [ZERO, ONE]
        consumers = stage.server.api.streams["S"].consumers
        assert {name: each.config["filter_subjects"] for name, each in consumers.items()} == {
            "work": ["q", "q.>"],
            "work__p1": ["q__p1", "q__p1.>"],
        }
        assert repr(source) == "<QueueSource jetstream S/work of PartitionedQueue('q', partitions=2)>"
        assert source.reads(Destination("nats", "S", "q__p1.ann"))
        assert not source.reads(Destination("nats", "OTHER", "q"))
        await source.aclose()
        assert stage.client.is_connected, "the client of the caller stays open"
        await source.aclose()

    played(scene)


def test_messages_come_from_bare_names_and_from_tokens_in_the_order_of_their_partition() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("q", "q__p1.ann", "q.bob", "q__p1", "q__p1.ann")
        messages = await all_received(source, 5)
        assert of(messages) == {ZERO: [1, 3], ONE: [2, 4, 5]}
        assert {message.position: message.key for message in messages}[5] == b"ann"
        await source.extend(messages)
        await settle(source, messages)
        assert unfinished(stage) == {"work": [], "work__p1": []}
        await asyncio.sleep(3.0)
        assert [source.lag(partition) for partition in partitions(source)] == [0, 0]
        assert [source.backlog(partition).messages for partition in partitions(source)] == [0, 0]
        assert source.outage() is None
        assert source.retention(messages[0]) is None
        await closed(source)

    played(scene)


def test_a_restart_delivers_the_unfinished_messages_of_each_partition_first() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("q.a", "q__p1.b", "q.a", "q__p1.b")
        messages = await all_received(source, 4)
        await settle(source, [message for message in messages if message.position == 1])
        await closed(source)
        await stage.publish("q.a", "q__p1.b")
        again = await opened(stage)
        assert of(await all_received(again, 5)) == {ZERO: [3, 5], ONE: [2, 4, 6]}
        await closed(again)

    played(scene)
    # Without a reset of the consumer, the takeover collects and sorts these messages itself.
    played(scene, version="2.14.0")


def test_a_paused_partition_delivers_nothing_and_stops_no_other_one() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, ack_wait=3.0)
        await stage.publish("q.a", "q__p1.b")
        await settle(source, await all_received(source, 2))
        zero, _ = partitions(source)
        paused = ROOM._replace(paused=frozenset([zero]))
        await stage.publish("q.a", "q__p1.b", "q.a", "q__p1.b")
        other = await all_received(source, 2, paused)
        assert of(other) == {ONE: [4, 6]}
        await settle(source, other)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await source.receive(paused)
        # The messages that had arrived were kept alive, so none of them has come twice.
        assert (await stage.api("CONSUMER.INFO.S.work"))["num_redelivered"] == 0
        assert of(await all_received(source, 2)) == {ZERO: [3, 5]}
        await closed(source)

    played(scene)


def test_all_partitions_together_stay_within_the_room() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish(*["q.a", "q__p1.b"] * 20)
        left = 10
        while left:
            left -= len(await received(source, ROOM._replace(messages=left)))
            assert left >= 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await source.receive(ROOM._replace(messages=0))
        assert await delivered(stage) == 10
        await closed(source)

    played(scene)


def test_an_idle_partition_delivers_at_once_in_any_room() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        small = ROOM._replace(messages=2)
        await stage.publish("q.a", "q.a")
        assert of(await all_received(source, 2, small)) == {ZERO: [1, 2]}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(source.receive(small), 0.1)
        for position in (3, 4, 5):
            await stage.publish("q__p1.b")
            began = monotonic()
            assert of(await all_received(source, 1, small)) == {ONE: [position]}
            assert monotonic() - began < 0.5
        await closed(source)

    played(scene)


def test_a_partition_that_has_drained_keeps_the_room_of_the_others_for_about_a_second() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        room = Room(100, 1_000_000)
        await stage.publish(*["q.a"] * 60)
        resting = room._replace(paused=frozenset([partitions(source)[1]]))
        await all_received(source, 60, resting)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(source.receive(resting), 0.1)
        # Partition 0 was busy, and its last request has most of the room.
        reserved = source.parts[0].pulls.reserved
        assert reserved >= 50
        await stage.publish(*["q__p1.b"] * 60)
        began = monotonic()
        await all_received(source, 60, room._replace(messages=reserved))
        assert monotonic() - began < 3.0
        await closed(source)

    played(scene)


def test_messages_that_a_takeover_collected_wait_for_room() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, ack_wait=5.0, takeover="hold-back")
        await stage.publish(*["q.a"] * 6, "q__p1.b")
        assert len(await all_received(source, 7)) == 7
        await closed(source)
        again = await opened(stage, ack_wait=5.0, takeover="hold-back")
        # The takeovers begin, and hold back for the rest of ack_wait.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await again.receive(ROOM)
        small = ROOM._replace(messages=4)
        first = await received(again, small)
        assert of(first)[ZERO] == [1, 2, 3, 4][: len(of(first)[ZERO])]
        # The messages beyond the room are kept alive, and none of them comes twice.
        await asyncio.sleep(12.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(12.0):
                await again.receive(ROOM._replace(messages=0))
        assert of(first + await all_received(again, 7 - len(first), small)) == {ZERO: [1, 2, 3, 4, 5, 6], ONE: [7]}
        await closed(again)

    played(scene)


def test_a_lost_connection_loses_no_message_of_any_partition() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("q.a", "q__p1.b")
        first = await all_received(source, 2)
        stage.server.sessions[-1].lose()
        await settle(source, first)
        await stage.publish("q.a", "q__p1.b")
        assert of(await all_received(source, 2)) == {ZERO: [3], ONE: [4]}
        await closed(source)

    played(scene)


def test_a_released_partition_delivers_no_more() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("q.a", "q__p1.b")
        await settle(source, await all_received(source, 2))
        await source.release(partitions(source)[0])
        await stage.publish("q.a", "q__p1.b")
        assert of(await all_received(source, 1)) == {ONE: [4]}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await source.receive(ROOM)
        await closed(source)

    played(scene)


def test_a_deleted_durable_ends_the_source_by_its_name() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        await stage.publish("q.a")
        await all_received(source, 1)
        await stage.api("CONSUMER.DELETE.S.work__p1")
        # The other durable has no message, so only the error ends the wait.
        with pytest.raises(SourceError, match="work__p1"):
            await asyncio.wait_for(source.receive(ROOM), 60.0)
        await closed(source)

    played(scene)


@pytest.mark.parametrize(
    ("subjects", "fault"),
    [
        (["q", "q.>"], r"stream 'S' does not store partition 1 of queue 'q'; add the subjects 'q__p1', 'q__p1.>' to"),
        (["other"], r"stream 'S' does not store partition 0, 1 of queue 'q'; add the subjects 'q', 'q.>', 'q__p1', "),
        ([">"], r"stores the physical queues 'q' and 'q__p1' of queue 'q' by one subject, '>', which also stores"),
        (["*.>", "q"], r"stores the physical queues 'q' and 'q__p1' of queue 'q' by one subject, '\*\.>'"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_before_a_durable_exists(subjects: list[str], fault: str) -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", subjects=subjects)
        source = source_of(stage.client)
        with pytest.raises(ConfigError, match=fault):
            await source.open()
        assert stage.server.api.streams["S"].consumers == {}
        await source.aclose()

    played(scene)


def test_a_durable_of_other_subjects_is_refused() -> None:
    async def scene(stage: Stage) -> None:
        plain = JetStreamSource(stage.client, stream="S", durable="work", key=None)
        await stage.stream("S", subjects=SUBJECTS)
        await plain.open()
        await plain.aclose()
        source = source_of(stage.client)
        fault = (
            r"S/work does not fit: it filters \['>'\], not \['q', 'q.>'\] of its partition of the queue; use another"
        )
        with pytest.raises(ConfigError, match=fault):
            await source.open()
        await source.aclose()

    played(scene)


def test_more_partitions_continue_the_durables_that_exist() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", subjects=SUBJECTS)
        one = await opened(stage, queue=PartitionedQueue("q"))
        await stage.publish("q.a", "q__p1.b", "q.a")
        await settle(one, (await all_received(one, 2))[:1])
        await closed(one)
        two = await opened(stage)
        assert of(await all_received(two, 2)) == {ZERO: [3], ONE: [2]}
        await closed(two)

    played(scene)


def test_the_wait_for_a_message_ends_when_one_partition_has_one() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        waiting = asyncio.create_task(source.receive(ROOM))
        await until(lambda: all(part.pulls.open_requests for part in source.parts), 10.0)
        await stage.publish("q__p1.b")
        async with asyncio.timeout(0.1):
            (event,) = await waiting
        assert isinstance(event, Delivered) and event.partition.id == ONE
        await closed(source)

    played(scene)


# --- messages that no consumer reads


WIDE: Final = PartitionedQueue("q", partitions=8)


async def wide_stream(stage: Stage, queue: PartitionedQueue = WIDE) -> None:
    await stage.stream("S", subjects=[subject for name in queue.names for subject in (name, f"{name}.>")])


def stranded(source: QueueSource) -> dict[str, int]:
    return {each.name: each.messages for each in source.queue_watch.found}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_a_stream_with_the_subjects_of_the_queue_alone_is_asked_for_nothing_more() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        # The first look also asks for subjects that the stream does not store any more.
        await asyncio.sleep(6.0)
        stage.sent.clear()
        await asyncio.sleep(50.0)
        assert [each for each in stage.subjects("$JS.API.CONSUMER.INFO.S.work__p") if not each.endswith("p1")] == []
        assert all("subjects_filter" not in fields for fields in stage.fields("STREAM.INFO.S"))
        await asyncio.sleep(10.0)
        assert "$JS.API.CONSUMER.INFO.S.work__p3" in stage.subjects("$JS.API.CONSUMER.INFO.S")
        assert stranded(source) == {} and source.queue_watch.findings() == ()
        await closed(source)

    played(scene)


def test_messages_of_a_larger_number_are_found_within_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        source = await opened(stage)
        await stage.publish("q__p3.ann", "q__p3.bob", "q__p3", "q__p2", "q__p1.x", "q__p7")
        assert await until(lambda: bool(stranded(source)), 6.5)
        # The durable has never read q__p7, whose number is twice the width or more.
        assert stranded(source) == {"q__p2": 1, "q__p3": 3}
        text = (
            "queue 'q': no consumer of durable 'work' reads the messages in 'q__p2' (1), 'q__p3' (3). The "
            "producers use another number of partitions; start the consumers with that number"
        )
        assert list(source.queue_watch.findings()) == [text]
        assert warnings(caplog) == [f"jetstream S/work: {text}"]
        await asyncio.sleep(29.0)
        assert len(warnings(caplog)) == 1
        await asyncio.sleep(5.0)
        assert len(warnings(caplog)) == 2
        await closed(source)

    played(scene)


def test_unfinished_messages_of_a_former_number_are_found_and_their_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        former = await opened(stage, queue=WIDE)
        await stage.publish("q__p3", "q__p6.ann", "q__p6.ann")
        messages = await all_received(former, 3)
        await settle(former, [each for each in messages if each.partition.id.source == "q__p3"])
        await former.aclose()
        narrow = await opened(stage)
        await asyncio.sleep(7.0)
        # The finished message of q__p3 stays in the stream, and is not stranded.
        assert stranded(narrow) == {"q__p6": 2}
        await closed(narrow)
        again = await opened(stage, queue=WIDE)
        narrower = source_of(await stage.connect(), durable="other")
        await narrower.open()
        await settle(again, await all_received(again, 2))
        await asyncio.sleep(7.0)
        # The other durable has never read q__p3, and would read all of its messages.
        assert stranded(narrower) == {"q__p3": 1}
        await closed(again)
        await closed(narrower)

    played(scene)


def test_a_durable_that_another_process_reads_is_not_stranded(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        source = await opened(stage)
        await stage.publish("q__p2")
        await asyncio.sleep(7.0)
        assert stranded(source) == {"q__p2": 1}
        reader = await opened(stage, durable="work__p2", queue=PartitionedQueue("q__p2"))
        await all_received(reader, 1)
        task = asyncio.create_task(reader.receive(ROOM))
        with caplog.at_level("INFO"):
            await asyncio.sleep(6.0)
        assert stranded(source) == {}
        assert "jetstream S/work: queue 'q': no message waits in 'q__p2' any more" in caplog.messages
        task.cancel()
        await asyncio.wait([task])
        await closed(reader)
        await closed(source)

    played(scene)


def test_unfinished_messages_of_removed_subjects_are_found() -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        source = await opened(stage, queue=PartitionedQueue("q", partitions=4))
        await stage.publish("q__p3")
        await all_received(source, 1)
        await closed(source)
        stage.server.api.streams["S"].config["subjects"] = SUBJECTS
        narrow = await opened(stage)
        for _ in range(3):
            await asyncio.sleep(7.0)
            assert stranded(narrow) == {"q__p3": 1}
        await closed(narrow)

    played(scene)


def test_a_look_without_an_answer_keeps_the_findings() -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        source = await opened(stage)
        await stage.publish("q__p2")
        await asyncio.sleep(7.0)
        stage.answer("CONSUMER.INFO.S.work__p2", *[refusal(503)] * 4)
        await asyncio.sleep(10.0)
        assert stranded(source) == {"q__p2": 1}
        stage.answer("CONSUMER.INFO.S.work__p2", {"config": None})
        await asyncio.sleep(10.0)
        assert stranded(source) == {"q__p2": 1}
        await closed(source)

    played(scene)


def test_without_the_permission_to_look_a_warning_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        source = await opened(stage)
        stage.deny("$JS.API.CONSUMER.INFO.S.work__p2")
        await stage.publish("q__p2", "q")
        await asyncio.sleep(20.0)
        (line,) = warnings(caplog)
        assert line.startswith("jetstream S/work: ") and "work__p2" in line.casefold()
        assert line.endswith(
            "grant this permission, then start again. Until then, lanes cannot warn of messages of queue 'q' without a "
            "consumer"
        )
        assert stranded(source) == {}
        # The source itself goes on.
        assert len(await all_received(source, 1)) == 1
        await closed(source)

    played(scene)


def test_many_subjects_are_counted_page_by_page() -> None:
    async def scene(stage: Stage) -> None:
        await wide_stream(stage)
        source = await opened(stage)
        await stage.publish("q__p2.a", "q__p2.b", "q__p2.c")
        stage.server.api._stream_info = in_two_pages(stage.server.api._stream_info)  # type: ignore[method-assign]
        stage.sent.clear()
        await asyncio.sleep(8.0)
        assert stranded(source) == {"q__p2": 3}
        assert {each["offset"] for each in stage.fields("STREAM.INFO.S") if "subjects_filter" in each} == {0, 2}
        await closed(source)

    played(scene)


def in_two_pages(answer: Any) -> Any:
    """Answer requests for the three subjects of ``q__p2.>`` in two pages."""

    def info(name: str, fields: dict[str, Any], now: float) -> dict[str, Any]:
        found: dict[str, Any] = answer(name, {**fields, "offset": 0}, now)
        if fields.get("subjects_filter") == "q__p2.>":
            offset = fields["offset"]
            listed = list(found["state"]["subjects"].items())[offset : offset + 2]
            found = {**found, "state": {**found["state"], "subjects": dict(listed)}}
        return found

    return info
