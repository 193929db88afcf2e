"""Serial order on a log of one partition: one message of the subscription at a time, also after a fault."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import psycopg
import pytest

from lanes import Consumer, Message, Retry, Settings
from lanes.errors import ConfigError
from lanes_postgres import PostgresAttempts, PostgresDeadLetters
from tests.components import PostgresServer, wait_until
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import consuming, member, until

pytestmark = pytest.mark.anyio

LEASE = 3.0
ONCE = Retry(attempts=1)
LINE = Settings(order="serial", poison="block_and_dlq", retry=ONCE)


async def test_serial_two_racing_consumes_only_one_gets_work(logs: Logs) -> None:
    """The members take turns after each message, so that they race for the line again and again."""
    for number in range(60):
        logs.commit(str(number))
    finished: list[tuple[int, str]] = []
    busy: list[int] = []
    consumers: list[Consumer] = []

    def handler_of(number: int) -> Callable[[Message], Any]:
        async def handler(message: Message) -> None:
            # Delivered and not settled, also before the first handler runs.
            busy.append(sum(1 for consumer in consumers if consumer.status().in_flight))
            await anyio.sleep(0.005)
            finished.append((number, message.value.decode()))

        return handler

    async with AsyncExitStack() as opened:
        for number in range(4):
            consuming_ = consuming(
                member(logs, time_budget=0.0), handler_of(number), settings=Settings(order="serial", concurrency=8)
            )
            consumers.append(await opened.enter_async_context(consuming_))
        await until(lambda: len(finished) >= 60)
    assert set(busy) == {1}
    assert [value for _, value in finished] == [str(number) for number in range(60)]
    assert len({number for number, _ in finished}) > 1, "the members took no turns, so there was no race"


async def test_serial_order_of_a_log_with_several_partitions_is_refused(four: Logs) -> None:
    consumer = Consumer(member(four), _nothing, settings=Settings(order="serial"))
    with pytest.raises(ConfigError, match=r"has 4 partitions; .* or a topic or log with one partition"):
        await consumer.run()


def test_serial_refuses_skip(logs: Logs) -> None:
    with pytest.raises(ConfigError, match='order="serial" with poison="skip"'):
        Consumer(member(logs), _nothing, settings=Settings(order="serial", poison="skip"))


async def test_block_and_dlq_stops_the_line_and_archives_the_message(logs: Logs) -> None:
    for value in ("first", "poison", "later"):
        logs.commit(value, key=value)
    handled: list[str] = []

    async def handler(message: Message) -> None:
        handled.append(message.value.decode())
        if handled.count("poison") == 1 and message.value == b"poison":
            raise ValueError("cannot be handled yet")

    dead_letters = PostgresDeadLetters(logs.url, "billing", schema=logs.schema)
    async with consuming(member(logs), handler, settings=LINE, dead_letters=dead_letters) as consumer:
        await until(lambda: consumer.status().blocked)
        await anyio.sleep(0.3)
        assert handled == ["first", "poison"]
        assert logs.execute("SELECT value FROM {}.lanes_dead_letters") == [(b"poison",)]
        assert consumer.unblock(b"poison") == 1
        await until(lambda: "later" in handled)
    assert handled == ["first", "poison", "poison", "later"]


async def test_unblock_resumes_head_with_attempts_kept(logs: Logs) -> None:
    """The attempts of a blocked head survive its consumer, and ``unblock`` adds one to them."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(logs.url) as connection:
            yield connection

    logs.commit("poison", "later")
    attempts: list[int] = []
    mended = False

    async def handler(message: Message) -> None:
        if message.value == b"poison":
            attempts.append(message.attempt)
            if not mended:
                raise ValueError("cannot be handled yet")

    settings = Settings(order="serial", poison="block", retry=Retry(attempts=2, backoff=0.01, max_backoff=0.01))
    for _ in range(2):
        store = PostgresAttempts(connect, "billing", schema=logs.schema)
        async with consuming(member(logs), handler, settings=settings, attempts=store) as consumer:
            await until(lambda: consumer.status().blocked)
    assert attempts == [1, 2]
    mended = True
    store = PostgresAttempts(connect, "billing", schema=logs.schema)
    async with consuming(member(logs), handler, settings=settings, attempts=store) as consumer:
        await until(lambda: consumer.status().blocked)
        consumer.unblock(b"k")
        await until(lambda: len(attempts) == 3)
    assert attempts == [1, 2, 3]


async def _nothing(message: Message) -> None:
    await anyio.lowlevel.checkpoint()


Members = dict[str, "subprocess.Popen[bytes]"]


@pytest.fixture
def line(postgres: PostgresServer, schema: str) -> Logs:
    logs = Logs.make(postgres, schema)
    logs.execute("CREATE TABLE {}.handled (id serial PRIMARY KEY, member text, value integer, what text)")
    return logs


@pytest.fixture
def members() -> Iterator[Members]:
    running: Members = {}
    yield running
    for each in running.values():
        each.kill()
        each.wait()


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_owner_of_the_line_is_succeeded(line: Logs, members: Members, fault: signal.Signals) -> None:
    """The successor starts after the lease at the latest, and the former owner never has a concurrent handler."""

    def begin(name: str) -> None:
        arguments = [line.url, line.schema, name, str(LEASE)]
        members[name] = subprocess.Popen([sys.executable, "-m", "tests.postgres.ring.serial_member", *arguments])

    def ended(name: str) -> int:
        count: int = line.execute(f"SELECT count(*) FROM {{}}.handled WHERE member = '{name}' AND what = 'end'")[0][0]
        return count

    values = iter(range(10_000))

    def append(count: int) -> None:
        line.commit(*(str(next(values)) for _ in range(count)))

    begin("owner")
    append(20)
    wait_until(lambda: ended("owner") >= 3, "the first member to own the line")
    begin("successor")
    append(200)
    members["owner"].send_signal(fault)
    wait_until(lambda: ended("successor") >= 3, "the second member to own the line", seconds=LEASE + 30)
    if fault == signal.SIGSTOP:
        members["owner"].send_signal(signal.SIGCONT)
        wait_until(lambda: ended("successor") >= 20, "the second member to go on")
    members["successor"].terminate()
    assert members["successor"].wait(60) == 0
    rows = line.execute("SELECT member, value, what FROM {}.handled ORDER BY id")
    # The former owner may own the line again after its successor has ended.
    of = [name for name, _, _ in rows]
    turn = rows[of.index("successor") : len(of) - of[::-1].index("successor")]
    assert {name for name, _, what in turn if what == "begin"} == {"successor"}
    first = list(dict.fromkeys(value for _, value, _ in rows))
    assert first == sorted(first)
    # A handler begins after the former one has ended, or after its process was stopped.
    of_successor = [(value, what) for name, value, what in rows if name == "successor"]
    assert of_successor[::2] == [(value, "begin") for value, _ in of_successor[1::2]]
