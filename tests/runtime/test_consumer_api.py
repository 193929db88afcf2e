"""A consumer reports its readiness, health and status, and obeys pause, drain, unblock and park."""

from __future__ import annotations

import weakref
from typing import Any, get_type_hints

import anyio
import pytest

from lanes import ConfigError, Consumer, HandlerHalted, LanesError, Message, Nak, SourceError
from lanes.consumer import ConsumerOptions
from lanes.runtime.lifecycle import Lifecycle
from memsource import Group, GroupSource, MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.grouped import HandClock, group_of
from tests.fakes.support import Gated, acknowledge, consumer_of, fail, published, started, turns, until


def state(consumer: Consumer) -> tuple[bool, bool, bool]:
    """Readiness, activity and health, as probes read them."""
    return consumer.ready, consumer.active, consumer.healthy


@pytest.mark.parametrize("name", ["concurrency", "handler", "settings"])
def test_a_setting_that_is_assigned_to_a_consumer_is_refused(name: str) -> None:
    """It would have no effect."""
    consumer = consumer_of(MemorySource(MemoryBroker()), acknowledge)
    with pytest.raises(AttributeError, match=f"'Consumer' object has no attribute '{name}'"):
        setattr(consumer, name, 5)


def test_a_consumer_can_be_referenced_weakly() -> None:
    consumer = consumer_of(MemorySource(MemoryBroker()), acknowledge)
    assert weakref.ref(consumer)() is consumer


# --- ready, active, healthy


@pytest.mark.anyio
async def test_a_consumer_is_ready_once_open_and_active_while_it_owns_a_partition() -> None:
    group = Group(1)
    source = GroupSource(group, "m")
    source.block("open")
    consumer = consumer_of(source, acknowledge)
    assert state(consumer) == (False, False, False)
    async with started(consumer) as run:
        await until(lambda: source.called("open"))
        assert state(consumer) == (False, False, True)
        source.unblock("open")
        await until(lambda: consumer.ready)
        await until(lambda: consumer.active)
        async with started(consumer_of(GroupSource(group, "other"), acknowledge)) as other:
            await until(lambda: other.consumer.active or not consumer.active)
            await turns()
            # Two members share one partition: the hot standby is ready and healthy.
            states = sorted([state(consumer), state(other.consumer)])
            assert states == [(True, False, True), (True, True, True)]
            assert await other.stop() is None
        await until(lambda: consumer.active)
        assert await run.stop() is None
    assert state(consumer) == (False, False, True)


@pytest.mark.anyio
async def test_a_consumer_that_nobody_runs_is_unhealthy() -> None:
    # A program that forgets to await `run` must not answer its health check with success for ever.
    consumer = consumer_of(MemorySource(MemoryBroker()), acknowledge)
    assert consumer.health().reasons == ("not started: run() was not called",)
    async with started(consumer) as run:
        await until(lambda: consumer.ready)
        assert consumer.healthy
        assert await run.stop() is None
    assert consumer.healthy


@pytest.mark.anyio
async def test_a_start_that_does_not_end_makes_the_consumer_unhealthy() -> None:
    clock = HandClock()
    source = MemorySource(MemoryBroker())
    source.block("open")
    consumer = consumer_of(source, acknowledge, clock=clock, unhealthy_after=10.0)
    async with started(consumer) as run:
        await until(lambda: source.called("open"))
        clock.now += 10.0
        assert consumer.health().reasons == ()
        clock.now += 0.5
        assert consumer.health().reasons == ("the source is not open after 10.5 s",)
        source.unblock("open")
        await until(lambda: consumer.ready)
        assert consumer.healthy
        assert await run.stop() is None


@pytest.mark.anyio
async def test_an_old_unfinished_message_makes_the_consumer_unhealthy() -> None:
    clock = HandClock()
    handler = Gated()
    consumer = consumer_of(MemorySource(published("secret", "b")), handler, clock=clock, unhealthy_after=10.0)
    async with started(consumer) as run:
        await until(lambda: handler.running == 2)
        assert consumer.healthy
        clock.now += 10.0
        assert consumer.health().reasons == ()
        clock.now += 0.5
        (reason,) = consumer.health().reasons
        assert reason.startswith("the oldest unfinished message is too old: memory/0 position 0, key ")
        assert reason.endswith(", attempt 1, 10.5 s old")
        assert "secret" not in repr(consumer.health())
        assert (bool(consumer.health()), consumer.healthy) == (False, False)
        handler.let(0)
        await until(lambda: handler.ended == [0])
        (reason,) = consumer.health().reasons
        assert "position 1" in reason
        handler.let(1)
        await until(lambda: consumer.healthy)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_the_health_tells_that_the_oldest_message_waits_for_its_next_attempt() -> None:
    async def busy(message: Message) -> None:
        raise Nak("the bank is busy", delay=3_600)

    clock = HandClock()
    consumer = consumer_of(MemorySource(published("a")), busy, clock=clock, attempts=2, unhealthy_after=10.0)
    async with started(consumer) as run:
        await until(lambda: consumer.status().held == 1)
        clock.now += 10.5
        (reason,) = consumer.health().reasons
        assert reason.endswith(", attempt 1, 10.5 s old; it waits for its next attempt, in 3589.5 s")
        assert await run.stop() is None


