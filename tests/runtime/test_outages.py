"""A source whose broker answers no request makes an idle consumer unhealthy, and leaves it ready."""

from __future__ import annotations

import anyio
import pytest

from lanes import LanesError
from lanes.observe.health import OUTAGE_AFTER
from lanes.source import BrokerContact, Outage
from memsource import MemoryBroker, MemorySource
from tests.fakes.grouped import HandClock
from tests.fakes.support import acknowledge, consumer_of, started, turns, until


class OutageSource(MemorySource):
    """A source that reports an outage."""

    found: Outage | None = None
    waits = False

    def outage(self) -> Outage | None:
        return self.found

    def rejoining(self) -> bool:
        return self.waits


@pytest.mark.anyio
async def test_an_outage_makes_an_idle_consumer_unhealthy_and_leaves_it_ready() -> None:
    source = OutageSource(MemoryBroker())
    consumer = consumer_of(source, acknowledge)
    assert consumer.status().outage is None
    async with started(consumer) as run:
        await until(lambda: consumer.ready)
        assert (consumer.status().outage, consumer.health().no_broker) == (0.0, False)
        # A client that reconnects within seconds is no fault, and a probe may ask already.
        source.found = Outage(OUTAGE_AFTER, "refused")
        assert (consumer.health().reasons, consumer.health().no_broker) == ((), True)
        source.found = Outage(42.04, "_ALL_BROKERS_DOWN: 1/1\nbrokers are down" + "!" * 1_000)
        (reason,) = consumer.health().reasons
        assert reason.startswith("no broker answers for 42.0 s: _ALL_BROKERS_DOWN: 1/1\\nbrokers are down!")
        assert len(reason) < 600
        assert (consumer.ready, consumer.healthy, consumer.health().no_broker) == (True, False, True)
        assert consumer.status().outage == 42.04
        source.found = Outage(42.0)
        assert consumer.health().reasons == ("no broker answers for 42.0 s: the client reports no error",)
        source.found = None
        assert (consumer.healthy, consumer.status().outage) == (True, 0.0)
        source.found = Outage(42.0)
        assert await run.stop() is None
    assert (consumer.healthy, consumer.status().outage) == (True, None)


@pytest.mark.anyio
async def test_a_wait_for_the_group_after_an_outage_is_shown_and_leaves_the_consumer_healthy() -> None:
    source = OutageSource(MemoryBroker())
    consumer = consumer_of(source, acknowledge)
    source.waits = True
    assert not consumer.health().rejoining
    async with started(consumer) as run:
        await until(lambda: consumer.ready)
        assert (consumer.healthy, consumer.health().rejoining) == (True, True)
        source.waits = False
        assert not consumer.health().rejoining
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_consumer_whose_group_has_not_answered_since_the_start_is_healthy_and_not_ready() -> None:
    # No partition: the group may assign none.
    source = OutageSource(MemoryBroker(), assigned=[])
    consumer = consumer_of(source, acknowledge)
    source.waits = True
    waited: list[bool] = []

    async def wait() -> None:
        await consumer.until_ready()
        waited.append(consumer.ready)

    async with anyio.create_task_group() as tasks, started(consumer) as run:
        await consumer.opened()
        tasks.start_soon(wait)
        await turns()
        assert (consumer.ready, consumer.healthy, consumer.health().rejoining, waited) == (False, True, True, [])
        source.waits = False
        assert (consumer.ready, consumer.active, consumer.health().rejoining) == (True, False, False)
        await until(lambda: waited == [True])
        assert await run.stop() is None


@pytest.mark.anyio
async def test_until_ready_fails_if_the_run_ends_before_the_group_has_answered() -> None:
    source = OutageSource(MemoryBroker(), assigned=[])
    consumer = consumer_of(source, acknowledge)
    source.waits = True
    caught: list[LanesError] = []

    async def wait() -> None:
        try:
            await consumer.until_ready()
        except LanesError as error:
            caught.append(error)

    async with anyio.create_task_group() as tasks, started(consumer) as run:
        await consumer.opened()
        tasks.start_soon(wait)
        await turns()
        assert await run.stop() is None
    assert "run() ended before the group had answered" in str(caught[0])


@pytest.mark.anyio
async def test_a_shorter_unhealthy_after_applies_to_an_outage_too() -> None:
    source = OutageSource(MemoryBroker())
    consumer = consumer_of(source, acknowledge, unhealthy_after=5.0)
    async with started(consumer) as run:
        await until(lambda: consumer.ready)
        source.found = Outage(5.0)
        assert consumer.health().reasons == ()
        source.found = Outage(5.1)
        assert consumer.health().reasons == ("no broker answers for 5.1 s: the client reports no error",)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_source_that_reports_no_outage_has_no_value_for_it() -> None:
    consumer = consumer_of(MemorySource(MemoryBroker()), acknowledge)
    async with started(consumer) as run:
        await until(lambda: consumer.ready)
        assert (consumer.status().outage, consumer.health().no_broker) == (None, False)
        assert not consumer.health().rejoining
        assert await run.stop() is None


# --- when requests without an answer are an outage


def test_an_outage_needs_a_request_that_was_sent_after_a_failure() -> None:
    clock = HandClock()
    contact = BrokerContact(clock)
    began = clock.now
    clock.now += 5.0
    # Both requests waited while the process was frozen.
    contact.unanswered(began, "timed out")
    contact.unanswered(began, "timed out")
    assert contact.outage() is None
    sent = clock.now
    clock.now += 5.0
    contact.unanswered(sent, "timed out again")
    assert contact.outage() == (10.0, "timed out again")
    clock.now += 1.0
    assert contact.outage() == (11.0, "timed out again")
    contact.answered()
    assert contact.outage() is None


def test_a_failure_of_an_older_request_than_the_last_answer_is_no_sign() -> None:
    clock = HandClock()
    contact = BrokerContact(clock)
    sent = clock.now
    clock.now += 1.0
    contact.answered()
    clock.now += 4.0
    contact.unanswered(sent, "no leader")
    # The first request that counts.
    contact.unanswered(clock.now, "no leader")
    assert contact.outage() is None


def test_an_outage_has_the_newest_error_of_the_client() -> None:
    clock = HandClock()
    contact = BrokerContact(clock)
    contact.unanswered(clock.now, "timed out")
    contact.unanswered(clock.now, "timed out")
    clock.now += 10.0
    assert contact.outage("refused", 3.0) == (10.0, "refused")
    # An error from before the outage, or of an unknown time, is not its cause.
    assert contact.outage("refused", 10.5) == (10.0, "timed out")
    assert contact.outage("refused") == (10.0, "timed out")
    assert contact.outage("", 3.0) == (10.0, "timed out")
