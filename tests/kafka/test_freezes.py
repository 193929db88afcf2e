"""A member that wakes from a freeze starts no handler before the broker has confirmed it, on a real broker."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

import lanes
from lanes.clock import monotonic
from lanes_kafka import KafkaSource
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.frozen_member import CONCURRENCY
from tests.kafka.members import PROTOCOLS
from tests.kafka.workload import Topic, produce

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]

SESSION = 4.0
HEARTBEAT = 0.3
LIMIT = SESSION - HEARTBEAT - 1.0
"""Seconds of a freeze after which nothing starts unconfirmed."""

WITHIN = LIMIT + 0.1
"""Seconds of a freeze that the group does not notice, but that the member must have confirmed."""

BELOW = 1.3
"""Seconds of a freeze that the member does not even notice."""

TRIES = 4
"""Number of freezes of which one must have its length: a busy machine may wake the member too late."""

BACKLOG = 1_000

Place = tuple[int, int]


class Row(NamedTuple):
    """A row of ``frozen_member``."""

    what: str
    partition: int
    position: int
    at: float


class FrozenMember:
    """The member in a process of its own. ``frozen_for``: seconds of the last freeze."""

    frozen_for = 0.0

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self._process = process
        self._path = path
        self._read: list[Row] = []
        self._end = 0

    def rows(self, since: float = 0.0) -> list[Row]:
        """The rows from this time on. Each call reads the new rows only."""
        if (self._path / "rows").exists():
            with (self._path / "rows").open("rb") as file:
                file.seek(self._end)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._end += len(whole)
            self._read += [Row(*json.loads(line)) for line in whole.splitlines()]
        return [row for row in self._read if row.at >= since] if since else self._read

    def log(self) -> str:
        return (self._path / "log").read_text()

    def done(self) -> Counter[Place]:
        return Counter((row.partition, row.position) for row in self.rows() if row.what == "end")

    def owned(self) -> set[int]:
        owned: set[int] = set()
        for row in self.rows():
            if row.what == "assigned":
                owned.add(row.partition)
            elif row.what in ("lost", "revoked"):
                owned.discard(row.partition)
        return owned

    def told(self) -> str:
        """The log of the process and its last rows, for a failure."""
        last = "\n".join(f"{row.at:.3f} {row.what} {row.partition} {row.position}" for row in self.rows()[-40:])
        return (
            f"the frozen process owns {sorted(self.owned())} at {monotonic():.3f}, exit status "
            f"{self._process.returncode}; its log:\n{self.log()}\nits last rows:\n{last}"
        )

    async def freeze(
        self, seconds: float, at_end: Callable[[], None] = lambda: None, *, over: Callable[[], bool] = lambda: True
    ) -> float:
        """Freeze the process for this time and until ``over``, call ``at_end``, and return the time of the waking."""
        begun = monotonic()
        self._process.send_signal(signal.SIGSTOP)
        try:
            await anyio.sleep(seconds)
            await until(over)
            at_end()
        finally:
            woken = monotonic()
            self._process.send_signal(signal.SIGCONT)
        self.frozen_for = woken - begun
        return woken

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        await self._process.wait()


class Pair:
    """A member that freezes, and a member that takes over."""

    def __init__(self, topic: Topic, frozen: FrozenMember, other: lanes.Consumer, done: Counter[Place]) -> None:
        self.topic = topic
        self.frozen = frozen
        self.other = other
        self._done = done
        self._sent = 0

    def done(self) -> Counter[Place]:
        return self.frozen.done() + self._done

    def told(self) -> str:
        """The state of both members, for a failure."""
        status = self.other.status()
        owned = {str(each): partition.in_flight for each, partition in status.partitions.items()}
        return (
            f"{self._sent} messages sent, {len(self.frozen.done())} done by the frozen member, {len(self._done)} by "
            f"the other one, which has in flight {owned}"
        )

    async def load(self, count: int = BACKLOG) -> None:
        """Send messages, so that both members have a backlog."""
        await anyio.to_thread.run_sync(produce, self.topic, count)
        self._sent += count

    async def both_own(self) -> None:
        await until(lambda: len(self.frozen.owned()) == 2 and len(self.other.status().partitions) == 2)

    async def frozen_runs(self) -> None:
        """Wait until the frozen member has run handlers, and has more messages."""
        since = monotonic()
        with anyio.fail_after(40):
            while len([row for row in self.frozen.rows(since) if row.what == "end"]) < 4 * CONCURRENCY:
                await self.load(200)
                await anyio.sleep(0.2)

    async def all_done(self) -> None:
        await until(lambda: len(self.done()) == self._sent)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(40):
        while not condition():
            await anyio.sleep(0.05)


def settings(topic: Topic, protocol: str) -> dict[str, Any]:
    """The settings of both members, with a session of ``SESSION`` seconds."""
    config = topic.config(**PROTOCOLS[protocol])
    milliseconds = {"session.timeout.ms": int(SESSION * 1000), "heartbeat.interval.ms": int(HEARTBEAT * 1000)}
    if protocol != "848":
        return config | milliseconds
    resource = ConfigResource(ConfigResource.Type.GROUP, config["group.id"])
    for name, value in milliseconds.items():
        entry = ConfigEntry(f"consumer.{name}", str(value), incremental_operation=AlterConfigOpType.SET)
        resource.add_incremental_config(entry)
    topic.admin.incremental_alter_configs([resource])[resource].result(10)
    return config


@asynccontextmanager
async def pair(topic: Topic, protocol: str, kind: str, path: Path) -> AsyncIterator[Pair]:
    """Two members that own two partitions each, and have a backlog."""
    config = settings(topic, protocol)
    done: Counter[Place] = Counter()

    async def handle(message: lanes.Message) -> None:
        await anyio.sleep(0.02)
        done[message.partition.id.number, message.position] += 1

    other = lanes.Consumer(
        KafkaSource(config, topics=topic.name), handle, settings=lanes.Settings(concurrency=CONCURRENCY)
    )
    with (path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.kafka.frozen_member"),
            *(json.dumps(config | {"log_level": 6}), topic.name, str(path / "rows"), kind),
            cwd=ROOT,
            stderr=log,
        )
    frozen = FrozenMember(process, path)
    try:
        await until(lambda: len(frozen.owned()) == 4)
        async with other:
            members = Pair(topic, frozen, other, done)
            try:
                await members.both_own()
                await members.load()
                await members.frozen_runs()
                yield members
                await members.all_done()
            except BaseException as error:
                error.add_note(members.told())
                raise
    except BaseException as error:
        error.add_note(frozen.told())
        raise
    finally:
        await frozen.end()


def before_assignment(rows: list[Row]) -> list[Row]:
    """The rows up to the first assignment."""
    end = next(index for index, row in enumerate(rows) if row.what == "assigned")
    return rows[:end]


async def freeze_briefly(members: Pair) -> None:
    """Freeze a member for less than the limit, and let it run. Nothing notices the freeze."""
    for left in reversed(range(TRIES)):
        before = members.frozen.log()
        await members.frozen.freeze(BELOW)
        await members.frozen_runs()
        if members.frozen.frozen_for < BELOW + 0.5 or not left:
            assert "no thread of this process ran" not in members.frozen.log().removeprefix(before)
            return


async def freeze_past_the_session(members: Pair) -> list[Place]:
    """Freeze a member until its partitions have moved; return the messages whose handlers ended after it woke."""
    woken = await members.frozen.freeze(SESSION, over=lambda: len(members.other.status().partitions) == 4)
    await until(lambda: any(row.what == "assigned" for row in members.frozen.rows(woken)))
    early = before_assignment(members.frozen.rows(woken))
    assert [row for row in early if row.what == "start"] == []
    assert {row.what for row in early} >= {"lost"}
    await members.both_own()
    await members.frozen_runs()
    return [(row.partition, row.position) for row in early if row.what == "end"]


KINDS = {"eager": "async", "cooperative": "threads", "848": "batch"}
"""The kind of handlers in the short tests."""


@pytest.mark.process
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_nothing_starts_after_a_freeze_past_the_session(protocol: str, topic: MakeTopic, tmp_path: Path) -> None:
    async with pair(topic(4), protocol, KINDS[protocol], tmp_path) as members:
        zombies = await freeze_past_the_session(members)
    # The results of handlers that were running did not count: the messages were handled again.
    assert all(members.done()[place] > 1 for place in zombies)
    assert members.frozen.log().count("no thread of this process ran for") == 1


@pytest.mark.process
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_confirmed_member_continues(protocol: str, topic: MakeTopic, tmp_path: Path) -> None:
    """A freeze that the group has not noticed costs nothing, and one below the limit is not even noticed."""
    async with pair(topic(4), protocol, KINDS[protocol], tmp_path) as members:
        before, since = members.done(), monotonic()
        await freeze_briefly(members)
        happened = {row.what for row in members.frozen.rows(since)}
        for _ in range(TRIES):
            log = members.frozen.log()
            woken = await members.frozen.freeze(WITHIN)
            await members.frozen_runs()
            happened |= {row.what for row in members.frozen.rows(woken)}
            if happened == {"start", "end"}:
                break
            # The group has removed the member, because its heartbeats came too late on a busy machine.
            await members.both_own()
            before, happened = members.done(), set()
        assert happened == {"start", "end"}
        log = members.frozen.log().removeprefix(log)
        assert log.count("no thread of this process ran for") == log.count("handlers start again") == 1
        after = members.done()
    assert {places for places, times in (after - before).items() if times > 1} == set()


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_without_an_answer_of_the_broker_nothing_starts(
    fresh_kafka: KafkaFactory, topic: MakeTopic, tmp_path: Path
) -> None:
    # A broker that stands still for its session would be fenced by its own controller. Until its return it describes a
    # cluster without brokers, after which a client of librdkafka may never connect again (its issue 5301).
    server = fresh_kafka(warm=True, properties={"broker.session.timeout.ms": 60_000})
    async with pair(topic(4, on=server), "cooperative", "async", tmp_path) as members:
        woken = await members.frozen.freeze(WITHIN, server.pause)
        try:
            await anyio.sleep(2.0)
            resumed = monotonic()
        finally:
            server.resume()
        # The group may have removed either member meanwhile.
        await members.both_own()
        await members.frozen_runs()
        starts = [row.at for row in members.frozen.rows(woken) if row.what == "start"]
        assert min(starts) > resumed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.process
@pytest.mark.parametrize("kind", ["async", "threads", "batch"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_twenty_freezes_longer_than_the_session_break_no_promise(
    protocol: str, kind: str, topic: MakeTopic, tmp_path: Path
) -> None:
    zombies = []
    async with pair(topic(4), protocol, kind, tmp_path) as members:
        for _ in range(20):
            zombies += await freeze_past_the_session(members)
    assert all(members.done()[place] > 1 for place in zombies)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.process
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_twenty_freezes_shorter_than_the_session_repeat_no_message(
    protocol: str, topic: MakeTopic, tmp_path: Path
) -> None:
    async with pair(topic(4), protocol, "async", tmp_path) as members:
        before, since = members.done(), monotonic()
        for _ in range(20):
            await freeze_briefly(members)
        rows, after = members.frozen.rows(since), members.done()
    assert {row.what for row in rows} == {"start", "end"}
    assert {place for place, times in (after - before).items() if times > 1} == set()
