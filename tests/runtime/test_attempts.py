"""Attempts in a store: the next owner continues to count, and a hold lasts until its failure is stored."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from lanes import Attempt, ConfigError, ContractError, HandlerHalted, History, Message, Partition, Term
from memsource import Group, GroupSource, MemoryAttempts, MemoryBroker, MemoryDeadLetters, MemorySource, read
from tests.fakes.attempts import HERE, Failing, Later, keeping, place
from tests.fakes.grouped import group_of
from tests.fakes.support import deliver_beside_the_assignment, published, started, turns, until
from tests.fakes.threaded import assert_kept

pytestmark = pytest.mark.anyio


class Store(MemoryAttempts):
    """A store whose calls wait until ``open`` is set, or raise the error in ``fails``."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.open = anyio.Event()
        self.open.set()
        self.fails: dict[str, Exception] = {}
        self.asked: defaultdict[str, int] = defaultdict(int)

    async def _wait(self, what: str, seconds: float) -> None:
        self.asked[what] += 1
        await self.open.wait()
        await anyio.lowlevel.checkpoint()
        if what in self.fails:
            raise self.fails[what]


@pytest.fixture(params=["acks", "commits"])
def broker(request: pytest.FixtureRequest) -> Any:
    """Messages 0, 1, 2 of the keys a, b, a, on a source that acknowledges and on a source that commits."""
    keys = ("a", "b", "a")
    return published(*keys) if request.param == "acks" else group_of(keys)


def source_of(broker: MemoryBroker | Group) -> Any:
    return GroupSource(broker, "a") if isinstance(broker, Group) else MemorySource(broker)


async def test_a_handover_continues_the_attempts(broker: Any, tmp_path: Path) -> None:
    store = MemoryAttempts()
    handler = Failing(0, error=Later)
    consumer = keeping(source_of(broker), handler, store, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: handler.attempts(0) == [1] and place(store) == {0: Attempt(1, "held", "Later")})
        assert await run.stop() is None
    handler.poison.clear()
    consumer = keeping(source_of(broker), handler, store, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: handler.calls[-1] == (2, 1) and store.kept() == {})
        assert await run.stop() is None
    assert handler.attempts(0) == [1, 2]
    assert_kept(tmp_path)


async def test_the_attempts_of_all_owners_together_are_bounded(broker: Any, tmp_path: Path) -> None:
    store = MemoryAttempts()
    handler = Failing(0, error=Later)
    dead_letters = MemoryDeadLetters(broker if isinstance(broker, MemoryBroker) else MemoryBroker())
    for number in (1, 2, 3):
        history = History(tmp_path)
        consumer = keeping(source_of(broker), handler, store, dead_letters=dead_letters, history=history)
        async with started(consumer) as run:
            if number < 3:
                await until(lambda n=number: place(store) == {0: Attempt(n, "held", "Later")})  # type: ignore[misc]
            else:
                await until(lambda: handler.calls[-1] == (2, 1) and store.kept() == {})
            assert await run.stop() is None
    assert handler.attempts(0) == [1, 2, 3]
    (dead_letter,) = dead_letters.broker.dead_letters
    assert (dead_letter.position, dead_letter.attempts, dead_letter.error_type) == (0, 3, "Later")
    assert_kept(tmp_path)


async def test_the_next_owner_blocks_a_blocked_head_again_without_a_call(broker: Any, tmp_path: Path) -> None:
    store = MemoryAttempts()
    handler = Failing(0)
    for number in (1, 2):
        history = History(tmp_path)
        consumer = keeping(source_of(broker), handler, store, attempts=2, poison="block", history=history)
        async with started(consumer) as run:
            await until(lambda c=consumer: c.ready and c.status().blocked == 1 and (1, 1) in handler.calls)  # type: ignore[misc]
            await until(lambda: place(store) == {0: Attempt(2, "blocked", "ValueError")})
            await turns()
            assert handler.attempts(0) == [1, 2]
            if number == 2:
                handler.poison.clear()
                assert consumer.unblock("a") == 1
                await until(lambda: handler.calls[-1] == (2, 1) and store.kept() == {})
            assert await run.stop() is None
    assert handler.attempts(0) == [1, 2, 3]
    assert_kept(tmp_path)


