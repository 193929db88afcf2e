"""The example source over SQLite keeps the contract of ``docs/guides/writing-a-source.md``, and adds to it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

import anyio
import pytest

import lanes
from examples.sqlite_source.sqlite_source import SqliteSource, create, put
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Source
from memsource import check_files
from memsource.contract.harness import BYTES, messages_of
from memsource.contract.source import Ability, Check, Sample, checks
from tests.fakes.support import until

ABILITIES: Final[tuple[Ability, ...]] = ("ack wait", "finish")

# Each check repeats dozens of times on a file, which takes seconds.
SLOW: Final = ("check_receive_is_cancel_safe", "check_start_is_cancel_safe")


class SqliteHarness:
    """A separate file, and sources whose clock moves only by ``elapse``."""

    can: Collection[Ability] = ABILITIES
    patience = 0.05
    ack_wait = 30.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now = 1_000_000.0
        self._newest: SqliteSource | None = None
        create(path)

    async def publish(self, samples: Sequence[Sample]) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            for sample in samples:
                put(connection, sample.key, sample.value, sample.headers)

    def source(self) -> Source:
        if self._newest is not None:
            # The former process closes without a release, like a crash, so its claims expire.
            self._now += self.ack_wait
        self._newest = self.another()
        return self._newest

    def another(self) -> SqliteSource:
        return SqliteSource(self.path, visibility=self.ack_wait, poll=0.005, now=lambda: self._now)

    async def unsettled(self) -> int:
        with closing(sqlite3.connect(self.path)) as connection:
            return int(connection.execute("SELECT count(*) FROM queue WHERE attempts > 0").fetchone()[0])

    async def elapse(self, seconds: float) -> None:
        self._now += seconds

    async def revoke(self, partition: Partition) -> None:
        raise NotImplementedError("every process has the one partition, each with keys of its own")

    async def lose(self, partition: Partition) -> None:
        raise NotImplementedError("every process has the one partition, each with keys of its own")

    async def finish(self) -> None:
        assert self._newest is not None
        self._newest.finish()


@pytest.fixture
def harness(tmp_path: Path) -> SqliteHarness:
    return SqliteHarness(tmp_path / "queue.db")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check, id=check.__name__.removeprefix("check_"), marks=[pytest.mark.slow] * (check.__name__ in SLOW)
        )
        for check in checks(ABILITIES)
    ],
)
async def test_the_sqlite_source_keeps_the_contract(check: Check, harness: SqliteHarness) -> None:
    await check(harness)


@asynccontextmanager
async def opened(harness: SqliteHarness) -> AsyncIterator[SqliteSource]:
    source = harness.another()
    try:
        await source.open()
        await source.receive(Room(0, 0))  # receives the event Assigned
        yield source
    finally:
        await source.aclose()


async def take(source: SqliteSource, count: int = 10, size: int = BYTES) -> list[Message]:
    """The available events; none if the call would wait."""
    with anyio.move_on_after(0.2):
        return messages_of(await source.receive(Room(count, size)))
    return []


def values(messages: Sequence[Message]) -> list[bytes]:
    return [message.value for message in messages]


async def settle(source: SqliteSource, messages: list[Message]) -> None:
    await source.settle([Settlement(messages[0].partition, messages)])


@pytest.mark.anyio
async def test_a_claimed_key_belongs_to_one_process(harness: SqliteHarness) -> None:
    await harness.publish([Sample(b"a", b"a1"), Sample(b"a", b"a2"), Sample(b"b", b"b1")])
    async with opened(harness) as one, opened(harness) as other:
        first = await take(one, 1)
        assert values(first) == [b"a1"]
        assert values(await take(other)) == [b"b1"]
        assert values(await take(other)) == []
        await settle(one, first)
        assert values(await take(other)) == [b"a2"]


@pytest.mark.anyio
async def test_a_message_without_a_key_waits_for_no_other_message(harness: SqliteHarness) -> None:
    with closing(sqlite3.connect(harness.path)) as connection, connection:
        put(connection, None, b"1")
        put(connection, None, b"2")
    async with opened(harness) as one, opened(harness) as other:
        assert values(await take(one, 1)) == [b"1"]
        assert values(await take(other)) == [b"2"]


@pytest.mark.anyio
async def test_a_late_settlement_does_not_change_the_next_claim(harness: SqliteHarness) -> None:
    await harness.publish([Sample(b"a", b"a1"), Sample(b"a", b"a2")])
    async with opened(harness) as one, opened(harness) as other:
        late = await take(one)
        await harness.elapse(harness.ack_wait)
        (again,) = await take(other, 1)
        assert [row.raw.attempts for row in (late[0], again)] == [1, 2]  # type: ignore[attr-defined]
        await settle(one, late[:1])
        # The second message has no new claim. With an extension its key would have two owners.
        await one.extend(late)
        assert await harness.unsettled() == 2
        assert values(await take(other)) == [b"a2"]
        await harness.elapse(harness.ack_wait)
        assert values(await take(one)) == [b"a1", b"a2"]


@pytest.mark.anyio
async def test_a_claim_that_ends_while_its_extension_waits_is_not_extended(harness: SqliteHarness) -> None:
    await harness.publish([Sample(b"a", b"a1"), Sample(b"a", b"a2")])
    async with opened(harness) as one, opened(harness) as other:
        late = await take(one)
        await harness.elapse(harness.ack_wait * 0.9)
        async with anyio.create_task_group() as tasks, one._one:
            # Requested in time, and done after the deadline, because the connection is busy.
            tasks.start_soon(one.extend, late)
            await until(lambda: one._one.statistics().tasks_waiting == 1)
            await harness.elapse(harness.ack_wait * 0.1)
            (again,) = await take(other, 1)
        await settle(other, [again])
        assert values(await take(other)) == [b"a2"], "no process has a claim on the key"


@pytest.mark.anyio
async def test_a_released_message_goes_at_once_to_other_processes_only(harness: SqliteHarness) -> None:
    await harness.publish([Sample(b"a", b"a1"), Sample(b"a", b"a2")])
    async with opened(harness) as one, opened(harness) as other:
        (message, _) = await take(one)
        await settle(one, [message])
        await one.release(message.partition)
        assert values(await take(one)) == []
        assert values(await take(other)) == [b"a2"]


@pytest.mark.anyio
async def test_a_batch_ends_when_the_room_for_bytes_is_full(harness: SqliteHarness) -> None:
    await harness.publish([Sample(b"a", b"x" * 100)] * 5)
    async with opened(harness) as source:
        assert len(await take(source, size=250)) == 2
        assert len(await take(source, size=250)) == 2
        assert len(await take(source, size=10)) == 1


@pytest.mark.anyio
async def test_a_long_write_lock_is_waited_for_and_logged(harness: SqliteHarness) -> None:
    await harness.publish([Sample(b"a", b"a1"), Sample(b"a", b"a2")])
    async with opened(harness) as source:
        messages = await take(source, 1)
        assert source._connection is not None
        source._connection.execute("PRAGMA busy_timeout = 0")
        with closing(sqlite3.connect(harness.path, isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            with pytest.raises(lanes.SourceError, match="database is locked") as caught:
                await settle(source, messages)
            assert caught.value.retryable
            await source.extend(messages)  # does not raise
            assert values(await take(source)) == []
        assert values(await take(source)) == [b"a2"]
        await settle(source, messages)
        assert await harness.unsettled() == 1


@pytest.mark.anyio
async def test_a_dropped_table_ends_the_source(harness: SqliteHarness) -> None:
    async with opened(harness) as source:
        with closing(sqlite3.connect(harness.path)) as connection:
            connection.execute("DROP TABLE queue")
        with pytest.raises(lanes.SourceError, match="no such table: queue") as caught:
            await source.receive(Room(1, BYTES))
        assert not caught.value.retryable


@pytest.mark.anyio
@pytest.mark.parametrize("there", [False, True])
async def test_a_missing_table_is_refused(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    if there:
        path.touch()
    source = SqliteSource(path)
    with pytest.raises(lanes.ConfigError, match=r"other\.db: .*call create\(\) with this path first"):
        await source.open()
    await source.aclose()
    assert path.exists() == there, "`open` creates no file"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(lanes.ConfigError, match=f"visibility={seconds}"):
        SqliteSource("queue.db", visibility=seconds)
    with pytest.raises(lanes.ConfigError, match=f"poll={seconds}"):
        SqliteSource("queue.db", poll=seconds)


@pytest.mark.anyio
async def test_workers_that_share_a_table_keep_every_promise(harness: SqliteHarness, tmp_path: Path) -> None:
    await harness.publish([Sample(b"%d" % (number % 20), b"%d" % number) for number in range(200)])
    seen: list[tuple[str, int]] = []
    began = {"one": anyio.Event(), "other": anyio.Event()}

    async def member(name: str) -> None:
        async def handler(message: lanes.Message) -> None:
            began[name].set()
            # The first process can neither hold all 20 keys nor finish before the second one has some.
            for each in began.values():
                await each.wait()
            await anyio.sleep(0.001)
            seen.append((name, int(message.value)))

        source = harness.another()
        source.finish()
        settings = lanes.Settings(concurrency=8, max_in_flight=16)
        await lanes.run(source, handler, settings=settings, history=lanes.History(tmp_path / name))

    async with anyio.create_task_group() as tasks:
        for name in began:
            tasks.start_soon(member, name)
    assert sorted(number for _, number in seen) == list(range(200))
    assert {name for name, _ in seen} == {"one", "other"}
    checked = check_files([tmp_path / "one", tmp_path / "other"])
    assert checked.status == 0, checked.text