@pytest.mark.anyio
async def test_blocked_lanes_make_the_consumer_unhealthy() -> None:
    clock = HandClock()
    consumer = consumer_of(MemorySource(published("a", "b", "a")), fail, clock=clock, poison="block")
    async with started(consumer) as run:
        await until(lambda: consumer.ready and consumer.status().blocked == 2)
        (reason,) = consumer.health().reasons
        assert reason.startswith("2 lane(s) blocked, the first: memory/0 position 0, key ")
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("poison", ["skip", "block_and_dlq"])
async def test_unwritten_dead_letters_make_the_consumer_unhealthy(poison: Any) -> None:
    broker = published("a")
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.block("put")
    consumer = consumer_of(MemorySource(broker), fail, dead_letters=dead_letters, poison=poison)
    async with started(consumer) as run:
        await until(lambda: dead_letters.called("put"))
        assert consumer.status().parking == 1
        (reason,) = consumer.health().reasons
        assert reason.startswith("1 lane(s) parking, the first: memory/0 position 0, key ")
        dead_letters.unblock("put")
        await until(lambda: consumer.status().parking == 0)
        assert consumer.healthy == (poison == "skip")
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("failing", ["handler", "open", "dead_letters"])
async def test_health_names_the_error_that_stopped_the_consumer(failing: str) -> None:
    broker = published("a")
    source, dead_letters = MemorySource(broker), MemoryDeadLetters(broker)
    if failing == "open":
        source.fail("open", SourceError("no server"))
    elif failing == "dead_letters":
        dead_letters.fail("open", SourceError("no server"))
    consumer = consumer_of(source, fail, dead_letters=dead_letters, poison="exit")
    error = HandlerHalted if failing == "handler" else SourceError
    with pytest.raises(error):
        await consumer.run()
    assert consumer.health().reasons == (f"stopped by {error.__name__}",)


# --- status


@pytest.mark.anyio
async def test_the_status_of_a_consumer_that_commits_has_its_positions() -> None:
    group = group_of("abcd", partitions=1)
    handler = Gated(free=[b"b"])
    consumer = consumer_of(GroupSource(group, "m"), handler, max_ahead=100, commit_interval=0.0)
    async with started(consumer) as run:
        await until(lambda: group.committed(0).completed == ((1, 2),))
        status = consumer.status()
        partition = status.partitions["memory/0"]
        assert (partition.epoch, partition.floor, partition.holes, partition.draining) == (1, 0, 3, False)
        assert (partition.confirmed, partition.ahead, partition.ahead_reached) == (0, 4, False)
        assert (status.paused, status.blocked, status.settled) == (False, 0, 1)
        run.consumer.stop()
        assert consumer.status().partitions["memory/0"].draining
        handler.let(0, 2, 3)
        assert await run.end() is None
    assert consumer.status().partitions == {}


@pytest.mark.anyio
async def test_the_status_of_a_consumer_that_acknowledges_has_its_counts() -> None:
    broker = published("a", "b")
    handler = Gated(free=[b"a"])
    consumer = consumer_of(MemorySource(broker), handler)
    async with started(consumer) as run:
        await until(lambda: broker.acked() == [0] and consumer.status().partitions["memory/0"].floor == 1)
        partition = consumer.status().partitions["memory/0"]
        assert (partition.confirmed, partition.ahead, partition.ahead_reached) == (None, None, False)
        assert (partition.holes, partition.epoch) == (1, 1)
        assert "b'" not in repr(consumer.status())
        handler.let(1)
        assert await run.stop() is None


# --- pause and resume


@pytest.mark.anyio
async def test_a_paused_consumer_takes_no_messages() -> None:
    broker = published("a")
    handler = Gated(free=[b"a", b"b"])
    consumer = consumer_of(MemorySource(broker), handler)
    async with started(consumer) as run:
        await until(lambda: broker.acked() == [0])
        consumer.pause()
        consumer.pause()
        assert consumer.status().paused
        await turns()
        broker.publish(key="b")
        await turns()
        assert handler.started == [0]
        consumer.resume()
        await until(lambda: broker.acked() == [0, 1])
        assert not consumer.status().paused
        assert await run.stop() is None


