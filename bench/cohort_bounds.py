"""An exclusive cohort on a real server with one stuck key: delay of the other keys, memory, and size of the record.

Stuck key: a member with 64 partitions receives messages at a fixed rate. The handler of one key hangs until the
handlers of all other keys have ended. The figure is the p99 of the time from the publishing to the end of the handler,
for the other keys. The baseline is the same run without the hang.

Memory and record: the member receives 1,000,000 messages of 1,000 keys, and the handler of one key hangs.

- Memory: the figure is the peak of the process at the end. The baseline is the peak after the first fifth of the
  messages. The goal adds the memory of the messages that a ledger may have to store.
- Record: the figure is the size in bytes of the stored state for the partition with the stuck key. The baseline is the
  size of a state without an unfinished message. The goal adds a sequence for each message that may be in flight.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from nats.aio.client import Client

import lanes
from bench.alone import alone
from bench.cohort_members import DividedStream, feeding, key_of, stamp, until
from bench.figures import Effort, Figure, Pair, cost, middle
from bench.kafka_bounds import peak
from lanes import Message, Settings
from lanes.core.cohort.ledger import Done
from lanes.core.cohort.records import State, encode, state_key
from lanes_jetstream.cohort.lease_store import bucket_name
from lanes_jetstream.cohort.partitioning import partition_of
from tests.components import running

PARTITIONS: Final = 64
STUCK_KEY: Final = key_of(0)

STUCK_GOAL: Final = 1.25
STUCK_PAIRS_MORE: Final = 2
STUCK_KEYS, STUCK_MESSAGES, STUCK_WAIT, PER_SECOND = 100, 4_000, 0.001, 2_000.0

PASSING_KEYS, PASSING, IN_FLIGHT = 1_000, 1_000_000, 2_000
# Memory of a message in a ledger: a dict entry, an object of four fields and a number, in a heap that is 2/3 full.
OUTSTANDING_BYTES: Final = 400


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases on a new server."""
    with running("nats") as urls:
        url = urls["nats"]
        stuck = middle(asyncio.run(_stuck_pairs(url, effort)))
        count = effort.messages(PASSING)
        asyncio.run(_fill(url, count))
        passed = alone(pass_by, url, count)
    added = IN_FLIGHT * OUTSTANDING_BYTES / 2**20
    least = len(encode(State(passed.epoch, Done(count, ()))))
    most = least + IN_FLIGHT * len(f"{count},")
    return [
        cost("cohort-bounds stuck key with 1 % of the traffic", "ms to the end, p99 of the others", *stuck).within(
            STUCK_GOAL
        ),
        cost("cohort-bounds memory", "MiB peak", passed.last, passed.first, passed.first + added),
        cost("cohort-bounds record", "bytes", float(passed.record), float(least), float(most)),
    ]


# --- one stuck key


async def _stuck_pairs(url: str, effort: Effort) -> list[Pair]:
    client = Client()
    await client.connect(url)
    count = effort.messages(STUCK_MESSAGES)
    measured = []
    for number in range(effort.repeats + STUCK_PAIRS_MORE):
        before = await _p99(DividedStream(url, f"free-{number}", PARTITIONS), client, count, hangs=False)
        measured.append(
            (await _p99(DividedStream(url, f"stuck-{number}", PARTITIONS), client, count, hangs=True), before)
        )
    await client.close()
    return measured


async def _p99(stream: DividedStream, client: Client, count: int, *, hangs: bool) -> float:
    """Return the p99 of the milliseconds from publishing to the handler's end, for the keys that are not stuck."""
    times: list[int] = []
    ended = asyncio.Event()
    others = sum(key_of(number % STUCK_KEYS) != STUCK_KEY for number in range(count))

    async def handler(message: Message) -> None:
        if message.key == STUCK_KEY.encode():
            if hangs:
                await ended.wait()
            return
        await asyncio.sleep(STUCK_WAIT)
        times.append(time.monotonic_ns() - stamp(message.value))
        if len(times) == others:
            ended.set()

    await stream.create(client, storage="memory")
    consumer = lanes.Consumer(stream.member("alone"), handler)
    async with consumer:
        await until(lambda: consumer.ready and len(consumer.status().partitions) == PARTITIONS, "an assignment")
        with feeding(stream, count, STUCK_KEYS, PER_SECOND):
            await ended.wait()
    await stream.delete(client)
    return sorted(times)[len(times) * 99 // 100] / 1e6


# --- memory and record


class Passed(NamedTuple):
    """Peaks of memory in MiB after a fifth and at the end, epoch of the stuck partition, and bytes of its record."""

    first: float
    last: float
    epoch: int
    record: int


async def _fill(url: str, count: int) -> None:
    client = Client()
    await client.connect(url)
    stream = DividedStream(url, "passing", PARTITIONS)
    await stream.create(client, storage="memory")
    await stream.fill(client, count, PASSING_KEYS)
    await client.close()


def pass_by(url: str, count: int) -> Passed:
    """Handle the whole stream except one key, whose handler hangs at the first message."""
    return asyncio.run(_pass_by(DividedStream(url, "passing", PARTITIONS), count))


async def _pass_by(stream: DividedStream, count: int) -> Passed:
    ended, passed, epoch = asyncio.Event(), 0, 0
    others = sum(key_of(number % PASSING_KEYS) != STUCK_KEY for number in range(1, count + 1))
    fifth = max(1, others // 5)
    peaks: list[float] = []

    async def handler(message: Message) -> None:
        nonlocal passed, epoch
        if message.key == STUCK_KEY.encode():
            epoch = message.epoch
            await ended.wait()
            return
        passed += 1
        if passed in (fifth, others):
            peaks.append(peak())
            if passed == others:
                ended.set()

    client = Client()
    await client.connect(stream.url)
    settings = Settings(max_in_flight=IN_FLIGHT, unhealthy_after=1e9)
    async with lanes.Consumer(stream.member("alone"), handler, settings=settings):
        await ended.wait()
        key = state_key(partition_of([STUCK_KEY], PARTITIONS))
        bucket = await client.jetstream().key_value(bucket_name(stream.name, "lanes"))
        record = len((await bucket.get(key)).value or b"")
    await client.close()
    return Passed(peaks[0], peaks[-1], epoch, record)
