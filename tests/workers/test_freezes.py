"""No handler starts after a freeze before the source has confirmed the partitions.

A freeze is a step of the run's clock, which otherwise stands still: a busy machine that gives this process no processor
for a second would make freezes of its own. One test freezes the process, by a C function that keeps the interpreter's
lock, so that no thread runs.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from lanes import Attempt, History, Message, SourceError
from lanes.clock import monotonic
from lanes.core.types import Partition
from lanes.workers import freezes
from memsource import GroupSource, MemoryAttempts, MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes import support
from tests.fakes.grouped import HandClock, RunClock, group_of
from tests.fakes.support import published, started, until, wait_without_the_loop

LIMIT = 0.4
"""Limit of the sources here, whose watch counts freezes from 0.3 s on."""

FREEZE = 0.7


CLOCK = RunClock()

consumer_of = partial(support.consumer_of, clock=CLOCK)


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezes, "SHORTEST", 0.3)
    monkeypatch.setattr("lanes.workers.loop_watch.PULSE", 0.05)
    # The thread that watches the loop starts for the real clock alone.
    monkeypatch.setattr("lanes.workers.loop_watch.monotonic", CLOCK)


def freeze(seconds: float = FREEZE) -> None:
    """Let the time pass as in a freeze: no thread reads the clock meanwhile."""
    CLOCK.now += seconds


class ConfirmingSource(MemorySource):
    """A source that confirms its partitions when it is told to.

    Attributes:
        limit: The limit of a freeze.
        asked: The partitions of each ``confirm``.
        refused: Whether ``confirm`` confirms nothing.
        failure: The error that ``confirm`` raises.
    """

    def __init__(self, broker: MemoryBroker, limit: float = LIMIT) -> None:
        super().__init__(broker)
        self.limit = limit
        self.asked: list[list[Partition]] = []
        self.refused = False
        self.failure: SourceError | None = None
        self._allowed = anyio.Event()

    def freeze_limit(self) -> float:
        return self.limit

    @property
    def allowed(self) -> bool:
        return self._allowed.is_set()

    def allow(self) -> None:
        self._allowed.set()

    def forbid(self) -> None:
        self._allowed = anyio.Event()

    async def confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        self.asked.append(list(partitions))
        await self._allowed.wait()
        if self.failure is not None:
            raise self.failure
        return [] if self.refused else partitions


class Work:
    """Handlers of which the first one freezes the process. ``started`` are positions."""

    def __init__(self, freezing: int = 1) -> None:
        self.started: list[int] = []
        self._left = freezing

    def begin(self, *messages: Message) -> None:
        self.started += [message.position for message in messages]
        if self._left:
            self._left -= 1
            freeze()

    async def one(self, message: Message) -> None:
        self.begin(message)
        await anyio.sleep(0.001)

    def in_thread(self, message: Message) -> None:
        self.begin(message)

    def batch_in_thread(self, messages: list[Message]) -> None:
        self.begin(*messages)

    async def batch(self, messages: list[Message]) -> None:
        self.begin(*messages)
        await anyio.sleep(0.001)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "async": ("one", {"concurrency": 1}),
    "inline": ("in_thread", {"concurrency": 1, "sync_handlers": "inline"}),
    "threads": ("in_thread", {"concurrency": 1}),
    "batch": ("batch", {"concurrency": 1, "batch": 1}),
    "batch in threads": ("batch_in_thread", {"concurrency": 1, "batch": 1}),
}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_after_a_freeze_no_handler_starts_before_the_partitions_are_confirmed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker)
    name, settings = KINDS[kind]
    async with started(consumer_of(source, getattr(work, name), **settings)) as run:
        await until(lambda: source.asked)
        await anyio.sleep(0.1)
        assert len(work.started) == 1
        assert [len(asked) for asked in source.asked] == [1]
        source.allow()
        await until(lambda: not broker.unfinished)
        assert sorted(work.started) == [0, 1, 2, 3, 4, 5]
        assert await run.stop() is None
    # On a busy machine the thread wakes later.
    assert [line for line in caplog.messages if re.search(r"no thread of this process ran for \d+\.\d s", line)]
    assert [line for line in caplog.messages if "handlers start again" in line]


@pytest.mark.anyio
async def test_a_lost_partition_starts_nothing_and_its_next_assignment_starts() -> None:
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker)
    source.refused = True
    async with started(consumer_of(source, work.one, concurrency=1)) as run:
        await until(lambda: source.asked)
        source.allow()
        # Neither confirmed nor reported lost: the source is asked again.
        await until(lambda: len(source.asked) > 2)
        assert len(work.started) == 1
        source.lose(0)
        await until(lambda: not run.consumer.status().partitions)
        source.refused = False
        source.assign(0)
        await until(lambda: not broker.unfinished)
        assert sorted(work.started) == [0, 1, 2, 3, 4, 5]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_second_freeze_needs_a_second_confirmation() -> None:
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker)
    async with started(consumer_of(source, work.one, concurrency=1)) as run:
        await until(lambda: source.asked)
        # The confirmation has been made, and the process is frozen before it is read.
        source.allow()
        freeze()
        source.forbid()
        await until(lambda: len(source.asked) == 2)
        await anyio.sleep(0.1)
        assert len(work.started) == 1
        source.allow()
        await until(lambda: not broker.unfinished)
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [0.25, LIMIT - 0.1], ids=["too short to be counted", "below the limit"])
async def test_a_short_freeze_changes_nothing(seconds: float) -> None:
    broker, work = published(*"abc"), Work(0)
    source = ConfirmingSource(broker, LIMIT if seconds < 0.3 else 1.0)
    async with started(consumer_of(source, work.one, concurrency=1)) as run:
        await until(lambda: not broker.unfinished)
        freeze(seconds)
        await CLOCK.looked()
        assert source.asked == []
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_handler_that_holds_the_loop_is_no_freeze() -> None:
    """Other threads run meanwhile, so the client sends heartbeats."""
    broker = published("a")
    source = ConfirmingSource(broker)

    async def hold(message: Message) -> None:
        for _ in range(3):
            before = CLOCK.looks
            CLOCK.now += 0.25
            wait_without_the_loop(lambda: CLOCK.looks >= before + 3)  # noqa: B023

    async with started(consumer_of(source, hold, concurrency=1)) as run:
        await until(lambda: not broker.unfinished)
        assert source.asked == []
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_freeze_of_an_idle_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.workers.loop_watch.monotonic", monotonic)
    broker, work = MemoryBroker(), Work(0)
    source = ConfirmingSource(broker)
    async with started(consumer_of(source, work.one, clock=monotonic)) as run:
        await until(lambda: run.consumer.ready)
        ctypes.PyDLL(None).usleep(int(FREEZE * 1e6))
        broker.publish("x", key="a")
        await until(lambda: source.asked)
        await anyio.sleep(0.1)
        assert work.started == []
        source.allow()
        await until(lambda: not broker.unfinished)
        assert await run.stop() is None


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread and no task looks for a freeze, so only starts of handlers look."""
    monkeypatch.setattr("lanes.workers.loop_watch.LoopWatch.start", lambda watch, message_in: True)


