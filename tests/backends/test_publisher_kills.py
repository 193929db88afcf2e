"""A worker that publishes is killed by -9 at random statements on each broker: no output is lost or out of order."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from nats.aio.client import Client

from tests.backends.killed_publisher import MAX_AHEAD
from tests.components import KafkaServer, NatsServer, wait_until
from tests.jetstream.conftest import connect
from tests.jetstream.workload import unique
from tests.kafka.dead_letters import records
from tests.kafka.workload import Topic, produce

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(300)]

KILLS: Final = 12
ROUND: Final = 40
"""Messages of each worker that is killed."""

KEYS: Final = 5

Read = Callable[[], list[bytes]]
"""Returns the values of the visible outputs in their order."""


class Worker:
    """A process of ``killed_publisher``."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.killed_publisher", *arguments],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed(self) -> bool:
        """Whether the process is dead. Raises ``AssertionError`` after another end than a kill."""
        status = self._process.poll()
        assert status in (None, -signal.SIGKILL), status
        return status is not None

    def stop(self) -> int:
        """Stop the process in order, and return its number of statements."""
        self._process.terminate()
        output, _ = self._process.communicate(timeout=60)
        assert self._process.returncode == 0
        return int(output)

    def end(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.communicate()


class Killing:
    """A worker, again and again, on messages of a test."""

    def __init__(self, arguments: tuple[str, ...], send: Callable[[list[bytes]], None], read: Read) -> None:
        self._arguments, self._send, self.read = arguments, send, read
        self.sent: list[bytes] = []
        self._worker: Worker | None = None

    def send(self) -> None:
        """Send the messages of one round."""
        values = [b"%d" % number for number in range(len(self.sent), len(self.sent) + ROUND)]
        self._send(values)
        self.sent += values

    def whole(self) -> int:
        """Let a worker finish all messages, and return its number of statements."""
        self._worker = Worker(*self._arguments, "0")
        wanted = {output for value in self.sent for output in (value, value + b" again")}
        wait_until(lambda: wanted <= set(self.read()), "all outputs to be visible", seconds=120)
        return self._worker.stop()

    def kill(self, at: int) -> bool:
        """Let a worker die before a statement. Return whether it died before all outputs were there."""
        self._worker = worker = Worker(*self._arguments, str(at))
        wanted = {value + b" again" for value in self.sent}
        wait_until(lambda: worker.killed() or wanted <= set(self.read()), "the end of a worker", seconds=120)
        killed = worker.killed()
        worker.end()
        return killed

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()


def judge(killing: Killing, seed: int) -> tuple[int, int]:
    """Kill a worker often, and return the number of kills and of repeated outputs. Assert that nothing is lost."""
    chance = random.Random(seed)
    killed = 0
    try:
        killing.send()
        statements = killing.whole()
        while killed < KILLS:
            killing.send()
            killed += killing.kill(chance.randint(1, statements))
        killing.send()
        killing.whole()
    finally:
        killing.end()
    visible = killing.read()
    outputs = [output for value in killing.sent for output in (value, value + b" again")]
    assert set(outputs) == set(visible)
    first = list(dict.fromkeys(visible))
    for key in range(KEYS):
        mine = [output for output in first if int(output.split()[0]) % KEYS == key]
        assert mine == [output for output in outputs if int(output.split()[0]) % KEYS == key], key
    repeated = len(visible) - len(outputs)
    print(f"{killed} kills within {statements} statements, {repeated} of {len(outputs)} outputs repeated")
    return killed, repeated


@pytest.fixture
def seed() -> int:
    """A new seed, which a failure shows."""
    made = random.randrange(1_000_000)
    print(f"seed {made}")
    return made


def test_kafka_loses_no_output_and_repeats_those_above_the_committed_position(kafka: KafkaServer, seed: int) -> None:
    source, target = (Topic(kafka.url, unique("killed"), 1) for _ in range(2))
    source.create()
    target.create()

    def send(values: list[bytes]) -> None:
        first = int(values[0])
        keys = [b"%d" % ((first + number) % KEYS) for number in range(len(values))]
        produce(source, len(values), keys=keys, value=lambda number: b"%d" % (first + number))

    def read() -> list[bytes]:
        return [one.value() or b"" for one in records(target)]

    killed, repeated = judge(Killing(("kafka", kafka.url, source.name, target.name), send, read), seed)
    assert repeated <= killed * 2 * MAX_AHEAD


def test_jetstream_loses_and_repeats_no_output(nats_server: NatsServer, seed: int) -> None:
    source, target = unique("K"), unique("O")
    loop = asyncio.new_event_loop()
    client: Client = loop.run_until_complete(connect(nats_server.url))
    jetstream = client.jetstream()
    loop.run_until_complete(jetstream.add_stream(name=source, subjects=[f"{source}.>"]))
    loop.run_until_complete(jetstream.add_stream(name=target, subjects=[target], duplicate_window=120))

    def send(values: list[bytes]) -> None:
        async def publish() -> None:
            for value in values:
                await jetstream.publish(f"{source}.{int(value) % KEYS}", value)

        loop.run_until_complete(publish())

    found: list[bytes] = []

    def read() -> list[bytes]:
        async def rest() -> None:
            last = (await jetstream.stream_info(target)).state.last_seq
            new = [await jetstream.get_msg(target, sequence) for sequence in range(len(found) + 1, last + 1)]
            found.extend(message.data or b"" for message in new)

        loop.run_until_complete(rest())
        return found

    try:
        killed, repeated = judge(Killing(("jetstream", nats_server.url, source, target), send, read), seed)
        assert (killed, repeated) == (KILLS, 0)
    finally:
        for stream in (source, target):
            loop.run_until_complete(jetstream.delete_stream(stream))
        loop.run_until_complete(client.close())
        loop.close()