async def test_the_next_owner_may_park_a_blocked_head(tmp_path: Path) -> None:
    broker, store, handler = published("a", "a"), MemoryAttempts(), Failing(0)
    dead_letters = MemoryDeadLetters(broker)
    for _ in range(2):
        consumer = keeping(
            MemorySource(broker), handler, store, attempts=1, poison="block_and_dlq", dead_letters=dead_letters
        )
        async with started(consumer) as run:
            await until(lambda c=consumer: c.ready and c.status().blocked == 1)  # type: ignore[misc]
            await until(lambda: place(store) == {0: Attempt(1, "blocked", "ValueError")})
            await run.stop()
    # Its first owner wrote the dead letter, and the next one did not.
    assert len(dead_letters.called("put")) == 1
    consumer = keeping(
        MemorySource(broker), handler, store, attempts=1, poison="block_and_dlq", dead_letters=dead_letters
    )
    async with started(consumer) as run:
        await until(lambda: consumer.ready and consumer.status().blocked == 1)
        assert consumer.park("a") == 1
        await until(lambda: broker.acked() == [0, 1] and store.kept() == {})
        await run.stop()
    assert handler.calls == [(0, 1), (1, 1)]
    assert dead_letters.broker.dead_letters[-1].error_type == "ValueError"


async def test_the_next_owner_writes_an_unconfirmed_dead_letter() -> None:
    broker, store, handler = published("a", "a"), MemoryAttempts(), Failing(0, error=Term)
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.block("put")
    consumer = keeping(MemorySource(broker), handler, store, dead_letters=dead_letters)
    async with started(consumer) as run:
        await until(lambda: place(store) == {0: Attempt(1, "parking", "Term")})
        await run.stop()
    dead_letters.unblock("put")
    assert broker.dead_letters == []
    async with started(keeping(MemorySource(broker), handler, store, dead_letters=dead_letters)) as run:
        await until(lambda: broker.acked() == [0, 1] and store.kept() == {})
        await run.stop()
    assert handler.calls == [(0, 1), (1, 1)]
    (dead_letter,) = broker.dead_letters
    assert (dead_letter.attempts, dead_letter.error_type) == (1, "Term")


async def test_each_start_gives_one_more_attempt_under_exit() -> None:
    broker, store, handler = published("a"), MemoryAttempts(), Failing(0)
    for _ in range(3):
        async with started(keeping(MemorySource(broker), handler, store, attempts=2, poison="exit")) as run:
            assert isinstance(await run.end(), HandlerHalted)
    assert handler.attempts(0) == [1, 2, 3, 4]
    handler.poison.clear()
    async with started(keeping(MemorySource(broker), handler, store, attempts=2, poison="exit")) as run:
        await until(lambda: broker.unfinished == 0 and store.kept() == {})
        await run.stop()
    assert handler.attempts(0)[-1] == 5


async def test_a_failure_during_a_drain_is_an_attempt(tmp_path: Path) -> None:
    broker, store = published("a", "a"), MemoryAttempts()
    go = anyio.Event()
    calls = []

    async def handler(message: Message) -> None:
        calls.append((message.position, message.attempt))
        if message.position == 0 and message.attempt < 3:
            await go.wait()
            raise ValueError("no")

    for number in (1, 2):
        history = History(tmp_path)
        async with started(keeping(MemorySource(broker), handler, store, poison="block", history=history)) as run:
            await until(lambda n=number: len(calls) == n)  # type: ignore[misc]
            run.consumer.stop()
            go.set()
            assert await run.end() is None
        go = anyio.Event()
        assert place(store) == {0: Attempt(number, "held", "ValueError")}
    history = History(tmp_path)
    async with started(keeping(MemorySource(broker), handler, store, poison="block", history=history)) as run:
        await until(lambda: broker.unfinished == 0 and store.kept() == {})
        await run.stop()
    assert calls == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert_kept(tmp_path)


