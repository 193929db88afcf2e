"""Traffic, failures, redeliveries and rebalances in any order: the history shows every promise kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import History, Message, Nak, SourceError, Term
from memsource import check, read
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.effort import runs
from tests.fakes.support import consumer_of, started, turns, until

PARTITIONS = 2
NUMBERS = st.integers(0, PARTITIONS - 1)

TRAFFIC = st.lists(
    st.tuples(st.sampled_from([b"hot", b"hot", b"a", b"b", None]), st.integers(0, 9)), min_size=5, max_size=50
)
"""Key and kind of every message; a part of them is published by each ``publish``, the rest at the end."""

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 20)),
        st.tuples(st.just("turns"), st.integers(1, 30)),
        st.tuples(st.just("redeliver"), NUMBERS, st.integers(0, 5)),
        st.tuples(st.just("revoke"), NUMBERS, st.sampled_from([0.0, 30.0])),
        st.tuples(st.just("lose"), NUMBERS),
        st.tuples(st.just("assign"), NUMBERS),
        st.tuples(st.just("settle fails"), st.integers(1, 3)),
        st.tuples(st.just("dead_letter fails"), st.integers(1, 3)),
        st.tuples(st.just("restart")),
    ),
    min_size=5,
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lanes.runtime.dead_lettering.DEAD_LETTER_RETRY", (0.0005, 0.001))
        patch.setattr("lanes.runtime.settle.SETTLE_RETRY", (0.0005, 0.001))
        yield


class World:
    """A broker, and consumers that run one after another."""

    def __init__(self, directory: str, concurrency: int, spare: int, traffic: list[tuple[bytes | None, int]]) -> None:
        self.broker = MemoryBroker(PARTITIONS)
        self.dead_letters = MemoryDeadLetters(self.broker)
        self._directory = directory
        self._concurrency = concurrency
        self._bound = concurrency + spare
        self._traffic = iter(traffic)
        self.publish(5)
        self.source: MemorySource
        self.revoked: set[int] = set()

    def publish(self, count: int | None = None) -> None:
        """Publish the next ``count`` messages; ``None`` = all of them."""
        for key, kind in islice(self._traffic, count):
            self.broker.publish(bytes([kind]), key=key)

    async def handle(self, message: Message) -> None:
        kind = message.value[0]
        for _ in range(kind % 4):
            await anyio.lowlevel.checkpoint()
        if kind == 7:
            raise Term("never")
        if kind == 8 and message.attempt < 3:
            raise Nak(delay=0.0)
        if kind == 9:
            try:
                await anyio.sleep(0.0005)
            except anyio.get_cancelled_exc_class():
                # A handler that ignores its cancellation for a while.
                with anyio.CancelScope(shield=True):
                    for _ in range(5):
                        await anyio.lowlevel.checkpoint()
                raise

    async def run(self, number: int, events: list[tuple[Any, ...]]) -> None:
        """Run one process through its events; the last one runs until every message is handled."""
        self.source = MemorySource(self.broker, batch=7)
        self.revoked.clear()
        consumer = consumer_of(
            self.source,
            self.handle,
            history=History(self._directory, member=f"member-{number}"),
            dead_letters=self.dead_letters,
            concurrency=self._concurrency,
            max_in_flight=self._bound,
            attempts=3,
            backoff=0.0005,
        )
        async with started(consumer) as run:
            await until(lambda: self.source.owned)
            while events:
                event = events.pop(0)
                if event == ("restart",):
                    assert await run.stop() is None
                    return
                await self.happen(*event)
            self.publish()
            await until(lambda: not self.revoked & set(self.source.owned))
            for partition in set(self.broker.partitions) - set(self.source.owned):
                self.source.assign(partition)
            await until(lambda: not self.broker.unfinished)
            assert await run.stop() is None

    async def happen(self, what: str, *details: Any) -> None:
        """Perform one event, if possible, shortly after the previous one."""
        source = self.source
        await turns(3)
        if what == "publish":
            self.publish(details[0])
        elif what == "turns":
            await turns(details[0])
        elif what == "settle fails":
            source.fail("settle", SourceError("not now", retryable=True), times=details[0])
        elif what == "dead_letter fails":
            self.dead_letters.fail("put", OSError("not now"), times=details[0])
        elif what == "redeliver" and details[0] in source.owned:
            partition, back = details
            delivered = sorted({*self.broker.acked(partition), *self.broker.unacked(partition)})
            source.redeliver(delivered[-1 - back :][:3], partition=partition)
        elif what == "revoke" and details[0] in source.owned and details[0] not in self.revoked:
            source.revoke(*details)
            self.revoked.add(details[0])
        elif what == "lose" and details[0] in source.owned and details[0] not in self.revoked:
            source.lose(*details)
        elif what == "assign" and details[0] not in source.owned:
            self.revoked.discard(details[0])
            source.assign(*details)


@pytest.mark.long
@pytest.mark.anyio
@settings(max_examples=runs(50))
@given(traffic=TRAFFIC, events=EVENTS, concurrency=st.integers(1, 5), spare=st.integers(0, 6))
async def test_any_schedule_keeps_every_promise(
    traffic: list[tuple[bytes | None, int]], events: list[tuple[Any, ...]], concurrency: int, spare: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(directory, concurrency, spare, traffic)
        # The last process ends when every message is handled, so at least one process has no restart.
        for number in range(events.count(("restart",)) + 1):
            await world.run(number, events)
        verdicts = check(read([directory]))
    assert events == []
    assert world.broker.unfinished == 0
    assert [(each.name, each.witnesses, each.reasons) for each in verdicts if each.status != "passed"] == []
