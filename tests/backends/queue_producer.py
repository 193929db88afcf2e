"""One producer of a partitioned queue as a process that a test kills: ``python -m tests.backends.queue_producer BROKER
URL QUEUE WIDTH PART FOLDER RATE``.

It publishes the events of its half of the cases in their order, ``RATE`` a second (0 = without a pause). The value of a
message is the number of the event. A confirmed number is written into a file, and after a kill the next process
continues after the numbers in the file. SIGTERM ends it after the confirmation of all sent events.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lanes
from demo.events import load
from lanes.clock import monotonic
from lanes.core.types import PartitionId
from lanes.history.recorder import Recorder

SEED: Final = 1
PARTS: Final = 2
_OPEN: Final = 500
"""Largest number of sent and unconfirmed events."""

Confirmed = Callable[[PartitionId, int], None]


class KafkaPublisher:
    """Publishes to topics."""

    def __init__(self, url: str) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": url, "enable.idempotence": True, "linger.ms": 5})

    async def open(self) -> None: ...

    async def publish(self, route: lanes.Route, value: bytes, confirmed: Confirmed) -> None:
        """Send an event; ``confirmed`` is called later."""

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            confirmed(PartitionId(route.name, message.partition()), message.offset())

        while len(self._producer) >= _OPEN:
            await asyncio.sleep(0.001)
            self._producer.poll(0)
        self._producer.produce(route.name, value=value, key=route.key, on_delivery=delivered)
        self._producer.poll(0)

    async def close(self) -> None:
        """Wait for all confirmations."""
        assert await asyncio.to_thread(self._producer.flush, 60) == 0


class JetStreamPublisher:
    """Publishes to subjects of a stream."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open: deque[tuple[asyncio.Future[Any], lanes.Route, Confirmed]] = deque()

    async def open(self) -> None:
        import nats

        self._client = await nats.connect(self._url)
        self._stream = self._client.jetstream()

    async def publish(self, route: lanes.Route, value: bytes, confirmed: Confirmed) -> None:
        """Send an event; ``confirmed`` is called later."""
        assert route.key is not None
        sent = await self._stream.publish_async(route.name, value, headers={"case": route.key.decode()})
        self._open.append((sent, route, confirmed))
        while self._open and (self._open[0][0].done() or len(self._open) >= _OPEN):
            await self._confirm()

    async def close(self) -> None:
        """Wait for all confirmations."""
        while self._open:
            await self._confirm()
        await self._client.close()

    async def _confirm(self) -> None:
        sent, route, confirmed = self._open.popleft()
        confirmed(PartitionId(route.name, route.partition), (await asyncio.wait_for(sent, 60)).seq)


async def main(broker: str, url: str, name: str, width: str, part: str, folder: str, rate: str) -> None:
    queue = lanes.PartitionedQueue(name, partitions=int(width))
    numbers = Path(folder, f"producer-{part}.confirmed")
    known = set(numbers.read_bytes().split(b"\n")) if numbers.exists() else set()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    history = Recorder(Path(folder, "history"), member=f"producer-{part}")
    history.open(source=name, concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=monotonic())
    publisher = KafkaPublisher(url) if broker == "kafka" else JetStreamPublisher(url)
    await publisher.open()
    events = load(None, None, SEED)
    with numbers.open("ab", buffering=0) as file:
        for number, event in enumerate(events):
            value = str(number).encode()
            if zlib.crc32(event.case.encode()) % PARTS != int(part) or value in known:
                continue

            def confirmed(
                place: PartitionId, position: int, value: bytes = value, case: bytes = event.case.encode()
            ) -> None:
                file.write(value + b"\n")
                history.produced(place, position, case, monotonic())

            await publisher.publish(queue.route_by_key(event.case), value, confirmed)
            if float(rate):
                history.flush()
                await asyncio.sleep(1 / float(rate))
            if stopped.is_set():
                break
        await publisher.close()
    history.close("stopped", monotonic())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
