"""Ownership under a lease: after its deadline no handler starts and nothing is settled."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from lanes import Consumer, GroupEvent, History, Message, PartitionId, Settings, SourceError
from lanes.core.types import Room
from lanes.history.recorder import Recorder
from lanes.source import Assigned, SourceEvent
from memsource import GroupSource, MemoryBroker, MemoryDeadLetters, MemorySource, check, read
from tests.fakes.grouped import ONCE, HandClock, group_of
from tests.fakes.support import TIMEOUT, Gated, Run, consumer_of, publish, settled, started, turns, until

UNTIL = 1_010.0
"""The deadline of the leases; the clock begins at 1,000."""

LEASED = PartitionId("memory", 0)

Releasing = tuple[Run, MemorySource, list[str]]


class Jobs:
    """The same handler as a coroutine, as a plain function and for batches. The first message, which has no lease, runs
    until ``gate`` is set; ``started`` are all that were called."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.started: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.opened = anyio.Event()

    def let(self) -> None:
        self.gate.set()
        self.opened.set()

    def handler(self) -> Any:
        def note(message: Message) -> bool:
            self.started.append((message.partition.id.number, message.position))
            return self.started[-1] == (1, 0)

        async def one(message: Message) -> None:
            if note(message):
                await self.opened.wait()

        async def several(batch: list[Message]) -> None:
            await one(batch[0])

        def plain(message: Message) -> None:
            if note(message):
                assert self.gate.wait(TIMEOUT)

        def plain_batch(batch: list[Message]) -> None:
            plain(batch[0])

        return {"async": one, "thread": plain, "batch": several, "batch thread": plain_batch}[self.kind]

    def consumer(self, source: MemorySource, clock: Callable[[], float], **arguments: Any) -> Consumer:
        batch = 1 if self.kind.startswith("batch") else None
        settings = Settings(concurrency=1, retry=ONCE, batch=batch)
        return Consumer(source, self.handler(), settings=settings, clock=clock, **arguments)


def leased(source: MemorySource, *keys: str) -> None:
    """Assign partition 1 without a lease and with one message, and partition 0 with a lease and a message for each
    key."""
    publish(source.broker, ["first"], partition=1)
    source.assign(0, deadline=UNTIL, fencing_token=77)
    publish(source.broker, keys, partition=0)


@pytest.fixture(params=["async", "thread", "batch", "batch thread"])
def jobs(request: pytest.FixtureRequest) -> Jobs:
    return Jobs(request.param)


@pytest.mark.anyio
async def test_no_handler_starts_after_the_deadline(jobs: Jobs, tmp_path: Path) -> None:
    clock, told = HandClock(), list[GroupEvent]()
    source = MemorySource(MemoryBroker(2), assigned=[1])
    consumer = jobs.consumer(source, clock, on_event=told.append, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: run.consumer.ready)
        leased(source, "a", "a", "b")
        await until(lambda: run.consumer.status().in_flight == 4)
        # The process was frozen: the clock has moved, and no timer has run.
        clock.now = UNTIL
        jobs.let()
        await until(lambda: "memory/0" not in run.consumer.status().floors)
        publish(source.broker, ["later"], partition=1)
        await until(lambda: source.broker.acked(1) == [0, 1])
        # The source also reports the loss, later; the loss counts once.
        source.lose(0)
        await turns()
        assert run.consumer.status().in_flight == 0
        assert run.consumer.status().zombies == 0
        assert await run.stop() is None
    assert jobs.started == [(1, 0), (1, 1)]
    # The history has no row `started` either.
    begun = [row.partition for row in read([tmp_path])[0].rows if row.event == "started"]
    assert begun == ["memory/1", "memory/1"]
    lost = [event for event in told if event.name == "lost"]
    assert lost == [GroupEvent(name="lost", partition=LEASED, epoch=77, reason="its lease has run out")]


