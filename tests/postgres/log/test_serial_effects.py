"""``Positions(by="partition")`` moves the position of a subscription in the transaction of the effect."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import psycopg
import pytest

from lanes import Consumer, HandlerHalted, Message, Retry, Settings
from lanes.core.types import WHOLE_PARTITION, Partition, PartitionId
from lanes.dead_letters.box import message_of
from lanes.errors import ConfigError
from lanes.ownership import Fenced, State, StateChange, StateKey, StateLocked
from lanes_postgres import Positions, PostgresStates
from lanes_postgres.log.reading import READER
from memsource import MemoryBroker, MemorySource
from tests.fakes.dead_letters import dead_letter
from tests.fakes.grouped import ONCE
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import consuming, member, until

pytestmark = pytest.mark.anyio

SERIAL = Settings(order="serial", retry=Retry(attempts=20, backoff=0.01, max_backoff=0.05))


class Effects:
    """A table with one row for each effect, in the schema of a log."""

    def __init__(self, logs: Logs) -> None:
        self.logs = logs
        self.positions = Positions("billing", schema=logs.schema, by="partition")
        logs.execute("CREATE TABLE {}.effects (id serial, value text)")

    async def add(self, connection: psycopg.AsyncConnection[Any], message: Message) -> None:
        query = self.logs.query("INSERT INTO {}.effects (value) VALUES (%s)")
        await connection.execute(query, (message.value.decode(),))

    def all(self) -> list[str]:
        return [value for (value,) in self.logs.execute("SELECT value FROM {}.effects ORDER BY id")]

    def floors(self) -> list[tuple[int, str]]:
        return self.logs.execute("SELECT floor, completed::text FROM {}.lanes_states")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(self.logs.url) as connection:
            yield connection

    async def pay(self, message: Message) -> None:
        async with self.connection() as connection, self.positions.once(connection, message) as fresh:
            if fresh:
                await self.add(connection, message)


@pytest.fixture
def effects(logs: Logs) -> Effects:
    return Effects(logs)


async def claimed(logs: Logs, start: int = 0) -> tuple[PostgresStates, StateKey, Partition]:
    """Acquire the partition as a member does, and return its assignment."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(logs.url) as connection:
            yield connection

    states = PostgresStates(connect, schema=logs.schema)
    ((incarnation,),) = logs.execute("SELECT incarnation FROM {}.lanes_logs")
    key = StateKey("billing", PartitionId("orders", 0), incarnation)
    state = await states.claim(key, start)
    return states, key, Partition(key.partition, READER, incarnation, fencing_token=state.epoch)


def serial(partition: Partition, position: int) -> Message:
    message = Message(partition, position, b"k", 1, None, None)
    message.lane = WHOLE_PARTITION
    return message


async def test_each_effect_happens_once_although_handlers_fail_after_the_commit(logs: Logs, effects: Effects) -> None:
    logs.commit(*(str(number) for number in range(12)))
    calls: list[str] = []

    async def handler(message: Message) -> None:
        await effects.pay(message)
        calls.append(message.value.decode())
        if message.attempt == 1:
            raise RuntimeError("the answer to the COMMIT was lost")

    async with consuming(member(logs), handler, settings=SERIAL):
        await until(lambda: len(calls) == 24)
    assert effects.all() == [str(number) for number in range(12)]
    assert effects.floors() == [(12, "{}")]


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_batch_has_each_effect_once(logs: Logs, effects: Effects, blocking: bool) -> None:
    logs.commit(*(str(number) for number in range(30)))
    done: list[int] = []

    async def batches(messages: list[Message]) -> None:
        async with effects.connection() as connection, effects.positions.once_all(connection, messages) as fresh:
            for each in fresh:
                await effects.add(connection, each)
        fail(messages)

    def blocking_batches(messages: list[Message]) -> None:
        with logs.connect() as connection, effects.positions.once_all(connection, messages) as fresh:
            for each in fresh:
                connection.execute(logs.query("INSERT INTO {}.effects (value) VALUES (%s)"), (each.value.decode(),))
        fail(messages)

    def fail(messages: Sequence[Message]) -> None:
        if messages[0].attempt == 1:
            raise RuntimeError("the answer to the COMMIT was lost")
        done.extend(each.position for each in messages)

    settings = Settings(order="serial", batch=8, retry=SERIAL.retry)
    async with consuming(member(logs), blocking_batches if blocking else batches, settings=settings):
        await until(lambda: len(done) == 30)
    assert effects.all() == [str(number) for number in range(30)]
    assert effects.floors() == [(30, "{}")]


async def test_ack_in_client_transaction(logs: Logs, effects: Effects) -> None:
    """A rolled-back transaction leaves neither effect nor position."""
    logs.commit("1", "2")

    async def broken(message: Message) -> None:
        async with effects.connection() as connection, effects.positions.once(connection, message) as fresh:
            assert fresh
            await effects.add(connection, message)
            raise ValueError

    consumer = Consumer(member(logs), broken, settings=Settings(order="serial", poison="exit", retry=ONCE))
    with pytest.raises(HandlerHalted):
        await consumer.run()
    assert effects.all() == [] and effects.floors() == [(0, "{}")]
    async with consuming(member(logs), effects.pay, settings=SERIAL):
        await until(lambda: len(effects.all()) == 2)
    assert effects.all() == ["1", "2"]


