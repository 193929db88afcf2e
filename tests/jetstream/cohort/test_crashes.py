"""A frozen member commits nothing after its lease, and the messages repeated after a crash are bounded."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

import lanes
from lanes.clock import monotonic
from lanes.cohort.membership import Membership
from tests.jetstream.cohort_workload import FAST, LEASE, CohortStream, Gate, Log, members, owned, settled
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


ROOT = Path(__file__).parents[3]


class Row(NamedTuple):
    """A row of ``member_process``."""

    what: str
    key: str
    position: int
    epoch: int
    at: float


class Process:
    """A member as a process, and its rows."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self._process = process
        self._path = path

    def rows(self, what: str) -> list[Row]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [row for row in (Row(*json.loads(line)) for line in lines) if row.what == what]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        await self._process.wait()


@asynccontextmanager
async def process(stream: CohortStream, member: str, path: Path) -> AsyncIterator[Process]:
    """Run a member process during the block."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.jetstream.member_process", stream.url, stream.name, member, str(path), cwd=ROOT
    )
    running = Process(started, path)
    try:
        yield running
    finally:
        await running.end()


@pytest.mark.slow
async def test_a_member_frozen_past_its_lease_acknowledges_nothing(cohort_stream: CohortStream, tmp_path: Path) -> None:
    """The member wakes with messages in its lanes and an expired lease, and starts and settles none of them."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(*stream.a_key_each())
    b = lanes.Consumer(stream.source("b"), log.handler("b", gate), settings=FAST)
    await stream.publish(*stream.a_key_each(), times=150)
    with anyio.fail_after(50):
        async with process(stream, "a", tmp_path / "a") as a:
            await until(lambda: len({row.key for row in a.rows("done")}) == 4)
            a.send(signal.SIGSTOP)
            frozen = monotonic()
            async with members(within=40) as running:
                running.join(b)
                await until(lambda: gate.waiting == 4)
                woken = monotonic()
                a.send(signal.SIGCONT)
                # Handlers that start now belong to new leases, after b gave up two partitions.
                gate.open()
                await until(lambda: len(owned(b)) == 2)
                await stream.publish(*stream.a_key_each(), times=3)
                await until(lambda: any(row.at > woken for row in a.rows("start")))
                await until(lambda: len({row.position for row in a.rows("done")} | log.done) == stream.published)
    before = {row.epoch for row in a.rows("start") if row.at < frozen}
    after = [row for row in a.rows("start") if row.at >= woken]
    assert after
    assert not before & {row.epoch for row in after}
    # One handler for each key was running, and none of these runs counted.
    ran = {row.position for row in a.rows("start") if row.at < frozen} - {
        row.position for row in a.rows("done") if row.at < frozen
    }
    assert ran <= log.done
    assert log.violations == []


async def test_a_killed_member_loses_nothing_and_repeats_only_unacknowledged_messages(
    cohort_stream: CohortStream, tmp_path: Path
) -> None:
    """The partitions of the killed member move. Its acknowledged messages are not handled again, but all others are."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    with anyio.fail_after(50):
        async with process(stream, "a", tmp_path / "a") as a, members(within=40) as running:
            running.join(b)
            await until(lambda: len(owned(b)) == 4)
            await until(lambda: len(owned(b)) == 2)
            await stream.publish(*stream.a_key_each(), times=100)
            await until(lambda: len(a.rows("done")) > 20)
            a.send(signal.SIGKILL)
            await until(lambda: len({row.position for row in a.rows("done")} | log.done) == stream.published)
    mine = {row.position for row in a.rows("done")}
    # Acknowledgements on their way at the kill: at most one for each key.
    assert len(mine & log.done) <= 2
    assert log.violations == []
    for run in log.of("b"):
        later = [row for row in a.rows("done") if row.key.encode() == run.key and row.position > run.position]
        assert not later


IN_FLIGHT = 10


FINISHED = 100


@pytest.mark.parametrize("written", [True, False], ids=["written down", "planted: never written down"])
async def test_a_crash_repeats_only_what_the_ledger_lacks(
    make_cohort_stream: MakeCohortStream, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    if not written:
        monkeypatch.setattr(Membership, "checkpoint", lambda *_: None)
    stream, log = await make_cohort_stream(partitions=1), Log()
    stream.lease = LEASE
    stuck, last, *others = (stream.key(0, number) for number in range(FINISHED + 2))
    gate = Gate(stuck)
    # Only the number of unwritten messages causes a write within an hour.
    settings = lanes.Settings(concurrency=IN_FLIGHT, max_in_flight=IN_FLIGHT, commit_interval=3600.0)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=settings)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=settings)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=1)
        await stream.publish(stuck)
        await until(lambda: gate.waiting == 1)
        await stream.publish(*others)
        await log.handled(FINISHED)
        await running.crash(a)
        running.join(b)
        # Redelivered messages come before it.
        await stream.publish(last)
        await log.handled(FINISHED + 2)
        await until(lambda: b.status().in_flight == 0)
    assert log.violations == []
    repeated = len(set(log.repeats))
    assert (repeated <= 2 * IN_FLIGHT) == written, repeated
    assert written or repeated == FINISHED


async def test_messages_finished_above_a_stuck_one_are_written_within_the_commit_interval(
    make_cohort_stream: MakeCohortStream,
) -> None:
    """Fewer messages than ``max_in_flight`` are written too."""
    stream, log = await make_cohort_stream(partitions=1), Log()
    stuck, *others = (stream.key(0, number) for number in range(10))
    gate = Gate(stuck)
    state: dict[str, object] | None = None
    async with members() as running:
        running.join(lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=FAST))
        await stream.publish(stuck, *others)
        await log.handled(len(others))
        with anyio.fail_after(20):
            # The highest sequence, and the distance to the only unfinished one.
            while (state := await stream.read("s.0")) is None or state["done"] != [10, 9]:
                await anyio.sleep(0.01)
        gate.open()
    assert log.repeats == []
