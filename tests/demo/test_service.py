"""The approval service answers in batches with its latency, and its client survives broken connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from demo import DemoError, Faults
from demo.ledger import Ledger
from demo.workers.client import Client, ServiceGone
from demo.workers.handler import Approve, Declined
from demo.workers.service import Service

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

TOKEN = "token"


class World:
    """A service with a ledger, and its recorded statuses and commits."""

    def __init__(self, folder: Path, latency: float) -> None:
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.statuses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.commits: list[int] = []
        self.service = Service(
            self.ledger,
            latency=latency,
            token=TOKEN,
            on_status=self.statuses.put_nowait,
            on_commit=lambda: self.commits.append(self.ledger.stored),
        )


@asynccontextmanager
async def world(folder: Path, latency: float = 0.0) -> AsyncIterator[tuple[World, Client]]:
    made = World(folder, latency)
    await made.service.start(folder)
    client = Client(made.service.address, TOKEN)
    await client.connect()
    try:
        yield made, client
    finally:
        await client.close()
        await made.service.close()
        made.ledger.close()


async def test_writes_of_one_turn_share_a_commit(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, client):
        answers = await asyncio.gather(*(client.apply(f"case{number}", 0, 1) for number in range(500)))
        assert answers == ["applied"] * 500
        assert made.commits[-1] == 500
        assert len(made.commits) < 10
        assert await client.apply("case7", 0, 2) == "repeat"


async def test_concurrent_steps_of_a_key_overtake_each_other(tmp_path: Path) -> None:
    async with world(tmp_path, latency=0.02) as (made, client):
        handler = Approve(client, Faults(fail_every=0, poison_every=0))
        payloads = [b'{"case":"a","step":%d}' % step for step in range(20)]
        await asyncio.gather(*(handler.handle(payload, 1, 1) for payload in payloads))
        assert made.ledger.violations > 0
        for step in range(20):
            await handler.handle(b'{"case":"b","step":%d}' % step, 1, 1)
        assert made.ledger.audit([("b", step) for step in range(20)], []).lost == []


async def test_an_approval_takes_half_to_one_and_a_half_of_the_latency(tmp_path: Path) -> None:
    async with world(tmp_path, latency=0.4) as (_, client):

        async def timed(step: int) -> float:
            begun = time.monotonic()
            await client.approve("a", step)
            return time.monotonic() - begun

        times = await asyncio.gather(*(timed(step) for step in range(100)))
        assert min(times) >= 0.18
        # Only the lower bound depends on the service alone; a busy machine exceeds an upper bound. The latency is long
        # against the time that a busy machine needs to send the requests.
        assert max(times) - min(times) > 0.2


async def test_an_event_fails_as_often_as_its_plan_says(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, client):
        faults = Faults(poison_every=0, fail_every=1)
        handler = Approve(client, faults)
        failures = faults.failures("a", 0)
        for attempt in range(1, failures + 1):
            with pytest.raises(Declined, match=f"attempt {attempt} was declined"):
                await handler.handle(b'{"case":"a","step":0}', attempt, 1)
        assert made.ledger.stored == 0
        await handler.handle(b'{"case":"a","step":0}', failures + 1, 1)
        assert made.ledger.stored == 1
        poison = Approve(client, Faults(poison_every=1))
        with pytest.raises(Declined, match="never"):
            await poison.handle(b'{"case":"a","step":1}', 1_000, 1)


async def test_the_service_passes_the_status_of_a_worker_on(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, client):
        client.say({"in_flight": 3})
        async with asyncio.timeout(10):
            assert await made.statuses.get() == {"in_flight": 3}


async def test_a_broken_connection_fails_open_requests_and_is_renewed(tmp_path: Path) -> None:
    async with world(tmp_path, latency=60.0) as (made, client):
        waiting = asyncio.create_task(client.approve("a", 0))
        # The answer to a later request shows that the first request has arrived.
        assert await client.apply("b", 0, 1) == "applied"
        made.service.break_connections()
        with pytest.raises(ServiceGone, match="closed the connection"):
            await waiting
        assert await client.apply("a", 0, 1) == "applied"
        client.say({"again": True})
        async with asyncio.timeout(10):
            assert await made.statuses.get() == {"again": True}


async def test_a_request_waits_only_so_long_for_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, latency=60.0) as (made, client):
        waiting = asyncio.create_task(client.approve("a", 0))
        await client.apply("b", 0, 1)
        monkeypatch.setattr("demo.workers.client._CONNECT_TIMEOUT", 0.05)
        await made.service.close()
        with pytest.raises(ServiceGone, match="closed"):
            await waiting
        with pytest.raises(ServiceGone, match=r"no connection to the approval service for 0\.05 s"):
            await client.approve("a", 1)


async def test_a_cancelled_request_leaves_no_open_request(tmp_path: Path) -> None:
    async with world(tmp_path, latency=0.01) as (_, client):
        waiting = asyncio.create_task(client.approve("a", 0))
        await client.apply("b", 0, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.approve("a", 1)
        assert not client._open


@pytest.mark.parametrize(
    "said",
    [
        b"a 1 a 0\n",
        b"h wrong\n",
        b"h token\nx 1\n",
        b"h token\na 1\n",
        b"h token\nw 1 a b c\n",
        b"h token\ns {\n",
        b"h token\n" + b"x" * 70_000,
    ],
)
async def test_a_client_with_another_protocol_is_disconnected(tmp_path: Path, said: bytes) -> None:
    async with world(tmp_path) as (made, client):
        reader, writer = await asyncio.open_unix_connection(made.service.address.removeprefix("unix:"))
        writer.write(said)
        async with asyncio.timeout(10):
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
        writer.close()
        assert await client.apply("a", 0, 1) == "applied"
        assert made.ledger.stored == 1


async def test_where_a_path_is_too_long_a_loopback_port_serves(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    async with world(folder) as (made, client):
        assert made.service.address.startswith("tcp:127.0.0.1:")
        assert await client.apply("a", 0, 1) == "applied"


async def test_an_unwritable_ledger_is_reported_without_an_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, client):
        made.ledger.close()
        waiting = asyncio.create_task(client.apply("a", 0, 1))
        # This status follows the request, so its arrival shows that the request was tried.
        asyncio.get_running_loop().call_soon(client.say, {})
        async with asyncio.timeout(10):
            await made.statuses.get()
        assert "free space" in str(made.service.failure)
        assert not waiting.done()
        waiting.cancel()


async def test_a_missing_service_is_one_clear_line(tmp_path: Path) -> None:
    client = Client(f"unix:{tmp_path}/nothing", TOKEN)
    with pytest.raises(DemoError, match="no approval service at unix:"):
        await client.connect()
    await client.close()
