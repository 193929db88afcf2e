"""A message that is given up is settled only after its dead letter is confirmed."""

from __future__ import annotations

import anyio
import pytest

from lanes import ConfigError, HandlerHalted, Message, Settings, SourceError
from lanes.dead_letter import dead_letter_id
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import consumer_of, published, settled, started, turns, until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.dead_lettering.DEAD_LETTER_RETRY", (0.001, 0.002))


async def refuse_a(message: Message) -> None:
    if message.key == b"a" and message.value == b"0":
        raise ValueError("poison")


@pytest.mark.anyio
async def test_a_dead_letter_is_confirmed_before_its_message_is_settled() -> None:
    broker = published("a", "b", "a", "b")
    source = MemorySource(broker)
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.block("put")
    async with started(consumer_of(source, refuse_a, dead_letters=dead_letters)) as run:
        await until(lambda: dead_letters.called("put") and broker.acked() == [1, 3])
        await turns()
        status = run.consumer.status()
        # The message is unsettled and its successor waits, but the other lane continues.
        assert (status.parking, status.held, status.in_flight, status.dead_lettered) == (1, 0, 2, 0)
        assert broker.acked() == [1, 3]
        dead_letters.unblock("put")
        await until(lambda: broker.unfinished == 0)
        assert run.consumer.status().dead_lettered == 1
        assert await run.stop() is None
    assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]


@pytest.mark.anyio
async def test_a_failed_write_is_repeated_without_calling_the_handler() -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.fail("put", OSError("not now"), times=5)
    handled: list[int] = []

    async def handler(message: Message) -> None:
        handled.append(message.position)
        await refuse_a(message)

    with anyio.fail_after(20):
        await consumer_of(source, handler, dead_letters=dead_letters, attempts=2).run()
    assert handled.count(0) == 2
    assert handled.count(1) == handled.count(2) == 1
    assert len(dead_letters.called("put")) == 6
    assert len({call.dead_letter.id for call in dead_letters.called("put") if call.dead_letter}) == 1
    assert len(broker.dead_letters) == 1
    assert broker.unfinished == 0


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ConfigError("no such topic"), SourceError("may not be written")])
async def test_a_dead_letter_that_can_never_be_written_stops_the_consumer(error: Exception) -> None:
    broker = published("a", "b")
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.fail("put", error, times=1_000_000)
    with anyio.fail_after(20), pytest.raises(type(error), match=str(error)):
        await consumer_of(MemorySource(broker), refuse_a, dead_letters=dead_letters).run()
    assert (broker.acked(), broker.unacked()) == ([1], [0])


@pytest.mark.anyio
async def test_a_dead_letter_has_its_origin_and_its_error() -> None:
    broker = MemoryBroker(2, name="orders")
    broker.skip(41, partition=1)
    broker.publish(b"payload", key=b"\xff\x00", headers=[("trace", b"1"), ("trace", b"2")], subject="s", partition=1)
    source = MemorySource(broker)
    source.finish()

    async def handler(message: Message) -> None:
        raise KeyError("x" * 2000)

    await consumer_of(source, handler, dead_letters=MemoryDeadLetters(broker), attempts=3).run()
    (dead_letter,) = broker.dead_letters
    assert dead_letter.id == dead_letter_id("orders", "", 1, 41)
    assert (dead_letter.source, dead_letter.partition, dead_letter.position, dead_letter.subject) == (
        "orders",
        1,
        41,
        "s",
    )
    assert (dead_letter.key, dead_letter.value) == (b"\xff\x00", b"payload")
    assert list(dead_letter.headers) == [("trace", b"1"), ("trace", b"2")]
    assert (dead_letter.attempts, dead_letter.error_type, dead_letter.epoch) == (3, "KeyError", 2)
    assert len(dead_letter.error_text) == 500


@pytest.mark.anyio
async def test_a_stop_abandons_unconfirmed_dead_letters() -> None:
    broker = published("a", "a")
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.block("put")
    async with started(consumer_of(MemorySource(broker), refuse_a, dead_letters=dead_letters)) as run:
        await until(lambda: dead_letters.called("put"))
        assert await run.stop() is None
    assert broker.unacked() == [0, 1]
    assert broker.dead_letters == []


@pytest.mark.anyio
async def test_no_dead_letter_is_written_under_exit() -> None:
    broker = published("a")
    dead_letters = MemoryDeadLetters(broker)
    consumer = consumer_of(MemorySource(broker), refuse_a, dead_letters=dead_letters, poison="exit")
    with pytest.raises(HandlerHalted):
        await consumer.run()
    assert dead_letters.called("put") == []
    assert broker.unacked() == [0]


@pytest.mark.anyio
async def test_an_unreachable_target_of_dead_letters_stops_the_start() -> None:
    broker = published("a")
    source = MemorySource(broker)
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.fail("open", SourceError("no such subject"))
    with pytest.raises(SourceError, match="no such subject"):
        await consumer_of(source, refuse_a, dead_letters=dead_letters).run()
    assert broker.deliveries(0) == 0
    assert settled(source) == []
    assert dead_letters.called("aclose")


def test_skip_without_dead_letters_is_refused() -> None:
    with pytest.raises(ConfigError, match="dead_letters"):
        consumer_of(MemorySource(MemoryBroker()), refuse_a, poison="skip")
    assert Settings(poison="skip").poison == "skip"


@pytest.mark.anyio
async def test_a_dead_letter_of_an_unreadable_message_stops_in_order() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)

    async def handler(message: Message) -> None:
        if message.key == b"a":
            message.raw = None
            # Whether a message that runs at the end is acknowledged is a matter of time.
            await until(broker.acked)
            raise ValueError("poison")

    consumer = consumer_of(source, handler, dead_letters=MemoryDeadLetters(broker))
    with anyio.fail_after(20), pytest.raises(AssertionError):
        await consumer.run()
    assert broker.acked() == [1]
    assert broker.unacked() == [0]
