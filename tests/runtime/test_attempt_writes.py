"""A store of attempts gets failures before drops, drops share one call, and a failed drop is repeated."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import pytest

from lanes import Attempt, Message, Partition
from lanes.runtime.attempts import _DROPS, _WRITERS, _Entries, _Entry
from memsource import GroupSource, MemoryAttempts, MemoryDeadLetters, MemorySource
from tests.fakes.attempts import HERE, Failing, Later, keeping, place
from tests.fakes.grouped import group_of
from tests.fakes.support import Gated, published, started, turns, until

HELD = Attempt(1, "held", "E")


class Told(MemoryAttempts):
    """A store that records its writes. They end while ``open`` is set, or raise the error in ``fails``."""

    def __init__(self, known: int = 0) -> None:
        super().__init__()
        self.writes: list[tuple[str, list[int]]] = []
        self.open = anyio.Event()
        self.open.set()
        self.fails: dict[str, Exception] = {}
        self._rows[HERE, ""] = dict.fromkeys(range(known), (HELD, 0))

    async def keep(self, message: Message, attempt: Attempt) -> None:
        await self._begin("keep", [message.position])
        await super().keep(message, attempt)

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        await self._begin("drop", list(positions))
        await super().drop(partition, positions)

    async def _begin(self, what: str, positions: list[int]) -> None:
        self.writes.append((what, positions))
        await self.open.wait()
        if what in self.fails:
            raise self.fails[what]


@pytest.mark.anyio
async def test_failures_are_written_before_drops_and_drops_share_one_call() -> None:
    known = _WRITERS + 4
    broker, store, gates = published(*(f"k{number}" for number in range(known + 1))), Told(known), Gated()

    async def handler(message: Message) -> None:
        await gates(message)
        if message.position == known:
            raise Later("no")

    consumer = keeping(MemorySource(broker), handler, store, concurrency=known + 1)
    async with started(consumer) as run:
        await until(lambda: gates.running == known + 1)
        store.open = anyio.Event()
        for position in range(known):
            gates.let(position)
            await until(lambda n=position: len(broker.acked()) == n + 1)  # type: ignore[misc]
            await until(lambda n=position: len(store.writes) == min(n + 1, _WRITERS))  # type: ignore[misc]
        gates.let(known)
        await until(lambda: consumer.status().held == 1)
        await turns()
        under_way = [("drop", [position]) for position in range(_WRITERS)]
        assert store.writes == under_way
        store.open.set()
        assert await run.stop() is None
    assert store.writes == [*under_way, ("keep", [known]), ("drop", list(range(_WRITERS, known)))]
    assert place(store) == {known: Attempt(1, "held", "Later")}


@pytest.mark.anyio
async def test_a_failed_drop_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    group, store = group_of(["a", "b", "c"]), Told(3)
    async with started(keeping(GroupSource(group, "a"), Failing(), MemoryAttempts())) as run:
        await until(lambda: group.unfinished == 0)
        await run.stop()
    store.fails = {"drop": OSError("the store is gone")}
    # A process died between its commit and the drop.
    async with started(keeping(GroupSource(group, "a"), Failing(), store)) as run:
        await until(lambda: store.writes == [("drop", [0, 1, 2])])
        await turns()
        assert place(store).keys() == {0, 1, 2}
        store.fails.clear()
        await until(lambda: store.kept() == {})
        await run.stop()
    assert store.writes == [("drop", [0, 1, 2])] * 2
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        (
            "memory/a: attempts of memory/0 position 0 and 2 more are not dropped (OSError, the store is gone); the "
            "next call is in 0.2 s"
        )
    ]


@pytest.mark.anyio
async def test_a_failure_that_cannot_be_written_does_not_delay_others() -> None:
    count = _WRITERS + 1
    broker, store = published(*(f"k{number}" for number in range(count + 1))), Told(1)
    store.fails = {"keep": OSError("not these")}
    handler = Failing(*range(1, count + 1))
    consumer = keeping(MemorySource(broker), handler, store, concurrency=count + 1)
    async with started(consumer):
        await until(lambda: len(handler.calls) == count + 1)
        await until(lambda: store.kept() == {})
        assert broker.acked() == [0]


def test_a_full_call_of_drops_does_not_wait_for_failures() -> None:
    entries, failed = _Entries(), _Entry()
    entries.put(0, failed)
    for position in range(1, _DROPS + 2):
        entry = _Entry()
        entry.drop = True
        entries.put(position, entry)
    assert list(entries.take()) == list(range(1, _DROPS + 1))
    assert entries.take() == {0: failed}
    assert list(entries.take()) == [_DROPS + 1]
    assert entries.take() == {}


def test_an_entry_of_the_store_of_attempts_is_queued_once() -> None:
    entries, entry = _Entries(), _Entry()
    for drop in (False, True, False, True):
        entry.drop = drop
        entries.put(0, entry)
        assert (len(entries.urgent), len(entries.waiting)) == ((0, 1) if drop else (1, 0))
    assert entries.take() == {0: entry}
    assert entries.take() == {}


@pytest.mark.anyio
async def test_a_blocked_message_has_no_dead_letter_until_it_is_parked() -> None:
    """The message was blocked under ``block``, and the policy is ``block_and_dlq`` now."""
    broker, store, handler = published("a", "a"), MemoryAttempts(), Failing(0)
    async with started(keeping(MemorySource(broker), handler, store, attempts=1, poison="block")) as run:
        await until(lambda: place(store) == {0: Attempt(1, "blocked", "ValueError")})
        await run.stop()
    dead_letters = MemoryDeadLetters(broker)
    consumer = keeping(
        MemorySource(broker), handler, store, attempts=1, poison="block_and_dlq", dead_letters=dead_letters
    )
    async with started(consumer) as run:
        await until(lambda: consumer.ready and consumer.status().blocked == 1)
        await turns()
        assert (handler.calls, broker.dead_letters) == ([(0, 1)], [])
        assert consumer.park("a") == 1
        await until(lambda: broker.acked() == [0, 1] and store.kept() == {})
        await run.stop()
    assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]