async def test_the_position_is_stored_with_the_effect_and_not_later(logs: Logs, effects: Effects) -> None:
    """The next owner continues after the last effect, although the former one stored nothing else."""
    logs.commit("1", "2", "3")
    _, _, partition = await claimed(logs)
    for position in range(2):
        async with effects.connection() as connection:
            assert await effects.positions.claim(connection, serial(partition, position))
    assert effects.floors() == [(2, "{}")]
    async with consuming(member(logs), effects.pay, settings=SERIAL):
        await until(effects.all)
    assert effects.all() == ["3"]


async def test_a_former_owner_is_refused_and_its_effect_rolls_back(logs: Logs, effects: Effects) -> None:
    states, key, partition = await claimed(logs)
    await states.claim(key, 0)
    for claim in (effects.positions.claim, _one_of_a_batch(effects)):
        async with effects.connection() as connection:
            with pytest.raises(Fenced, match="another process handles the message"):
                await claim(connection, serial(partition, 0))
    assert effects.floors() == [(0, "{}")]


def _one_of_a_batch(effects: Effects) -> Any:
    async def claim(connection: psycopg.AsyncConnection[Any], message: Message) -> bool:
        return bool(await effects.positions.claim_all(connection, [message]))

    return claim


async def test_the_next_owner_comes_after_the_open_transaction(logs: Logs, effects: Effects) -> None:
    states, key, partition = await claimed(logs)
    async with effects.connection() as connection:
        assert await effects.positions.claim(connection, serial(partition, 0))
        for _ in range(2):
            with pytest.raises(StateLocked, match="a transaction holds the row of orders/0 of 'billing'"):
                await states.claim(key, 0)
        await connection.commit()
    assert (await states.claim(key, 0)).floor == 1


async def test_a_stored_position_needs_no_lock_of_an_open_transaction(logs: Logs, effects: Effects) -> None:
    """The lazy commit of message 0 does not wait for the handler of message 1."""
    states, key, partition = await claimed(logs)
    async with effects.connection() as connection:
        assert await effects.positions.claim(connection, serial(partition, 0))
    async with effects.connection() as connection:
        assert await effects.positions.claim(connection, serial(partition, 1))
        with anyio.fail_after(5):
            assert await states.store([StateChange(key, State(partition.epoch, 1, ()))]) == [True]


async def test_positions_that_another_order_completed_are_skipped(logs: Logs, effects: Effects) -> None:
    states, key, partition = await claimed(logs)
    state = State(partition.epoch, 2, [(4, 6), (9, 10)])
    assert await states.store([StateChange(key, state)]) == [True]
    for position, fresh, floors in (
        (1, False, (2, "{4,6,9,10}")),
        (2, True, (3, "{4,6,9,10}")),
        (5, False, (3, "{4,6,9,10}")),
        (3, True, (6, "{9,10}")),
        (6, True, (7, "{9,10}")),
    ):
        async with effects.connection() as connection:
            assert await effects.positions.claim(connection, serial(partition, position)) is fresh
        assert effects.floors() == [floors]


async def test_a_replayed_dead_letter_has_its_effect_once(logs: Logs, effects: Effects) -> None:
    _, _, partition = await claimed(logs, start=5)
    stored = dead_letter(source="orders", partition=0, incarnation=partition.incarnation)
    letter = message_of(dataclasses.replace(stored, position=3))
    found = []
    for _ in range(2):
        async with effects.connection() as connection:
            found.append(await effects.positions.claim(connection, letter))
        async with effects.connection() as connection:
            found += [bool(each) for each in await effects.positions.claim_all(connection, [letter])]
    assert found == [True, False]
    assert effects.floors() == [(5, "{}")]


async def test_an_order_by_key_is_refused(logs: Logs, effects: Effects) -> None:
    logs.commit("1")
    with pytest.raises(ConfigError, match='would pass unfinished messages of other keys; use order="serial"'):
        await Consumer(member(logs), effects.pay).run()
    with pytest.raises(ConfigError, match='would pass unfinished messages of other keys; use order="serial"'):
        await Consumer(member(logs), effects.pay, settings=Settings(lanes=4)).run()
    assert effects.floors() == [(0, "{}")]


async def test_another_subscription_and_another_source_are_refused(logs: Logs, effects: Effects) -> None:
    logs.commit("1")
    with pytest.raises(ConfigError, match="no position of orders/0 is stored"):
        await Consumer(member(logs, "mail"), effects.pay, settings=SERIAL).run()
    broker = MemoryBroker()
    broker.publish("1", key="k")
    with pytest.raises(ConfigError, match=r'has no epoch, and .* use by="key" on another source'):
        await Consumer(MemorySource(broker), effects.pay, settings=SERIAL).run()
    assert effects.all() == []


async def test_a_thread_has_each_effect_once(logs: Logs, effects: Effects) -> None:
    logs.commit("1", "2", "3")

    def pay(message: Message) -> None:
        with logs.connect() as connection, effects.positions.once(connection, message) as fresh:
            if fresh:
                query = logs.query("INSERT INTO {}.effects (value) VALUES (%s)")
                connection.execute(query, (message.value.decode(),))
        if message.attempt == 1:
            raise RuntimeError("the answer to the COMMIT was lost")

    async with consuming(member(logs), pay, settings=SERIAL):
        await until(lambda: effects.floors() == [(3, "{}")])
    assert effects.all() == ["1", "2", "3"]