@pytest.mark.anyio
async def test_messages_in_flight_continue_during_a_pause() -> None:
    broker = published("a", "a")
    handler = Gated()
    consumer = consumer_of(MemorySource(broker), handler)
    async with started(consumer) as run:
        await until(lambda: handler.running == 1)
        consumer.pause()
        handler.let(0, 1)
        await until(lambda: broker.acked() == [0, 1])
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_pause_before_the_run_holds_at_its_start() -> None:
    broker = published("a")
    handler = Gated(free=[b"a"])
    consumer = consumer_of(MemorySource(broker), handler)
    consumer.pause()
    async with started(consumer) as run:
        await until(lambda: consumer.active)
        await turns()
        assert handler.started == []
        consumer.resume()
        await until(lambda: broker.acked() == [0])
        assert await run.stop() is None
    other = consumer_of(MemorySource(published("a")), acknowledge)
    other.pause()
    other.resume()
    async with started(other) as run:
        await until(lambda: other.active and other.status().settled == 1)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_pause_outlives_assignments() -> None:
    group = Group(2)
    for number, key in enumerate("ab"):
        group.publish(key=key, partition=number)
    source = GroupSource(group, "m")
    handler = Gated(free=[b"a", b"b"])
    consumer = consumer_of(source, handler, commit_interval=0.0)
    consumer.pause()
    async with started(consumer) as run:
        await until(lambda: consumer.active and len(consumer.status().partitions) == 2)
        group.rebalance()
        await until(lambda: [p.epoch for p in consumer.status().partitions.values()] == [3, 4])
        await turns()
        assert handler.started == []
        # A client that prefetches is told which partitions to pause.
        rooms = [call.room for call in source.called("receive") if call.room is not None]
        assert {partition.epoch for partition in rooms[-1].paused} == {3, 4}
        consumer.resume()
        await until(lambda: group.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_drain_ignores_the_pause() -> None:
    broker = published("a", "b")
    handler = Gated()
    consumer = consumer_of(MemorySource(broker), handler)
    async with started(consumer) as run:
        await until(lambda: handler.running == 2)
        consumer.pause()
        handler.let(0, 1)
        assert await run.stop() is None
    assert broker.unfinished == 0


# --- drain


@pytest.mark.anyio
async def test_drain_waits_until_everything_has_ended() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated()
    consumer = consumer_of(source, handler)
    async with started(consumer) as run:
        await until(lambda: handler.running == 1)
        with anyio.move_on_after(0.01) as waited:
            await consumer.drain()
        assert waited.cancelled_caught
        # The drain continues without a caller that waits.
        assert consumer.status().partitions["memory/0"].draining
        handler.let(0)
        await consumer.drain()
        assert source.called("aclose")
        assert not consumer.ready
        await consumer.drain()
        assert await run.end() is None
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_drain_before_the_run_lets_it_end_at_once() -> None:
    broker = published("a")
    source = MemorySource(broker)
    consumer = consumer_of(source, acknowledge)
    with anyio.fail_after(5):
        await consumer.drain()
        await consumer.run()
        await consumer.drain()
    assert broker.unfinished == 1
    assert source.called("aclose")


@pytest.mark.anyio
async def test_a_drain_after_a_failed_start_returns() -> None:
    source = MemorySource(published("a"))
    source.fail("open", SourceError("no server"))
    consumer = consumer_of(source, acknowledge)
    with pytest.raises(SourceError):
        await consumer.run()
    with anyio.fail_after(5):
        await consumer.drain()


# --- calls from another thread, unblock and park


def asked(consumer: Consumer, name: str) -> object:
    found = getattr(consumer, name)
    return found() if callable(found) else found


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["stop", "ready", "active", "health"])
async def test_a_question_from_another_thread_survives_the_end_of_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Consumer(MemorySource(MemoryBroker(1)), Gated())) as run:
        await until(lambda: run.consumer.active)
        # The run is there at the first read, and has ended by the second.
        looks = iter([run.consumer._life.run])
        with monkeypatch.context() as patch:
            patch.setattr(Lifecycle, "active_run", property(lambda life: next(looks, None)))
            asked(run.consumer, name)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_unblock_and_park_need_a_running_consumer() -> None:
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
        # A cancelled run leaves its lanes, but no worker for them.
        run.scope.cancel()
        await run.end()
    with pytest.raises(LanesError, match="has stopped: unblock a key while it runs"):
        consumer.unblock("a")
    with pytest.raises(LanesError, match="has stopped: park a key while it runs"):
        consumer.park("a")
    assert broker.dead_letters == []


@pytest.mark.anyio
async def test_park_without_dead_letters_is_refused() -> None:
    consumer = consumer_of(MemorySource(published("a")), fail, poison="block")
    with pytest.raises(ConfigError, match="park needs dead letters, or messages are lost: pass dead_letters="):
        consumer.park("a")


def test_run_and_main_take_the_keyword_arguments_of_a_consumer() -> None:
    options = get_type_hints(ConsumerOptions)
    parameters = get_type_hints(Consumer.__init__)
    del parameters["source"], parameters["handler"], parameters["clock"], parameters["return"]
    assert options == parameters