@pytest.mark.anyio
async def test_a_message_that_wakes_a_worker_after_a_freeze_does_not_start(unwatched: None) -> None:
    broker, work = MemoryBroker(), Work(0)
    source = ConfirmingSource(broker)
    async with started(consumer_of(source, work.one, concurrency=2)) as run:
        await until(lambda: run.consumer.ready)
        for freezes_before in (False, True):
            if freezes_before:
                freeze()
            broker.publish("x", key="a")
            await until(lambda: source.asked if freezes_before else not broker.unfinished)  # noqa: B023
        await anyio.sleep(0.1)
        assert work.started == [0]
        source.allow()
        await until(lambda: not broker.unfinished)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_freeze_while_a_woken_worker_yields_to_the_loop_is_noticed(unwatched: None) -> None:
    broker, work = MemoryBroker(), Work(0)
    source = ConfirmingSource(broker)
    consumer = consumer_of(source, work.one, concurrency=1)
    async with started(consumer) as run:
        await until(lambda: run.consumer.ready)
        workers: Any = consumer._life.run.workers  # type: ignore[union-attr]
        # The slice is used up when the worker wakes, and the process freezes in the loop's turn.
        workers._yielding, yields = True, workers._yield_to_loop

        async def freezing() -> None:
            freeze()
            await yields()

        workers._yield_to_loop = freezing
        broker.publish("x", key="a")
        await until(lambda: source.asked)
        workers._yield_to_loop = yields
        await anyio.sleep(0.1)
        assert work.started == []
        source.allow()
        await until(lambda: not broker.unfinished)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_message_that_wakes_a_worker_costs_no_clock_read(unwatched: None) -> None:
    """The look shares the read of the wake-up, and a worker without a next message does not look."""

    async def reads(source: MemorySource, broker: MemoryBroker) -> int:
        async with started(consumer_of(source, Work(0).one, concurrency=2)) as run:
            await until(lambda: run.consumer.ready)
            broker.publish("x", key="a")
            await until(lambda: not broker.unfinished)
            before = CLOCK.asked
            for _ in range(20):
                broker.publish("x", key="a")
                await until(lambda: not broker.unfinished)
            asked = CLOCK.asked - before
            assert await run.stop() is None
            return asked

    watched, plain = MemoryBroker(), MemoryBroker()
    assert await reads(ConfirmingSource(watched), watched) == await reads(MemorySource(plain), plain)


