"""The report of a cohort fails for each planted fault, on the line that names the fault."""

from __future__ import annotations

import sys

import pytest

from demo import DemoConfig, Report, run
from demo.group.members import Members
from tests.components import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(180),
]

_EVENTS = 6_000


async def disturbed(group: Members) -> None:
    """Freeze a member beyond its lease, let a member join, and kill a member, each while the cohort has messages."""
    await group.until(group.settled)
    count = await group.feed(0.3)
    await group.handled(count // 2)
    thaw = group.freeze(group.busiest())
    await group.until(group.settled)
    await group.feed(0.5)
    thaw()
    await group.until(group.settled)
    await group.feed(0.8)
    await group.join()
    await group.until(group.settled)
    done, published = group.progress.stored, group.progress.published
    count = await group.feed(1.0)
    await group.handled(done + (count - published) // 2)
    group.kill(group.busiest())
    await group.until(group.settled)


async def demo(server: NatsServer, *command: str) -> Report:
    return await run(
        DemoConfig(
            server=server.url,
            members=3,
            partitions=12,
            lease=4.0,
            events=_EVENTS,
            latency=0.05,
            concurrency=200,
            max_in_flight=600,
            serial_seconds=0.0,
            stall_timeout=20.0,
            script=disturbed,
            worker_command=(sys.executable, "-m", *command),
        )
    )


async def test_without_a_fault_every_promise_is_kept(nats_server: NatsServer) -> None:
    report = await demo(nats_server, "demo.workers.worker")
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (_EVENTS, 1, 4)
    assert report.group is not None and report.group.duplicates["kill"] > 0


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("starts_behind_the_deadline", ("overlaps: ",)),
        ("no_barrier", ("overlaps: ",)),
        ("done_set_not_written", ("duplicates: ",)),
    ],
)
async def test_a_planted_fault_turns_the_report_red(nats_server: NatsServer, name: str, lines: tuple[str, ...]) -> None:
    report = await demo(nats_server, "tests.mutants.worker", name)
    assert [broken for broken in report.broken if broken.startswith(lines)], report.broken