@pytest.mark.anyio
async def test_a_renewed_lease_lets_messages_start(jobs: Jobs) -> None:
    clock = HandClock()
    source = MemorySource(MemoryBroker(2), assigned=[1])
    async with started(jobs.consumer(source, clock)) as run:
        await until(lambda: run.consumer.ready)
        leased(source, "a", "a")
        await until(lambda: run.consumer.status().in_flight == 3)
        source.renew(0, UNTIL + 5.0)
        clock.now = UNTIL
        jobs.let()
        await until(lambda: source.broker.acked(0) == [0, 1])
        assert await run.stop() is None


@pytest.mark.anyio
async def test_no_handler_starts_if_the_lease_ends_while_its_row_is_written(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, history = HandClock(), History(tmp_path)
    source = MemorySource(MemoryBroker(2), assigned=[1])
    write = Recorder.flush
    frozen = False

    def flush(self: Recorder) -> None:
        write(self)
        if frozen:
            clock.now = UNTIL

    monkeypatch.setattr(Recorder, "flush", flush)
    async with started(jobs.consumer(source, clock, history=history)) as run:
        await until(lambda: run.consumer.ready)
        leased(source, "a")
        await until(lambda: run.consumer.status().in_flight == 2 and jobs.started)
        # Settlements are blocked, because an earlier settlement would also flush the history.
        source.block("settle")
        jobs.let()
        await until(lambda: source.called("settle"))
        frozen = True
        publish(source.broker, ["a"], partition=0)
        await until(lambda: "memory/0" not in run.consumer.status().floors)
        frozen = False
        source.unblock("settle")
        publish(source.broker, ["b"], partition=1)
        await until(lambda: source.broker.acked(1) == [0, 1])
        assert await run.stop() is None
    assert (0, 1) not in jobs.started
    segment = read([tmp_path])[0]
    assert [verdict.name for verdict in check([segment]) if verdict.status == "violated"] == []
    found = [row for row in segment.rows if (row.partition, row.position) == ("memory/0", 1)]
    rows = [(row.event, row.text) for row in found if row.event in ("started", "ended")]
    # A message with a row ``started`` has a row ``ended``.
    assert rows in ([], [("started", ""), ("ended", "cancelled")])
    assert all(row.mono < UNTIL for row in found if row.event == "started")


@pytest.mark.anyio
@pytest.mark.parametrize("renewed", [False, True])
async def test_a_thread_checks_the_deadline_before_the_call(*, renewed: bool) -> None:
    clock, broker, ran = HandClock(), MemoryBroker(), list[int]()
    main, times = threading.current_thread(), 0

    def late_in_threads() -> float:
        nonlocal times
        if threading.current_thread() is not main:
            times += 1
            if times == 1:
                if not renewed:
                    clock.now = UNTIL
                return UNTIL
        return clock.now

    source = MemorySource(broker, assigned=[])

    def handler(message: Message) -> None:
        ran.append(message.position)

    async with started(consumer_of(source, handler, clock=late_in_threads)) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=UNTIL)
        publish(broker, ["a"])
        if renewed:
            # By the loop's clock the lease is valid, so the returned message starts again.
            await until(lambda: broker.acked(0) == [0])
        else:
            await until(lambda: times == 1 and not run.consumer.active)
        assert await run.stop() is None
    assert ran == ([0] if renewed else [])


@pytest.mark.anyio
async def test_a_message_that_finishes_after_the_deadline_is_not_settled(jobs: Jobs) -> None:
    clock, broker = HandClock(), MemoryBroker(2)
    source = MemorySource(broker, assigned=[])
    async with started(jobs.consumer(source, clock)) as run:
        await until(lambda: run.consumer.ready)
        source.assign(1, deadline=UNTIL)
        publish(broker, ["first"], partition=1)
        await until(lambda: jobs.started)
        clock.now = UNTIL
        jobs.let()
        await until(lambda: not run.consumer.active)
        assert run.consumer.status().in_flight == 0
        assert await run.stop() is None
    assert settled(source) == []


