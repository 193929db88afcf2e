"""The messages that a log keeps for its slowest subscription: gauge, alarm, and the trim that ends it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from lanes import Consumer, Message, Settings
from lanes.errors import ConfigError
from lanes.ownership import State, StateKey
from lanes_postgres import PostgresSource, PostgresStates, migrate
from lanes_postgres.cli.retention import trim
from lanes_postgres.cli.subscriptions import drop_subscription, list_subscriptions
from lanes_postgres.subscription import kept
from memsource.memory.states import MemoryStates
from tests.components import PostgresServer
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import Seen, consuming, member, suffix, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_EVERY", 0.0)


def keeps(consumer: Consumer, subscription: str, messages: int) -> bool:
    found = consumer.status().kept
    return found is not None and (found.log, found.subscription, found.messages) == ("orders", subscription, messages)


async def test_the_slowest_subscription_is_named_with_the_bytes_that_it_keeps(
    four: Logs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes.postgres")
    four.commit("x")
    assert await suffix(four, 1, subscription="mail") == ["x"]
    for number in range(40):
        four.commit("x" * 1_000, key=str(number))
    seen = Seen()
    async with consuming(member(four, kept_limit=20_000), seen) as consumer:
        await until(lambda: len(seen.values) == 41 and keeps(consumer, "mail", 40))
        found = consumer.status().kept
        # Rows have columns beside the value.
        assert found is not None and 40_000 < found.bytes < 60_000 and found.limit == 20_000
        (finding,) = consumer.health().findings
        assert finding.startswith("log 'orders' keeps about ")
        assert "(40 messages) for its slowest subscription 'mail', above kept_limit=20,000; start more" in finding
        assert "`lanes postgres subscriptions drop mail --log orders`" in finding
        assert len([each for each in caplog.messages if "keeps about" in each]) == 1
        async with await psycopg.AsyncConnection.connect(four.url, autocommit=True) as connection:
            assert await trim(connection, four.schema, "orders", age=0.0, force=False) == 1
            await drop_subscription(connection, four.schema, "orders", "mail", force=True)
        await until(lambda: keeps(consumer, "billing", 0))
        assert consumer.health().findings == ()
        assert any("keeps less than 20000 bytes again" in each for each in caplog.messages)


async def test_deleted_messages_are_not_kept(logs: Logs) -> None:
    for _ in range(5):
        logs.commit("x", "x")
    blocked = anyio.Event()

    async def handler(message: Message) -> None:
        await blocked.wait()

    async with consuming(member(logs, out_of_range="earliest"), handler, settings=Settings(concurrency=1)) as consumer:
        await until(lambda: keeps(consumer, "billing", 10))
        async with await psycopg.AsyncConnection.connect(logs.url, autocommit=True) as connection:
            assert await trim(connection, logs.schema, "orders", age=0.0, force=True) == 8
        await until(lambda: keeps(consumer, "billing", 2))
        blocked.set()


async def test_the_command_of_the_alarm_is_one_for_a_shell(postgres: PostgresServer, schema: str) -> None:
    logs = Logs.make(postgres, schema, name="o'r$(ders)")
    logs.commit("x")
    async with consuming(
        member(logs, "-a b; rm", kept_limit=1, start="beginning"), never, settings=Settings(drain_timeout=0.1)
    ) as consumer:
        await until(lambda: consumer.health().findings)
        (finding,) = consumer.health().findings
    command = finding.split("`")[1]
    assert shlex.split(command)[4:] == ["--log", logs.log.name, "--", "-a b; rm"]


async def test_positions_in_a_store_of_the_user_raise_no_false_alarm(four: Logs) -> None:
    """Only the members of their subscription know them. The commands of an operator say so."""
    for number in range(8):
        four.commit("x", key=str(number))
    states, seen = MemoryStates(), Seen()
    async with consuming(member(four, "own", states=states), seen) as consumer:
        await until(lambda: len(seen.values) == 8 and keeps(consumer, "own", 0))
        blocked = member(four, "mail")
        async with consuming(blocked, never, settings=Settings(drain_timeout=0.1)) as other:
            # The other subscription has more than this one, which it does not know.
            await until(lambda: keeps(other, "mail", 8))
        await until(lambda: keeps(consumer, "mail", 8))
        async with await psycopg.AsyncConnection.connect(four.url, autocommit=True) as connection:
            await drop_subscription(connection, four.schema, "orders", "mail", force=True)
            assert [each.lag for each in await list_subscriptions(connection, four.schema)] == [None]
            with pytest.raises(
                ConfigError,
                match=r"subscription 'own' .* positions in a store of its own.*Add --without with its name",
            ):
                await trim(connection, four.schema, "orders", age=0.0, force=False)
    # A start with the store of the schema makes the positions known again.
    async with consuming(member(four, "own"), Seen()) as consumer:
        await until(lambda: keeps(consumer, "own", 0))


async def test_positions_of_postgres_states_beside_the_log_are_known(four: Logs, schema: str) -> None:
    """The same tables as without ``states=``. The tables of another schema or another database are unknown."""
    with psycopg.connect(four.url, autocommit=True) as setup:
        setup.execute(f"CREATE DATABASE other_{schema}")
    url = four.url.replace("/postgres", f"/other_{schema}")
    for address, name in ((four.url, f"{schema}_2"), (url, schema)):
        with psycopg.connect(address) as setup:
            migrate(setup, schema=name)
    for number in range(8):
        four.commit("x", key=str(number))
    places = {"beside": (four.url, schema), "schema": (four.url, f"{schema}_2"), "other": (url, schema)}
    for subscription, (address, name) in places.items():
        async with AsyncConnectionPool(address, min_size=1, kwargs={"autocommit": True}, open=False) as pool:
            states = PostgresStates(pool.connection, schema=name)
            seen = Seen()
            async with consuming(member(four, subscription, states=states), seen):
                await until(lambda: len(seen.values) == 8)  # noqa: B023 (the loop waits for it)
    async with await psycopg.AsyncConnection.connect(four.url, autocommit=True) as connection:
        lags = {each.name: each.lag for each in await list_subscriptions(connection, four.schema)}
    assert lags == {"beside": 0, "schema": None, "other": None}
    with psycopg.connect(four.url, autocommit=True) as setup:
        setup.execute(f"DROP DATABASE other_{schema}")
        setup.execute(f"DROP SCHEMA {schema}_2 CASCADE")


class Faulty(MemoryStates):
    """Positions whose reads wait for an event, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.go_on: anyio.Event | None = None
        self.error: Exception | None = None

    async def read(self, keys: Sequence[StateKey]) -> Mapping[StateKey, State]:
        self.reads += 1
        if self.go_on is not None:
            await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().read(keys)


