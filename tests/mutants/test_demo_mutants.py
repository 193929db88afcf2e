"""The demo's report fails for each planted fault in the engine, on the line that names the fault."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from demo import DemoConfig, Faults, Report, run
from tests.components import NatsServer
from tests.mutants.table import MUTANTS

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(120),
]


async def demo(server: NatsServer, command: Sequence[str] | None = None) -> Report:
    """Run the demo for a short time, with a kill in the middle and more failing events than usual."""
    config = DemoConfig(
        server=server.url,
        events=3_000,
        concurrency=300,
        max_in_flight=600,
        serial_seconds=0.0,
        faults=Faults(fail_every=20, poison_every=1_000),
    )
    if command is not None:
        config = DemoConfig(**{**vars(config), "worker_command": command})
    return await run(config)


async def test_without_a_fault_every_promise_is_kept(nats_server: NatsServer) -> None:
    report = await demo(nats_server)
    assert report.broken == []
    assert (report.kills, report.workers) == (1, 2)
    assert report.done == 3_000
    assert report.dead_letters > 0
    assert report.redelivered["restart"] > 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # The message was acknowledged before the end of its handler. After the kill of the worker, it is not
        # redelivered.
        ("settled_while_it_runs", "lost: "),
        # A later step of a case overtook an earlier step, which the ledger then refused.
        ("two_of_a_lane", "order violations: "),
        # The message failed once, and was never retried.
        ("failure_counts_as_done", "lost: "),
    ],
)
async def test_a_planted_fault_turns_the_report_red(nats_server: NatsServer, name: str, line: str) -> None:
    assert name in MUTANTS
    report = await demo(nats_server, [sys.executable, "-m", "tests.mutants.worker", name])
    assert not report.ok
    assert [broken for broken in report.broken if broken.startswith(line)], report.broken
