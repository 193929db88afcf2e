"""What a consumer says about itself: counts and positions; its ``repr`` has neither keys nor payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lanes.core.engine import Engine
from lanes.core.lane import PARKING
from lanes.core.types import Message


@dataclass(frozen=True, kw_only=True)
class Oldest:
    """The unfinished message that was delivered first. ``age`` is seconds since its delivery.

    ``key`` is the key itself, the user's data, and therefore in no ``repr``.
    """

    partition: str
    position: int
    attempt: int
    age: float
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Status:
    """A snapshot of one consumer.

    ``in_flight``, ``in_flight_bytes`` and their bounds and peaks; ``running`` handlers; ``ready`` lanes waiting
    for a worker; ``held`` lanes waiting for a retry; ``parking`` lanes whose dead letter is not confirmed yet.
    ``settled``, ``retries``, ``dead_lettered``, ``zombies`` and ``redelivered`` (by cause) count since the start.
    ``floors``: per partition the position below which nothing delivered is unfinished.
    """

    in_flight: int
    max_in_flight: int
    peak_in_flight: int
    in_flight_bytes: int
    max_in_flight_bytes: int
    peak_in_flight_bytes: int
    running: int
    concurrency: int
    ready: int
    held: int
    parking: int
    taking: bool
    settled: int
    retries: int
    dead_lettered: int
    zombies: int
    redelivered: Mapping[str, int]
    floors: Mapping[str, int]
    oldest: Oldest | None


def snapshot(engine: Engine, now: float, *, dead_lettered: int, redelivered: Mapping[str, int]) -> Status:
    """The status of an engine at ``now``. O(in flight)."""
    flow = engine.flow
    parking = sum(1 for lane in engine.lanes() if lane.head.state == PARKING)
    oldest = engine.oldest()
    return Status(
        in_flight=flow.in_flight,
        max_in_flight=flow.max_in_flight,
        peak_in_flight=flow.peak,
        in_flight_bytes=flow.bytes,
        max_in_flight_bytes=flow.max_bytes,
        peak_in_flight_bytes=flow.peak_bytes,
        running=engine.running,
        concurrency=engine.concurrency,
        ready=engine.ready,
        held=len(engine.lanes()) - parking,
        parking=parking,
        taking=flow.taking,
        settled=engine.settled_count,
        retries=engine.retries,
        dead_lettered=dead_lettered,
        zombies=engine.zombies,
        redelivered=dict(redelivered),
        floors={str(p.id): p.ledger.floor() for p in engine.partitions.values()},
        oldest=None if oldest is None else _oldest(oldest, now),
    )


def _oldest(message: Message, now: float) -> Oldest:
    return Oldest(
        partition=str(message.partition.id),
        position=message.position,
        attempt=message.attempt,
        age=now - message.received,
        key=message.key,
    )