async def test_a_store_of_the_user_whose_reads_hang_or_fail_delays_no_message(
    four: Logs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, seen = Faulty(), Seen()

    async def reads(number: int) -> None:
        number += states.reads
        await until(lambda: states.reads >= number)

    async with consuming(member(four, "own", states=states, poll_interval=0.01), seen) as consumer:
        await until(lambda: keeps(consumer, "own", 0))
        states.go_on = anyio.Event()
        await reads(1)
        before = states.reads
        for number in range(8):
            four.commit("x", key=str(number))
        await until(lambda: len(seen.values) == 8)
        # The messages have passed a read that has not ended.
        assert states.reads == before and keeps(consumer, "own", 0)
        states.go_on.set()
        states.go_on = None
        await reads(2)
        await until(lambda: keeps(consumer, "own", 0))
        monkeypatch.setattr(kept, "_READ_FOR", 0.01)
        states.go_on = anyio.Event()
        await reads(3)
        (line,) = [each for each in caplog.messages if "states=" in each]
        said = "so the source does not count the kept bytes of log orders; check the store: TimeoutError"
        assert line.endswith(f"a read of the store states= failed, {said}")
        assert keeps(consumer, "own", 0)
        monkeypatch.setattr(kept, "_READ_FOR", 60.0)
        states.go_on = None
        await reads(3)
        states.error = OSError("away")
        await reads(3)
        assert [each.rpartition(": ")[2] for each in caplog.messages if "states=" in each] == ["TimeoutError", "away"]
        # A consumer ends also while its store reads.
        states.go_on = anyio.Event()
        await reads(1)


async def never(message: Message) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1"])
def test_an_invalid_limit_is_refused(logs: Logs, limit: Any) -> None:
    with pytest.raises(ConfigError, match="kept_limit="):
        PostgresSource(logs.url, logs.log, subscription="billing", kept_limit=limit)
