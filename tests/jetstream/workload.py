"""A stream with skewed keys, a handler that checks order, and runs of a consumer over both."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo

import lanes
from lanes_jetstream import JetStreamSource, subject_token
from lanes_jetstream.durable.source import DurableSource
from tests.components import NatsServer

DURABLE = "worker"

FAST: Final = lanes.Settings(concurrency=50, drain_timeout=10)

SECOND: Final = 1_000_000_000
"""In nanoseconds, as in configurations of consumers."""

USERS: Final = """
accounts {{ A {{ jetstream: enabled, users: [
    {{user: admin, password: admin}},
    {{user: app, password: app, permissions: {{publish: {{deny: [{denied}]}}}}}}
]}}}}
no_auth_user: admin
"""
"""Configuration of a server whose user ``app`` may not publish to the ``denied`` subjects."""

_numbers = itertools.count(1)


def unique(prefix: str) -> str:
    """A name that no other test of this machine uses."""
    return f"{prefix}{os.getpid()}x{next(_numbers)}"


class Stream:
    """One stream; the key is the second token of the subject."""

    def __init__(self, url: str, client: Client, name: str) -> None:
        self.url = url
        self.client = client
        self.name = name
        self.published = 0

    async def create(self, **config: Any) -> None:
        await self.client.jetstream().add_stream(name=self.name, subjects=[f"{self.name}.>"], **config)

    async def publish(self, count: int, *, keys: int = 20, size: int = 40, seed: int = 1) -> None:
        """Publish ``count`` messages over ``keys`` keys, the first of them hot, and wait until they are stored."""
        chance = random.Random(seed)
        for left in reversed(range(count)):
            key = 0 if chance.random() < 0.3 else chance.randrange(keys)
            subject, payload = f"{self.name}.{key}", b"x" * size
            if left:
                await self.client.publish(subject, payload)
            else:
                # A stream stores its messages in order, so the answer about the last one is about all.
                await self.client.jetstream().publish(subject, payload, timeout=20)
        self.published += count

    def source(self, **arguments: Any) -> JetStreamSource:
        arguments = {"durable": DURABLE, "key": subject_token(1), **arguments}
        where = arguments.pop("where", self.url)
        return JetStreamSource(where, stream=self.name, **arguments)

    async def pull_raw(self, count: int) -> list[Msg]:
        """Pull like a plain client, without acknowledgements."""
        arrived: list[Msg] = []
        inbox = self.client.new_inbox()

        async def receive(message: Msg) -> None:
            arrived.append(message)

        subscription = await self.client.subscribe(inbox, cb=receive)
        request = json.dumps({"batch": count, "expires": 5_000_000_000}).encode()
        await self.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self.name}.{DURABLE}", request, reply=inbox)
        await until(lambda: len(arrived) >= count)
        await subscription.unsubscribe()
        return arrived

    async def consumer_info(self, durable: str = DURABLE) -> ConsumerInfo:
        info: ConsumerInfo = await self.client.jetstream().consumer_info(self.name, durable)
        return info

    async def ack_pending(self) -> int:
        """Number of deliveries that the server counts as unacknowledged."""
        return (await self.consumer_info()).num_ack_pending or 0

    async def acknowledged(self) -> None:
        """Wait until the server counts every delivery as acknowledged."""
        while await self.ack_pending():
            await anyio.sleep(0.02)

    async def add_consumer(self, **config: Any) -> None:
        """Create the durable by a raw request, which may have fields that the client's types lack."""
        body = {"durable_name": DURABLE, "name": DURABLE, "ack_policy": "explicit", "max_deliver": -1, **config}
        request = {"stream_name": self.name, "config": body}
        answer = await self.client.request(
            f"$JS.API.CONSUMER.CREATE.{self.name}.{DURABLE}", json.dumps(request).encode(), timeout=5
        )
        fields = json.loads(answer.data)
        assert "error" not in fields, fields


class Recorder:
    """A handler that checks order and overlap, and records the finished messages.

    Positions may repeat. A new position must be above all earlier positions of its key.
    """

    def __init__(self, pause: Callable[[lanes.Message], float] = lambda message: 0.001) -> None:
        self._pause = pause
        self.completed: defaultdict[bytes | None, list[int]] = defaultdict(list)
        self.done: set[int] = set()
        self.running: set[bytes | None] = set()
        self.most_running = 0
        self.violations: list[str] = []
        self.repeats = 0
        self.changed = anyio.Event()

    async def __call__(self, message: lanes.Message) -> None:
        key = message.key
        if key in self.running:
            self.violations.append(f"two at once of {key!r} at {message.position}")
        self.running.add(key)
        self.most_running = max(self.most_running, len(self.running))
        try:
            await anyio.sleep(self._pause(message))
        finally:
            self.running.discard(key)
        if message.position in self.done:
            self.repeats += 1
        else:
            if self.completed[key] and self.completed[key][-1] > message.position:
                self.violations.append(f"{message.position} of {key!r} after {self.completed[key][-1]}")
            self.completed[key].append(message.position)
            self.done.add(message.position)
        self.changed.set()
        self.changed = anyio.Event()

    async def reached(self, count: int) -> None:
        """Wait until ``count`` different messages are done."""
        while len(self.done) < count:
            await self.changed.wait()


@asynccontextmanager
async def running(consumer: lanes.Consumer) -> AsyncIterator[None]:
    """Run the consumer during the block; at the end, stop it in order and check that ``run`` returns."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        yield
        consumer.stop()


@asynccontextmanager
async def crashing(consumer: lanes.Consumer) -> AsyncIterator[None]:
    """Run the consumer during the block; at the end, cancel it, so its messages stay unacknowledged."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        yield
        consumer.stop(at_once=True)


async def all_done(stream: Stream, recorder: Recorder) -> None:
    """Check that all messages are handled in order and acknowledged."""
    with anyio.fail_after(40):
        await recorder.reached(stream.published)
        await stream.acknowledged()
    assert recorder.violations == []
    assert len(recorder.done) == stream.published


def inner(source: JetStreamSource) -> DurableSource:
    """The ``DurableSource`` inside a source."""
    assert isinstance(source._source, DurableSource)
    return source._source


async def moment_behind(client: Client, stream: str, sequence: int) -> datetime:
    """Return a time after the storage of a message, by the clock that server and test share."""
    while True:
        answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5)
        state, now = json.loads(answer.data)["state"], datetime.now(UTC)
        if state["last_seq"] >= sequence and now > datetime.fromisoformat(state["last_ts"]):
            return now


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition without an event."""
    while not condition():
        await anyio.sleep(0.01)


async def never_called(message: lanes.Message) -> None:
    """A handler of a consumer that must not start."""


@asynccontextmanager
async def stops(
    consumer: lanes.Consumer, words: str, *, error: type[Exception] = lanes.SourceError
) -> AsyncIterator[None]:
    """Run the consumer during the block, and expect that it fails with such an error."""
    ended = anyio.Event()

    async def run() -> None:
        with pytest.raises(error, match=words):
            await consumer.run()
        ended.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield
            await ended.wait()


def reload(server: NatsServer, config: str) -> None:
    """Give a server another configuration while it runs."""
    (server.folder / "nats.conf").write_text(config)
    server._process.signal(signal.SIGHUP)
