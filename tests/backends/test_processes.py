"""A handler in processes on a real JetStream server: a process that is killed loses and settles no message."""

from __future__ import annotations

import os
from collections import Counter
from itertools import count
from pathlib import Path

import nats
import pytest
from nats.js.api import StreamConfig

from lanes import Consumer
from lanes_jetstream import JetStreamSource, subject_token
from tests.components.nats_server import NatsServer
from tests.fakes.process_handlers import wait
from tests.fakes.processes import PATIENCE, alive, eventually, in_processes, notes, pids
from tests.fakes.support import started

pytestmark = [pytest.mark.process, pytest.mark.timeout(4 * PATIENCE)]

_numbers = count()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_killed_process_loses_no_message(nats_server: NatsServer, tmp_path: Path) -> None:
    name = f"PROCESSES{os.getpid()}x{next(_numbers)}"
    client = await nats.connect(nats_server.url)
    jetstream = client.jetstream()
    await jetstream.add_stream(StreamConfig(name, subjects=[f"{name}.*"]))
    keys = ("crash", "a", "b", "free", "crash", "free")
    for key in keys:
        await jetstream.publish(f"{name}.{key}", str(tmp_path).encode())
    for position in range(len(keys) + 1):
        (tmp_path / f"go{position}").touch()
    source = JetStreamSource(nats_server.url, stream=name, durable="billing", key=subject_token(1))
    async with started(Consumer(source, wait, settings=in_processes(2, attempts=3))) as run:
        await eventually(lambda: len([line for line in notes(tmp_path) if line.startswith("end ")]) == len(keys))
        await eventually(lambda: run.consumer.status().in_flight == 0)
        assert await run.stop() is None
    # Every message was handled once to its end, and the two whose process died were begun twice.
    ends = Counter(line for line in notes(tmp_path) if line.startswith("end "))
    assert sorted(ends.values()) == [1] * len(keys)
    begun = Counter(line.split()[2] for line in notes(tmp_path) if line.startswith("start "))
    assert sorted(begun.values()) == [1] * 4 + [2] * 2
    assert not any(map(alive, pids(tmp_path)))
    info = await jetstream.consumer_info(name, "billing")
    assert (info.num_ack_pending, info.num_pending) == (0, 0)
    await jetstream.delete_stream(name)
    await client.close()