@pytest.mark.anyio
async def test_no_dead_letter_is_written_before_the_partitions_are_confirmed() -> None:
    broker = published("a")
    source = ConfirmingSource(broker)

    async def poison(message: Message) -> None:
        freeze()
        raise ValueError("poison")

    consumer = consumer_of(source, poison, dead_letters=MemoryDeadLetters(broker))
    async with started(consumer) as run:
        await until(lambda: source.asked)
        await anyio.sleep(0.1)
        assert broker.dead_letters == []
        source.allow()
        await until(lambda: not broker.unfinished)
        assert len(broker.dead_letters) == 1
        assert await run.stop() is None


class Keeping(MemoryAttempts):
    """A store of attempts. ``kept_at``: whether the source had confirmed, for each call of ``keep``."""

    def __init__(self, source: ConfirmingSource) -> None:
        super().__init__()
        self.kept_at: list[bool] = []
        self._source = source

    async def keep(self, message: Message, attempt: Attempt) -> None:
        self.kept_at.append(self._source.allowed)
        await super().keep(message, attempt)


async def fails_after_a_freeze(message: Message) -> None:
    if message.attempt == 1:
        freeze()
        raise ValueError("poison")


@pytest.mark.anyio
async def test_no_attempt_is_stored_before_the_partitions_are_confirmed() -> None:
    broker = published("a")
    source = ConfirmingSource(broker)
    store = Keeping(source)
    async with started(consumer_of(source, fails_after_a_freeze, store=store, attempts=2, backoff=0.0)) as run:
        await until(lambda: source.asked)
        await anyio.sleep(0.1)
        assert store.kept_at == []
        source.allow()
        await until(lambda: not broker.unfinished)
        assert store.kept_at == [True]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_the_attempt_of_a_lost_partition_is_not_stored() -> None:
    broker = published("a")
    source = ConfirmingSource(broker)
    source.refused = True
    store = Keeping(source)
    async with started(consumer_of(source, fails_after_a_freeze, store=store, attempts=2, backoff=0.0)) as run:
        await until(lambda: source.asked)
        source.allow()
        await until(lambda: len(source.asked) > 2)
        source.lose(0)
        await until(lambda: not run.consumer.status().partitions)
        await anyio.sleep(0.1)
        assert store.kept_at == []
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_message_whose_handler_waits_for_the_confirmation_does_not_time_out(tmp_path: Path) -> None:
    broker, clock = published("a", "b"), HandClock()
    started_at: list[float] = []

    async def handle(message: Message) -> None:
        started_at.append(clock.now)
        # The other worker has its message, and waits until the rows are in the file.
        parts().freezes.held = len(started_at) == 1
        parts().workers.hold()

    history = History(tmp_path, member="m")
    consumer = consumer_of(ConfirmingSource(broker), handle, concurrency=2, timeout=0.01, clock=clock, history=history)

    def parts() -> Any:
        return consumer._life.run

    async with started(consumer) as run:
        await until(lambda: started_at)
        clock.now += 0.02
        await clock.asked_again(10)
        assert len(started_at) == 1
        parts().freezes.open(0, clock.now)
        await until(lambda: not broker.unfinished)
        assert await run.stop() is None
    assert started_at[1] - started_at[0] == pytest.approx(0.02)


