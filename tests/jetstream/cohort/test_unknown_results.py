"""A write to the bucket without an answer, or the loss of the bucket during a move, loses no message."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, Literal

import pytest

import lanes
from lanes_jetstream.cohort.lease_store import bucket_name
from tests.jetstream.cohort_workload import FAST, CohortStream, Gate, Log, draining, members, settled
from tests.jetstream.proxy import Losses, Proxy
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


NEW: Final = b'"epoch":0,'


CLAIMED: Final = b'"epoch":1'
"""Text in a state: ``NEW`` of an epoch without an owner, ``CLAIMED`` of one that begins with the server's clock."""


ACQUIRED: Final = b'"epoch":null'


RELEASED: Final = b'"released":true'


@pytest.mark.parametrize("what", ["reply", pytest.param("request", marks=pytest.mark.slow)])
async def test_an_unknown_result_of_a_write_is_resolved(
    cohort_stream: CohortStream, what: Literal["request", "reply"]
) -> None:
    """If a write of any kind has no answer, the member reads the result and loses no message.

    Only missing writes are repeated, except for a ledger, whose fence makes a repeat safe.
    """
    stream, log, losses = cohort_stream, Log(), Losses()
    # Renewals every three seconds, and no end of a lease on a busy machine.
    stream.lease = 9.0
    keys = stream.a_key_each()
    gate = Gate(*keys)
    told: list[lanes.GroupEvent] = []
    kv = f"$KV.{bucket_name(stream.name, 'lanes')}."

    async def lost(*writes: tuple[str, bytes]) -> None:
        """Lose these writes, or their answers, and wait until they are."""
        for key, having in writes:
            losses.lose(what, kv + key, having)
        wanted = len(losses.lost) + len(writes)
        await until(lambda: len(losses.lost) == wanted)

    async with Proxy(stream.url, losses).open() as wire:
        a = lanes.Consumer(
            stream.source("a", where=wire.url), log.handler("a", gate), settings=FAST, on_event=told.append
        )
        b = lanes.Consumer(stream.source("b"), log.handler("b", gate), settings=FAST)
        async with members() as running:
            running.join(a)
            # Setup, heartbeat, plan, acquired lease, claimed epoch.
            await lost(("s.3", NEW), ("config", b""), ("m.a", b""), ("plan", b""), ("l.0", b""), ("s.1", CLAIMED))
            await settled(a, partitions=4)
            again = 1 if what == "reply" else 2
            assert (losses.count(kv + "l.0", ACQUIRED), losses.count(kv + "s.1", CLAIMED)) == (again, 2)
            await stream.publish(*keys, times=2)
            await until(lambda: gate.waiting == 4)
            tokens = {name: partition.epoch for name, partition in a.status().partitions.items()}
            # Renewals, and a heartbeat.
            await lost(("l.2", b""), ("m.a", b""))
            running.join(b)
            first, second = await draining(a, 2)
            before = losses.count(kv + f"s.{first}", CLAIMED)
            gate.open()
            # For one moving partition the ledger, for the other the release.
            await lost((f"s.{first}", CLAIMED), (f"l.{second}", RELEASED))
            await settled(a, b, partitions=4)
            assert losses.count(kv + f"s.{first}", CLAIMED) - before == 2
            assert losses.count(kv + f"l.{second}", RELEASED) == again
            await stream.publish(*keys)
            await log.handled(stream.published)
            kept = {name: partition.epoch for name, partition in a.status().partitions.items()}
            assert kept.items() <= tokens.items()
            # The last write is the departure of the member.
            losses.lose(what, kv + "m.a")
            await running.leave(a)
            await settled(b, partitions=4)
            assert losses.lost[-1] == kv + "m.a"
    assert sorted(event.name for event in told if event.partition is not None) == ["assigned"] * 4 + ["revoked"] * 4
    assert log.violations == []
    assert log.repeats == []
    assert len(log.runs) == stream.published


@pytest.mark.slow
@pytest.mark.parametrize("finished", [False, True], ids=["held", "finished"])
async def test_a_bucket_that_is_lost_during_a_drain_loses_no_message(
    cohort_stream: CohortStream, finished: bool
) -> None:
    """A draining member without its bucket gives up all partitions, and its messages run once more under higher
    tokens."""
    stream, log = cohort_stream, Log()
    keys = stream.a_key_each()
    gate = Gate(*keys)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=FAST)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        await running.hold(a, stream, gate, *keys, times=2)
        running.join(b)
        await draining(a, 2)
        generation = ((await stream.read("plan")) or {})["generation"]
        (bucket,) = await stream.buckets()
        await stream.api(f"STREAM.DELETE.{bucket}")
        if finished:
            gate.open()
        await until(lambda: gate.waiting == 0)
        gate.open()
        await stream.publish(*keys)
        await log.handled(stream.published)
        await settled(a, b, partitions=4)
        assert ((await stream.read("plan")) or {})["generation"] >= generation
        await stream.publish(*keys)
        await log.handled(stream.published)
    assert log.violations == []
    assert log.repeats == []
    epochs: defaultdict[int, list[int]] = defaultdict(list)
    for run in log.runs:
        epochs[run.partition].append(run.epoch)
    assert all(of_one == sorted(of_one) and len(set(of_one)) >= 2 for of_one in epochs.values())
