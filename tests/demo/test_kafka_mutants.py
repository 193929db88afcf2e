"""The report of a group fails for each planted fault, on the line that names the fault."""

from __future__ import annotations

import asyncio
import sys

import pytest

from demo import DemoConfig, Faults, Report, run
from demo.group.members import Members
from tests.components import KafkaServer
from tests.mutants.table_demo import GROUP

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(120),
]

_EVENTS = 5_000
_WORKER = (sys.executable, "-m", "demo.workers.worker")


async def fed(group: Members, until: float) -> None:
    """Publish repeatedly while the group has unsettled messages, up to this share of all messages."""
    share = group.progress.published / _EVENTS
    while not group.settled():
        share = min(share + 0.005, until)
        await group.feed(share)
        await asyncio.sleep(0.1)


async def busy(group: Members, share: float) -> None:
    """Publish up to this share of all messages, and wait for half of the new results, since a fault may lose
    messages."""
    done, published = group.progress.stored, group.progress.published
    count = await group.feed(share)
    await group.handled(done + (count - published) // 2)


async def disturbed(group: Members) -> None:
    """Let a member join, kill a member and stop a member, each while the group has messages."""
    await group.until(group.settled)
    await busy(group, 0.5)
    await group.join()
    await fed(group, 0.7)
    await busy(group, 0.8)
    group.kill(group.busiest())
    await fed(group, 0.9)
    await busy(group, 1.0)
    await group.stop(group.busiest())


async def demo(server: KafkaServer, command: tuple[str, ...]) -> Report:
    return await run(
        DemoConfig(
            broker="kafka",
            server=server.url,
            protocol="cooperative",
            events=_EVENTS,
            latency=0.05,
            concurrency=300,
            max_in_flight=600,
            serial_seconds=0.0,
            stall_timeout=20.0,
            faults=Faults(fail_every=20, poison_every=1_000),
            script=disturbed,
            worker_command=command,
        )
    )


async def test_without_a_fault_every_promise_is_kept(kafka: KafkaServer) -> None:
    report = await demo(kafka, _WORKER)
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (_EVENTS, 1, 4)
    assert report.dead_letters > 0
    assert report.group is not None and report.group.duplicates["kill"] > 0


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        *((mutant.name, mutant.found_by) for mutant in GROUP),
        ("failure_counts_as_done", ("lost: ",)),
    ],
)
async def test_a_planted_fault_turns_the_report_red(kafka: KafkaServer, name: str, lines: tuple[str, ...]) -> None:
    report = await demo(kafka, (sys.executable, "-m", "tests.mutants.worker", name))
    assert [broken for broken in report.broken if broken.startswith(lines)], report.broken