@pytest.mark.parametrize("beside", [False, True], ids=["waits", "comes beside its assignment"])
async def test_no_handler_starts_before_the_attempts_are_loaded(
    broker: Any, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages put aside meanwhile are in flight and keep their order."""
    store, handler, source = Store(), Failing(), source_of(broker)
    store.open = anyio.Event()
    if beside:
        deliver_beside_the_assignment(source, monkeypatch)
    async with started(keeping(source, handler, store, max_in_flight=4)) as run:
        await until(lambda: store.asked["load attempts"] == 1)
        await turns()
        assert handler.calls == []
        room = source.called("receive")[-1].room
        assert room is not None and room.messages == (1 if beside else 4)
        assert [one.id for one in room.paused] == [HERE]
        store.open.set()
        await until(lambda: len(handler.calls) == 3)
        assert handler.calls.index((0, 1)) < handler.calls.index((2, 1))
        await turns()
        assert source.called("receive")[-1].room.paused == frozenset()
        assert await run.stop() is None


async def test_a_long_wait_for_the_store_is_unhealthy(broker: Any) -> None:
    store = Store()
    store.open = anyio.Event()
    consumer = keeping(source_of(broker), Failing(), store, unhealthy_after=0.2)
    async with started(consumer) as run:
        await until(lambda: store.asked["load attempts"] == 1)
        await until(lambda: not consumer.healthy)
        (reason,) = consumer.health().reasons
        assert re.match(
            r"1 partition\(s\) wait for the store of their attempts, the first: memory/0, for \d+\.\d", reason
        )
        store.open.set()
        await until(lambda: consumer.healthy)
        assert await run.stop() is None


async def test_a_partition_that_is_loading_is_released_at_once(broker: Any) -> None:
    store = Store()
    store.open = anyio.Event()
    handler = Failing()
    async with started(keeping(source_of(broker), handler, store, drain_timeout=60.0)) as run:
        await until(lambda: store.asked["load attempts"] == 1)
        assert await run.stop() is None
    assert handler.calls == []
    store.open.set()
    async with started(keeping(source_of(broker), handler, store)) as run:
        await until(lambda: len(handler.calls) == 3)
        await run.stop()


async def test_a_partition_does_not_wait_for_the_attempts_of_another() -> None:
    broker = published("a", "b", "c", "d", "e", "f", partitions=2)
    handled = []

    class Half(MemoryAttempts):
        async def load(self, partition: Partition) -> Mapping[int, Attempt]:
            if partition.id.number == 1:
                raise OSError("not yet")
            return await super().load(partition)

    async def handler(message: Message) -> None:
        handled.append(message.partition.id.number)

    of_the_other = broker.waiting(1)
    async with started(keeping(MemorySource(broker), handler, Half())) as run:
        await until(lambda: len(handled) == 6 - of_the_other)
        await turns()
        assert set(handled) == {0} and 0 < of_the_other < 6
        assert await run.stop() is None


async def test_a_hold_lasts_until_its_failure_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    broker, store, handler = published("a", "b", "a"), Store(), Failing(0)
    store.fails = {"keep an attempt": OSError("the store is gone")}
    async with started(keeping(MemorySource(broker), handler, store)) as run:
        await until(lambda: store.asked["keep an attempt"] == 1 and broker.acked() == [1])
        await turns(200)
        assert handler.calls == [(0, 1), (1, 1)], "the lane waits, and other lanes continue"
        handler.poison.clear()
        store.fails.clear()
        await until(lambda: broker.unfinished == 0 and store.kept() == {})
        assert handler.calls == [(0, 1), (1, 1), (0, 2), (2, 1)]
        await run.stop()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.pop(0).startswith("memory: Failing failed at memory/0 position 0 with ValueError, attempt 1; ")
    line = (
        "memory: attempts of memory/0 position 0 are not stored (OSError, the store is gone); the next call is in 0.2 s"
    )
    assert said == [line]


@pytest.mark.parametrize("call", ["load attempts", "keep an attempt"])
async def test_a_store_that_refuses_for_good_stops_the_consumer_in_order(call: str) -> None:
    broker, store, handler = published("a", "b"), Store(), Failing(0)
    error = ConfigError("there are no tables: make them")
    store.fails = {call: error}
    async with started(keeping(MemorySource(broker), handler, store)) as run:
        assert await run.end() is error
    assert handler.attempts(0) == ([] if call == "load attempts" else [1])
    assert 0 not in broker.acked()


async def test_entries_of_finished_messages_are_dropped_without_a_call() -> None:
    """A process died between its commit and the drop."""
    group = group_of(["a", "b", "a"])
    store = MemoryAttempts()
    async with started(keeping(GroupSource(group, "a"), Failing(), MemoryAttempts())) as run:
        await until(lambda: group.unfinished == 0)
        await run.stop()
    store._rows[HERE, ""] = {0: (Attempt(4, "held", "E"), 0)}
    async with started(keeping(GroupSource(group, "a"), Failing(), store)) as run:
        await until(lambda: store.kept() == {})
        await run.stop()


async def test_entries_above_the_floor_are_dropped_only_for_finished_messages() -> None:
    keys = ["a", "b", "c", "a", "b"]
    group, store = group_of([*keys, "c"]), MemoryAttempts()
    async with started(keeping(GroupSource(group, "a"), Failing(0, 5, error=Later), MemoryAttempts())) as run:
        await until(lambda: group.unfinished == 3)
        await run.stop()
    store._rows[HERE, ""] = {position: (Attempt(1, "held", "E"), 0) for position in range(6)}
    async with started(keeping(GroupSource(group, "a"), Failing(0, 3, 5, error=Later), store)) as run:
        await until(lambda: place(store).keys() == {0, 3, 5} and place(store)[5].attempts == 2)
        await run.stop()


async def test_no_kind_of_handler_is_called_for_a_message_given_up_before(tmp_path: Path) -> None:
    for kind in ("batch", "threads"):
        broker, store = published("a", "b", "a", "c"), MemoryAttempts()
        store._rows[HERE, ""] = {0: (Attempt(3, "blocked", "E"), 0), 1: (Attempt(1, "held", "E"), 0)}
        calls: list[tuple[int, int]] = []

        def one(message: Message, calls: list[tuple[int, int]] = calls) -> None:
            calls.append((message.position, message.attempt))

        async def many(messages: Sequence[Message], calls: list[tuple[int, int]] = calls) -> None:
            calls.extend((message.position, message.attempt) for message in messages)

        handler, more = (many, {"batch": 4}) if kind == "batch" else (one, {})
        history = History(tmp_path)
        consumer = keeping(MemorySource(broker), handler, store, poison="block", history=history, **more)
        async with started(consumer) as run:
            await until(lambda b=broker: b.acked() == [1, 3])  # type: ignore[misc]
            assert sorted(calls) == [(1, 2), (3, 1)]
            await until(lambda c=consumer: c.status().blocked == 1)  # type: ignore[misc]
            assert consumer.unblock("a") == 1
            await until(lambda b=broker, s=store: b.unfinished == 0 and s.kept() == {})  # type: ignore[misc]
            assert sorted(calls) == [(0, 4), (1, 2), (2, 1), (3, 1)]
            await run.stop()
    rows = [row for segment in read([tmp_path]) for row in segment.rows]
    assert len([row for row in rows if row.event == "started"]) == len([row for row in rows if row.event == "ended"])
    assert_kept(tmp_path)


class Damaged(MemoryAttempts):
    """A store that returns any object."""

    def __init__(self, found: object) -> None:
        super().__init__()
        self.found: Any = found

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        found: Mapping[int, Attempt] = self.found
        return found


def damaged(attempts: Any = 1, state: Any = "held", error_type: Any = "E") -> dict[int, Attempt]:
    """Two entries, the second one damaged."""
    return {0: Attempt(1, "held", "E"), 1: Attempt(attempts, state, error_type)}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (damaged(0), "attempts=0, which is no whole number from 1 to 2147483646,"),
        (damaged(-(10**9)), "attempts=-1000000000, which is no whole number from 1 to 2147483646,"),
        (damaged(2**31 - 1), "attempts=2147483647, which is no whole number from 1 to 2147483646,"),
        (damaged(1 << 100_000), "attempts=a number of 100001 bits, which is no whole number"),
        (damaged(1.5), "attempts=1.5, which is no whole number"),
        (damaged(True), "attempts=True, which is no whole number"),
        (damaged("3" * 10_000), f"attempts='{'3' * 99}…, which is no whole number"),
        (damaged(None), "attempts=None, which is no whole number"),
        (damaged(state="lost\n"), "state='lost\\n', which is none of held, blocked, parking,"),
        (damaged(state=["held"]), "state=['held'], which is none of held, blocked, parking,"),
        (damaged(error_type=b"E"), "error_type=a bytes, which is no text,"),
        ({0: Attempt(1, "held", "E"), 1: (1, "held", "E")}, "a tuple in place of an Attempt"),
        ({0: Attempt(1, "held", "E"), 1: None}, "None in place of an Attempt"),
    ],
)
async def test_a_damaged_entry_of_a_store_stops_the_consumer(broker: Any, found: object, fault: str) -> None:
    handler = Failing()
    async with started(keeping(source_of(broker), handler, Damaged(found))) as run:
        ended = await run.end()
    assert isinstance(ended, ContractError)
    assert f"the store of attempts returned {fault}" in str(ended)
    assert str(ended).endswith(" for memory/0 position 1; correct or delete this entry of the store")
    assert handler.calls == []


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (None, "None for memory/0; return a mapping of positions to Attempt"),
        ([(0, Attempt(1, "held", "E"))], "a list for memory/0; return a mapping of positions to Attempt"),
        ({"0": Attempt(1, "held", "E")}, "the position '0' for memory/0; a position is a whole number from 0"),
        ({-1: Attempt(1, "held", "E")}, "the position -1 for memory/0; a position is a whole number from 0"),
    ],
)
async def test_a_store_that_returns_no_entries_by_position_stops_the_consumer(
    broker: Any, found: object, fault: str
) -> None:
    handler = Failing()
    async with started(keeping(source_of(broker), handler, Damaged(found))) as run:
        ended = await run.end()
    assert isinstance(ended, ContractError) and f"the store of attempts returned {fault}" in str(ended)
    assert handler.calls == []


async def test_the_highest_number_of_attempts_of_a_store_continues(broker: Any) -> None:
    store, handler = MemoryAttempts(), Failing()
    store._rows[HERE, ""] = {0: (Attempt(2**31 - 2, "held", "E"), 0)}
    async with started(keeping(source_of(broker), handler, store)) as run:
        await until(lambda: len(handler.calls) == 3 and store.kept() == {})
        assert await run.stop() is None
    assert handler.attempts(0) == [2**31 - 1]


async def test_a_finite_source_ends_after_the_messages_put_aside() -> None:
    broker, store, handler = published("a", "b", "a"), Store(), Failing()
    store.open = anyio.Event()
    source = MemorySource(broker)
    source.finish()
    async with started(keeping(source, handler, store)) as run:
        await until(lambda: store.asked["load attempts"] == 1)
        await turns()
        assert not run.ended.is_set()
        store.open.set()
        assert await run.end() is None
    assert broker.unfinished == 0


@pytest.mark.parametrize("how", ["revoke", "lose"])
async def test_a_partition_leaves_and_returns_while_it_loads(how: str) -> None:
    broker, store, handler = published("a", "b", "a"), Store(), Failing()
    store.open = anyio.Event()
    source = MemorySource(broker)
    async with started(keeping(source, handler, store)) as run:
        await until(lambda: store.asked["load attempts"] == 1)
        if how == "revoke":
            source.revoke(0)
            await until(lambda: source.owned == [])
        else:
            source.lose(0)
            broker.requeue(0)
        await turns()
        source.assign(0)
        await until(lambda: store.asked["load attempts"] == 2)
        store.open.set()
        await until(lambda: broker.unfinished == 0)
        assert sorted(handler.calls) == [(0, 1), (1, 1), (2, 1)]
        assert await run.stop() is None