@pytest.mark.anyio
async def test_a_source_that_commits_commits_nothing_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, group = HandClock(), group_of(["a", "b"])
    source, handler = GroupSource(group, "m-1"), Gated(free=[b"a"])
    receive = source.receive

    async def leasing(room: Room) -> list[SourceEvent]:
        events = list(await receive(room))
        for event in events:
            if isinstance(event, Assigned):
                event.partition.deadline = UNTIL
        return events

    monkeypatch.setattr(source, "receive", leasing)
    async with started(consumer_of(source, handler, clock=clock)) as run:
        await until(lambda: group.committed(0).offset == 1 and handler.running == 1)
        clock.now = UNTIL
        handler.let(1)
        await until(lambda: not run.consumer.status().floors)
        assert await run.stop() is None
    assert group.committed(0) == (1, ())


@pytest.mark.anyio
async def test_a_batch_that_ends_after_the_deadline_has_rows_only_for_its_heads(tmp_path: Path) -> None:
    clock, broker = HandClock(), MemoryBroker()
    source = MemorySource(broker, assigned=[])

    async def handler(batch: list[Message]) -> None:
        assert [message.position for message in batch] == [0, 1, 2]
        clock.now = UNTIL

    settings = Settings(batch=3, linger=TIMEOUT, retry=ONCE)
    async with started(Consumer(source, handler, settings=settings, clock=clock, history=History(tmp_path))) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=UNTIL)
        publish(broker, ["a", "a", "b"])
        await until(lambda: source.called("receive") and run.consumer.status().zombies)
        assert await run.stop() is None
    rows = [row for row in read([tmp_path])[0].rows if row.event == "started"]
    assert [row.position for row in rows] == [0, 2]
    assert settled(source) == []


@pytest.mark.anyio
async def test_a_message_that_finished_before_is_not_settled_after_the_deadline() -> None:
    clock, broker = HandClock(), MemoryBroker(2)
    source, handler = MemorySource(broker, assigned=[1]), Gated(free=[b"a"])
    source.fail("settle", SourceError("no answer", retryable=True), times=1)
    async with started(consumer_of(source, handler, clock=clock)) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=UNTIL)
        publish(broker, ["a"], partition=0)
        await until(lambda: source.called("settle"))
        clock.now = UNTIL
        await until(lambda: "memory/0" not in run.consumer.status().floors)
        publish(broker, ["a"], partition=1)
        await until(lambda: broker.acked(1) == [0])
        assert await run.stop() is None
    assert broker.acked(0) == []


@pytest.mark.anyio
async def test_after_the_deadline_nothing_is_extended_and_handlers_are_cancelled() -> None:
    clock, broker = HandClock(), MemoryBroker(2)
    source, handler = MemorySource(broker, assigned=[1], extend_interval=0.02), Gated(free=[b"x"])
    async with started(consumer_of(source, handler, clock=clock)) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=UNTIL)
        publish(broker, ["a"], partition=0)
        publish(broker, ["x", "b"], partition=1)
        await until(lambda: len(handler.started) == 3)
        clock.now = UNTIL
        await until(lambda: handler.cancelled)
        before = len(source.called("extend"))
        await until(lambda: len(source.called("extend")) > before)
        assert [call.positions for call in source.called("extend")][-1] == [1]
        assert handler.cancelled == [0]
        assert run.consumer.status().zombies == 1
        handler.let(1)
        await until(lambda: broker.acked(1) == [0, 1])
        assert await run.stop() is None


@pytest.mark.anyio
async def test_no_dead_letter_is_written_after_the_deadline() -> None:
    clock, broker = HandClock(), MemoryBroker(2)
    source, dead_letters = MemorySource(broker, assigned=[1]), MemoryDeadLetters(broker)
    gate = anyio.Event()

    async def handler(message: Message) -> None:
        if message.key == b"poison":
            await gate.wait()
            raise ValueError("never")

    async with started(consumer_of(source, handler, clock=clock, dead_letters=dead_letters)) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=UNTIL)
        publish(broker, ["poison"], partition=0)
        await until(lambda: run.consumer.status().running == 1)
        clock.now = UNTIL
        gate.set()
        await until(lambda: "memory/0" not in run.consumer.status().floors)
        assert await run.stop() is None
    assert dead_letters.called("put") == []


