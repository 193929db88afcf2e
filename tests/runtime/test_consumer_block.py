"""The consumer as an async context manager, and several of them."""

from __future__ import annotations

from typing import Any

import pytest

from lanes import ConfigError, HandlerHalted, LanesError
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import Gated, living, published, started, turns, until
from tests.runtime.test_consumer_api import acknowledge, acknowledge_all, consumer_of, fail


@pytest.mark.anyio
async def test_unblock_and_park_are_for_a_running_consumer() -> None:
    broker = published("a")
    consumer = consumer_of(MemorySource(broker), fail, poison="block", dead_letters=MemoryDeadLetters(broker))
    with pytest.raises(LanesError, match="has not started: unblock a key after run"):
        consumer.unblock("a")
    with pytest.raises(LanesError, match="has not started: park a key after run"):
        consumer.park("a")
    async with started(consumer) as run:
        await until(lambda: consumer.active and consumer.status().blocked)
        with pytest.raises(TypeError, match="a key must be"):
            consumer.unblock(1.5)  # type: ignore[arg-type]
        assert (consumer.unblock("b"), consumer.park("b"), consumer.park(None)) == (0, 0, 0)
        # At once: the lanes are still there, and nobody works for them any more.
        run.scope.cancel()
        await run.end()
    with pytest.raises(LanesError, match="has stopped: unblock a key while it runs"):
        consumer.unblock("a")
    with pytest.raises(LanesError, match="has stopped: park a key while it runs"):
        consumer.park("a")
    assert broker.dead_letters == []


@pytest.mark.anyio
async def test_to_park_without_dead_letters_is_refused() -> None:
    consumer = consumer_of(MemorySource(published("a")), fail, poison="block")
    with pytest.raises(ConfigError, match="park needs dead letters, or messages are lost: pass dead_letters="):
        consumer.park("a")


# --- several in one process


@pytest.mark.anyio
async def test_several_consumers_run_in_one_process() -> None:
    before = living()
    brokers = [published(*"abcabc") for _ in range(3)]
    sources = [MemorySource(broker) for broker in brokers]
    halted = published("a", "b")
    async with (
        started(consumer_of(MemorySource(halted), fail)) as failing,
        started(consumer_of(sources[0], acknowledge)) as one,
        started(consumer_of(sources[1], lambda message: None)) as two,
        started(consumer_of(sources[2], acknowledge_all, batch=3)) as three,
    ):
        # One that fails is no business of the others.
        assert isinstance(await failing.end(), HandlerHalted)
        await until(lambda: not any(broker.unfinished for broker in brokers))
        for run in (one, two, three):
            await until(lambda run=run: run.consumer.status().settled == 6)  # type: ignore[misc]
            assert await run.stop() is None
    assert [broker.acked() for broker in brokers] == [[0, 1, 2, 3, 4, 5]] * 3
    assert living() == before


# --- the settings reach it


@pytest.mark.anyio
async def test_a_batch_above_what_the_broker_allows_is_refused_before_the_first_message() -> None:
    broker = MemoryBroker(max_unacked=5)
    broker.publish()
    source = MemorySource(broker)
    with pytest.raises(ConfigError, match="batch=6 is above max_in_flight=5"):
        await consumer_of(source, acknowledge, batch=6).run()
    assert broker.deliveries(0) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("lanes", [1, 2])
async def test_keys_that_share_a_lane_wait_for_each_other(lanes: int) -> None:
    keys = [f"k{number}" for number in range(12)]
    broker = published(*keys)
    handler = Gated()
    consumer = consumer_of(MemorySource(broker), handler, lanes=lanes, concurrency=12)
    async with started(consumer) as run:
        await until(lambda: handler.running == lanes)
        await turns()
        assert handler.running == lanes
        handler.let(*range(12))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "running"),
    [
        ({}, [0, 1, 3, 4]),
        ({"keyless": "one_lane"}, [0, 1, 3]),
        ({"order": "partition"}, [0]),
        ({"order": "none"}, [0, 1, 2, 3, 4]),
    ],
)
async def test_what_waits_for_what(settings: dict[str, Any], running: list[int]) -> None:
    broker = published("a", "b", "a", None, None)
    handler = Gated()
    async with started(consumer_of(MemorySource(broker), handler, concurrency=9, **settings)) as run:
        await until(lambda: len(handler.started) == len(running))
        await turns()
        assert sorted(handler.started) == running
        handler.let(*range(5))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


def test_a_timeout_that_nothing_can_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'timeout=1 with sync_handlers="inline": .*; use sync_handlers="threads"'):
        consumer_of(MemorySource(MemoryBroker()), lambda message: None, timeout=1.0, sync_handlers="inline")
    consumer_of(MemorySource(MemoryBroker()), acknowledge, timeout=1.0, sync_handlers="inline")


@pytest.mark.parametrize("decode", [5, acknowledge])
def test_decode_is_a_plain_function(decode: Any) -> None:
    with pytest.raises(ConfigError, match=r"^decode=.*: pass a plain function of one message$"):
        consumer_of(MemorySource(MemoryBroker()), acknowledge, decode=decode)
