"""The whole demo with a cohort on a real NATS server: members join, leave, die and freeze."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import nats
import pytest

from demo import DemoConfig, run
from demo.config import Retention
from demo.group.members import Members
from tests.components import NatsServer

LEASE = 5.0
"""Seconds; a busy machine must not stand still for half of it."""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(180),
]


def config(server: NatsServer, **changes: Any) -> DemoConfig:
    settings = {"events": 2_000, "concurrency": 100, "max_in_flight": 200, "serial_seconds": 0.0, "members": 2}
    return DemoConfig(**{"server": server.url, "lease": LEASE, **settings, **changes})


async def streams(server: NatsServer) -> set[str]:
    client = await nats.connect(server.url)
    answer = await client.request("$JS.API.STREAM.NAMES", b"", timeout=5)
    await client.close()
    return set(json.loads(answer.data).get("streams") or [])


async def comes_and_goes(group: Members) -> None:
    """Let a member join while the others have messages, and let a member leave."""
    await group.until(group.settled)
    count = await group.feed(0.5)
    await group.join()
    await group.until(group.settled)
    await group.feed(0.8)
    await group.stop(group.running[0])
    count = await group.feed(1.0)
    await group.until(group.settled)
    await group.handled(count)


async def test_members_join_and_leave_without_repeats(nats_server: NatsServer, tmp_path: Path) -> None:
    before = await streams(nats_server)
    report = await run(config(nats_server, partitions=12, lease=10.0, script=comes_and_goes, keep=tmp_path / "kept"))
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (2_000, 0, 3)
    group = report.group
    assert group is not None and group.moves is not None
    assert set(group.recovery) == {"join", "stop"}
    assert sum(group.duplicates.values()) == group.overlaps == group.overlaps_at_loss == 0
    # Four partitions move to the new member, and four or six from the leaving member.
    assert group.moves.made == group.moves.least >= 8
    assert group.handover is not None
    figures = json.loads(report.json())
    assert (figures["moved"], figures["handover_ms"] > 0.0) == (group.moves.made, True)
    # The bucket is deleted too.
    assert await streams(nats_server) <= before


async def test_each_physical_queue_is_a_partition_of_a_cohort(nats_server: NatsServer) -> None:
    before = await streams(nats_server)
    report = await run(config(nats_server, width=4, lease=10.0, script=comes_and_goes))
    assert report.broken == []
    assert (report.done, report.workers, report.width, report.stranded) == (2_000, 3, 4, 0)
    assert report.group is not None and set(report.group.recovery) == {"join", "stop"}
    assert await streams(nats_server) <= before


@pytest.mark.slow
@pytest.mark.parametrize("retention", get_args(Retention))
async def test_a_cohort_keeps_every_promise_under_all_faults(nats_server: NatsServer, retention: Retention) -> None:
    report = await run(config(nats_server, members=4, events=10_000, retention=retention))
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (10_000, 1, 5)
    group = report.group
    assert group is not None
    assert set(group.recovery) == {"kill", "join", "freeze", "stop"}
    assert group.recovery["kill"] < LEASE + 1.0 + 3.0, "a lease, a second, and what a busy machine adds"
    assert group.duplicates["clean"] == group.overlaps == 0
    assert group.duplicates["kill"] and group.duplicates["freeze"]
