"""The serial loop: a plain consumer with the same handler, as a baseline for the demo.

The demo's parent runs ``python -m demo.workers.serial`` with a ``WorkerConfig`` in the environment. The loop prints one
JSON object with the number of handled events and their total time in seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from demo.child import end_with_parent
from demo.config import ATTEMPTS, BrokerName, WorkerConfig
from demo.workers.client import Client
from demo.workers.handler import Approve, Declined
from lanes.queues.partitioned import PartitionedQueue

_BATCH: Final = 50
_FETCH_TIMEOUT: Final = 2.0

_JOIN_TIMEOUT: Final = 20.0
"""Most seconds until the first message. The first group of a new broker needs some seconds."""


def main() -> int:
    """Run the loop for the configured seconds, or until no message arrives. Return 0, or 1 after an error. Blocks."""
    end_with_parent()
    try:
        config = WorkerConfig.load()
        events, seconds = asyncio.run(_loop(config))
    except Exception as error:
        # The broker's client may raise any class of error. The parent quotes this line.
        print(f"lanes: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"events": events, "seconds": seconds}), flush=True)
    return 0


async def _loop(config: WorkerConfig) -> tuple[int, float]:
    client = Client(config.service, config.token)
    await client.connect()
    handler = Approve(client, config.faults)
    events = 0
    begun = last = 0.0
    payloads = _READERS[config.broker](config)
    async with aclosing(payloads):
        async for payload in payloads:
            # The time begins with the first message, because joining a group takes long and is no work.
            begun = begun or time.monotonic()
            await _handle(handler, payload)
            events += 1
            last = time.monotonic()
            if last >= begun + config.seconds:
                break
    await client.close()
    return events, last - begun


async def _from_jetstream(config: WorkerConfig) -> AsyncGenerator[bytes, None]:
    """Yield the messages until none arrives for ``_FETCH_TIMEOUT`` seconds.

    Acknowledge each message before the next message.
    """
    import nats
    import nats.errors
    from nats.js.api import AckPolicy, ConsumerConfig

    connection = await nats.connect(config.server)
    subscription = await connection.jetstream().pull_subscribe(
        "", stream=config.stream, config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT)
    )
    try:
        while True:
            for message in await subscription.fetch(_BATCH, timeout=_FETCH_TIMEOUT):
                yield message.data
                await message.ack()
    except nats.errors.TimeoutError:
        pass
    finally:
        await connection.close()


async def _from_kafka(config: WorkerConfig) -> AsyncGenerator[bytes, None]:
    """Yield the messages of all topics, read by a separate group, and commit after every batch."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": config.server,
            "group.id": f"{config.durable}-one-at-a-time",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe(list(PartitionedQueue(config.queue, config.width).names))
    patience = _JOIN_TIMEOUT
    try:
        # A call for several messages waits for all of them, so the first call asks for one message.
        while first := await asyncio.to_thread(consumer.consume, 1, patience):
            patience = _FETCH_TIMEOUT
            for message in first + consumer.consume(_BATCH - 1, 0):
                if (value := message.value()) is not None:
                    yield value
            consumer.commit(asynchronous=True)
    finally:
        consumer.close()


async def _from_postgres(config: WorkerConfig) -> AsyncGenerator[bytes, None]:
    """Yield the messages of the partitions in sequence, and store the position after every batch."""
    from psycopg import AsyncConnection, sql

    from lanes_postgres import Log
    from lanes_postgres.log.reading import LogTables, Wanted
    from lanes_postgres.steps import perform_async

    table = sql.Identifier(config.stream, "one_at_a_time")
    async with await AsyncConnection.connect(config.server, autocommit=True) as connection:
        facts = await perform_async(connection, Log(config.stream, schema=config.stream).finding(), config.stream)
        tables = LogTables(config.stream, facts.id, facts.partitions)
        await connection.execute(
            sql.SQL("CREATE TABLE {} (partition integer PRIMARY KEY, position bigint NOT NULL)").format(table)
        )
        store = sql.SQL(
            "INSERT INTO {} VALUES (%s, %s) ON CONFLICT (partition) DO UPDATE SET position = excluded.position"
        ).format(table)
        for partition in range(facts.partitions):
            position = 0
            while messages := (await tables.fetch(connection, [Wanted(partition, position, _BATCH)])).get(partition):
                for message in messages:
                    yield message.value
                position = messages[-1].position + 1
                await connection.execute(store, (partition, position))


_READERS: Final[dict[BrokerName, Callable[[WorkerConfig], AsyncGenerator[bytes, None]]]] = {
    "jetstream": _from_jetstream,
    "kafka": _from_kafka,
    "postgres": _from_postgres,
}


async def _handle(handler: Approve, payload: bytes) -> None:
    """Handle one event, with retries and without a pause between the attempts."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await handler.handle(payload, attempt, 0)
        except Declined:
            continue
        return


if __name__ == "__main__":
    sys.exit(main())
