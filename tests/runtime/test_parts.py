"""A part of a partition is handed over after its settlement, again after an error, and the other parts continue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes import Attempt, Consumer, Retry, Settings, SourceError
from lanes.core.types import Message, Part, Partition, PartitionId, PieceId, Room, Settlement
from lanes.errors import ConfigError
from lanes.source import Assigned, Delivered, Revoking, RevokingPart, SourceEvent, SourceTraits
from memsource import MemoryAttempts
from tests.core.builders import READER, new_message
from tests.fakes.support import Gated, started, until

pytestmark = pytest.mark.anyio


class Divided:
    """A source of one partition, whose events a test sends."""

    def __init__(self, *errors: SourceError) -> None:
        self.partition = Partition(PartitionId("S", 0), READER, floor=0)
        self.calls: list[tuple[str, int | None, list[tuple[int, int]]]] = []
        self.errors = list(errors)
        self._events: list[SourceEvent] = [Assigned(self.partition)]
        self._changed = anyio.Event()

    def send(self, *events: SourceEvent) -> None:
        self._events += events
        self._changed.set()

    def replace(self, *events: SourceEvent) -> None:
        self._events = [*events]

    def deliver(self, *keys: bytes, first: int = 0) -> None:
        run = [new_message(self.partition, position, key) for position, key in enumerate(keys, start=first)]
        self.send(Delivered(self.partition, run, len(run)))

    async def open(self) -> SourceTraits:
        return SourceTraits(name="divided", settles="cumulative", divides=True)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        while not self._events:
            self._changed = anyio.Event()
            await self._changed.wait()
        events, self._events = self._events, []
        return events

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.calls += [("settle", each.floor, list(each.completed)) for each in settlements]

    async def extend(self, messages: Sequence[Message]) -> None:
        raise AssertionError("the source has no time limit")

    async def hand_over(self, partition: Partition, parts: Sequence[Part]) -> None:
        assert (partition, parts) == (self.partition, [moved])
        self.calls.append(("hand over", None, []))
        if self.errors:
            raise self.errors.pop(0)

    async def release(self, partition: Partition) -> None:
        self.calls.append(("release", None, []))

    async def aclose(self) -> None:
        self.calls.append(("close", None, []))

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def moved(message: Message) -> bool:
    return message.key == b"m"


async def test_a_part_is_handed_over_after_the_settlement_and_again_after_an_error() -> None:
    source = Divided(SourceError("away", retryable=True), SourceError("away", retryable=True))
    handler = Gated()
    source.deliver(b"m", b"k", b"m")
    async with started(Consumer(source, handler)) as run:
        await until(lambda: len(handler.started) == 2)
        source.send(RevokingPart(source.partition, moved))
        await anyio.sleep(0.05)
        assert "hand over" not in source.names()
        handler.let(0, 1, 3)
        await until(lambda: source.names().count("hand over") == 3)
        at = source.names().index("hand over")
        # The position is true for the part too: its last message has not run.
        assert source.calls[at - 1] == ("settle", 2, [])
        source.deliver(b"k", first=3)
        await until(lambda: source.calls[-1] == ("settle", 4, []))
        run.consumer.stop()
        assert await run.end() is None
    assert handler.started == [0, 1, 3]


class Busy(Divided):
    """A source whose other messages never rest: during each settlement before the hand-over, a further one
    finishes."""

    handler: Gated

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await super().settle(settlements)
        if "hand over" in self.names():
            return
        position = len(self.handler.ended)
        self.deliver(b"k", first=position)
        commits: Any = self.partition.commits
        await until(lambda: position in self.handler.ended and commits.changes)


async def test_a_part_is_handed_over_while_the_rest_is_busy() -> None:
    source = Busy()
    source.handler = Gated(free=[b"k", b"m"])
    source.deliver(b"k", b"m")
    async with started(Consumer(source, source.handler)):
        await until(lambda: "settle" in source.names())
        source.send(RevokingPart(source.partition, moved))
        await until(lambda: "hand over" in source.names())


class Stuck(MemoryAttempts):
    """A store that never answers."""

    async def keep(self, message: Message, attempt: Attempt) -> None:
        await anyio.sleep_forever()


async def test_a_part_waits_for_no_write_of_another_message() -> None:
    source, attempts = Divided(), Stuck()
    failed: list[int] = []

    async def fail(message: Message) -> None:
        failed.append(message.position)
        raise ValueError

    source.deliver(b"k")
    async with started(Consumer(source, fail, attempts=attempts)):
        await until(lambda: failed == [0])
        source.send(RevokingPart(source.partition, moved))
        await until(lambda: "hand over" in source.names())


async def test_an_error_that_stays_stops_the_consumer() -> None:
    source = Divided(SourceError("no such row"))
    async with started(Consumer(source, Gated(free=[b"m"]))) as run:
        source.send(RevokingPart(source.partition, moved))
        error = await run.end()
    assert isinstance(error, SourceError) and str(error) == "no such row"
    assert source.names()[-2:] == ["release", "close"]


async def test_a_drain_ends_the_repetition_of_a_hand_over(caplog: pytest.LogCaptureFixture) -> None:
    source = Divided(*[SourceError("away", retryable=True)] * 1_000)
    async with started(Consumer(source, Gated(free=[b"m"]))) as run:
        source.send(RevokingPart(source.partition, moved))
        await until(lambda: source.names().count("hand over") >= 3)
        source.send(Revoking(source.partition, 1.0))
        await until(lambda: "release" in source.names())
        run.consumer.stop()
        assert await run.end() is None
    assert len(source.errors) > 900
    warnings = [line for line in caplog.messages if "is not handed over" in line]
    assert warnings == ["divided: a part of S/0 is not handed over (away); retrying"], "one line for 30 s"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"settings": Settings(order="partition")}, 'order="partition": divided owns ranges of keys'),
        ({"settings": Settings(lanes=3)}, "lanes=3: the keys of a lane of divided may have different owners"),
    ],
    ids=["order", "lanes"],
)
async def test_an_order_that_needs_the_whole_partition_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await Consumer(Divided(), Gated(), **arguments).run()


async def test_a_journal_of_parts_is_refused(tmp_path: Path) -> None:
    """A journal has no names of pieces, so an audit would judge the part as a gap of the partition."""
    with pytest.raises(ConfigError, match=r"divided owns ranges .* leave out journal="):
        await Consumer(Divided(), Gated(), journal=tmp_path).run()


async def test_the_attempts_of_a_part_stay_in_the_store() -> None:
    """The floor of the former owner passes the message after the hand-over, which says nothing about its attempts."""
    source, store = Divided(), MemoryAttempts()
    settings = Settings(poison="block", retry=Retry(attempts=1))

    async def fail(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if moved(message):
            raise ValueError("fails")

    async with started(Consumer(source, fail, settings=settings, attempts=store)) as run:
        source.deliver(b"m", b"k")
        await until(lambda: run.consumer.status().blocked == 1)
        source.send(RevokingPart(source.partition, moved))
        await until(lambda: ("settle", 2, []) in source.calls)
        await anyio.sleep(0.05)
        assert list(await store.load(source.partition)) == [0]
        run.consumer.stop()
        assert await run.end() is None


async def test_a_piece_leaves_the_attempts_of_other_pieces_in_the_store() -> None:
    """The store names partitions, so a piece also loads attempts of messages below its floor that are not its own."""
    store = MemoryAttempts()
    other = Partition(PieceId("S", 0, 1), READER, floor=0)
    await store.keep(new_message(other, 3, b"m"), Attempt(2, "blocked", "ValueError"))
    source = Divided()
    source.partition = Partition(PieceId("S", 0, 2), READER, floor=10)
    source.replace(Assigned(source.partition))
    async with started(Consumer(source, Gated(free=[b"k"]), attempts=store)) as run:
        source.deliver(b"k", first=10)
        await until(lambda: ("settle", 11, []) in source.calls)
        await anyio.sleep(0.05)
        assert list(await store.load(other)) == [3]
        run.consumer.stop()
        assert await run.end() is None