@pytest.mark.anyio
async def test_a_drain_without_a_limit_lets_handlers_end(tmp_path: Path) -> None:
    broker = MemoryBroker()
    source, handler = MemorySource(broker), Gated()
    consumer = consumer_of(source, handler, drain_timeout=0.0, grace=0.01, history=History(tmp_path))
    publish(broker, ["a"])
    async with started(consumer) as run:
        await until(lambda: handler.started)
        source.revoke(0, timeout=math.inf)
        # A timeout of 0 s would have passed long ago.
        with anyio.move_on_after(0.1):
            await until(lambda: handler.cancelled)
        assert handler.cancelled == [] and source.called("release") == []
        handler.let(0)
        await until(lambda: source.owned == [])
        assert await run.stop() is None
    assert broker.acked() == [0]
    assert [row.number for row in read([tmp_path])[0].rows if row.event == "revoking"] == [1e9]


@pytest.mark.anyio
@pytest.mark.usefixtures("hurried")
async def test_a_drain_without_a_limit_bounds_its_last_settlement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.handover._SETTLE_LIMIT", 0.01)
    broker = MemoryBroker()
    source, handler = MemorySource(broker), Gated()
    publish(broker, ["a"])
    async with started(consumer_of(source, handler, grace=0.01)) as run:
        await until(lambda: handler.started)
        source.block("settle")
        source.revoke(0, timeout=math.inf)
        handler.let(0)
        await until(lambda: source.called("release"))
        source.unblock("settle")
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("stop_first", [False, True])
async def test_a_stop_limits_a_drain_that_has_no_limit(tmp_path: Path, *, stop_first: bool) -> None:
    broker = MemoryBroker()
    source, handler = MemorySource(broker), Gated()
    publish(broker, ["a"])
    consumer = consumer_of(source, handler, drain_timeout=0.05, grace=0.01, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: handler.started)
        if stop_first:
            run.consumer.stop()
        source.revoke(0, timeout=math.inf)
        await turns()
        assert await run.stop() is None
    assert handler.cancelled == [0]
    # Infinity is no JSON, and would be a gap in the history.
    assert read([tmp_path])[0].gaps == []


@asynccontextmanager
async def releasing(clock: HandClock, deadline: float, *, grace: float) -> AsyncIterator[Releasing]:
    """A consumer in a hanging release, whose lease ends at ``deadline``."""
    source, told = MemorySource(MemoryBroker(), assigned=[]), list[str]()
    settings = Settings(concurrency=1, grace=grace)
    consumer = Consumer(source, Gated(), settings=settings, clock=clock, on_event=lambda event: told.append(event.name))
    async with started(consumer) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=deadline)
        await until(lambda: told == ["assigned"])
        source.block("release")
        source.revoke(0)
        await until(lambda: source.called("release"))
        yield run, source, told


@pytest.mark.anyio
async def test_a_release_may_take_the_rest_of_the_lease() -> None:
    async with releasing(HandClock(), UNTIL, grace=0.001) as (run, source, told):
        # The grace is over.
        with anyio.move_on_after(0.05):
            await until(lambda: len(told) > 1)
        assert told == ["assigned"]
        source.unblock("release")
        await until(lambda: len(told) > 1)
        assert await run.stop() is None
    assert told == ["assigned", "revoked"]
    assert source.owned == []


@pytest.mark.long
@pytest.mark.anyio
async def test_a_release_longer_than_the_lease_is_a_loss() -> None:
    clock = HandClock()
    async with releasing(clock, clock.now + 0.05, grace=0.001) as (run, _, told):
        clock.now += 0.05
        await until(lambda: len(told) > 1)
        assert await run.stop() is None
    assert told == ["assigned", "lost"]


@pytest.mark.anyio
async def test_a_release_confirmed_after_the_deadline_is_no_loss() -> None:
    """The lease was renewed during the hand-over, and the source confirmed the release."""
    clock = HandClock()
    async with releasing(clock, UNTIL, grace=10.0) as (run, source, told):
        clock.now = UNTIL + 1.0
        source.unblock("release")
        await until(lambda: len(told) > 1)
        assert await run.stop() is None
    assert told == ["assigned", "revoked"]