@pytest.mark.anyio
async def test_a_stop_does_not_wait_for_the_confirmation() -> None:
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker)
    async with started(consumer_of(source, work.one, concurrency=1, drain_timeout=0.5)) as run:
        await until(lambda: source.asked)
        assert await run.stop() is None
    assert len(work.started) == 1


class ConfirmingMember(GroupSource):
    """A source that commits without a completed set, and whose broker never answers. ``asked``: calls of
    ``confirm``."""

    asked = 0

    def freeze_limit(self) -> float:
        return LIMIT

    async def confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        self.asked += 1
        await anyio.sleep_forever()
        return []


@pytest.mark.anyio
async def test_a_stop_without_a_completed_set_does_not_wait_for_the_confirmation() -> None:
    """The queued message below the highest started one cannot start, so the drain does not wait for it."""
    group = group_of("aab")
    source = ConfirmingMember(group, "m", hands_over=False)
    started_at: list[int] = []
    frozen = anyio.Event()

    async def handle(message: Message) -> None:
        started_at.append(message.position)
        if message.position == 2:
            freeze()
            frozen.set()
        await frozen.wait()

    async with started(consumer_of(source, handle, concurrency=2, drain_timeout=60.0)) as run:
        await until(lambda: source.asked)
        assert await run.stop() is None
    assert started_at == [0, 2]


@pytest.mark.anyio
async def test_a_source_that_cannot_confirm_ends_the_run() -> None:
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker)
    source.failure = SourceError("the client is closed")
    source.allow()
    async with started(consumer_of(source, work.one, concurrency=1, drain_timeout=0.5)) as run:
        assert await run.end() is source.failure
    assert len(work.started) == 1


@pytest.mark.anyio
async def test_freezes_are_noticed_without_the_thread_that_watches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.workers.loop_watch.LoopWatch.start", lambda watch, message_in: False)
    monkeypatch.setattr("lanes.runtime.confirmation.PULSE", 0.05)
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker)
    async with started(consumer_of(source, work.one, concurrency=1)) as run:
        await until(lambda: source.asked)
        await anyio.sleep(0.4)
        assert (len(work.started), len(source.asked)) == (1, 1)
        source.allow()
        await until(lambda: not broker.unfinished)
        await anyio.sleep(0.4)
        assert len(source.asked) == 1
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_source_without_a_limit_is_never_asked() -> None:
    broker, work = published(*"abcdef"), Work()
    source = ConfirmingSource(broker, math.inf)
    async with started(consumer_of(source, work.one, concurrency=1)) as run:
        await until(lambda: not broker.unfinished)
        assert source.asked == []
        assert await run.stop() is None
