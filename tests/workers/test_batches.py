"""A batch handler gets its messages in order within each key, and no outcome after a failure in its lane counts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from lanes import ConfigError, History, Message, Nak, Term
from memsource import MemoryDeadLetters, MemorySource
from tests.fakes.batches import AT_ONCE, Batches, batching, finite
from tests.fakes.grouped import HandClock
from tests.fakes.support import published, started, turns, until
from tests.fakes.threaded import assert_kept

# --- the messages of a batch


@pytest.mark.anyio
async def test_a_batch_has_at_most_the_set_number_of_messages_in_the_order_of_their_lanes() -> None:
    broker = published(*"aabbaacbbb")
    handler = Batches()
    await batching(finite(broker), handler, concurrency=1).run()
    # A batch has the waiting messages of one lane, then those of the next lane; the next batch continues in the same
    # lane.
    assert handler.calls == [[0, 1, 4, 5], [2, 3, 7, 8], [6, 9]]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_batches_run_concurrently_but_never_two_with_the_same_lane() -> None:
    broker = published(*"aaaabbbbaabb")
    handler = Batches(gated=True)
    async with started(batching(MemorySource(broker), handler, concurrency=5)) as run:
        await until(lambda: len(handler.calls) == 2)
        await turns()
        assert handler.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert run.consumer.status().running == 2
        handler.gate.set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_batch_without_linger_does_not_wait() -> None:
    broker = published("a")
    handler = Batches()
    async with started(batching(MemorySource(broker), handler)) as run:
        await until(lambda: broker.acked() == [0])
        broker.publish(key="b")
        await until(lambda: broker.acked() == [0, 1])
        assert await run.stop() is None
    assert handler.calls == [[0], [1]]


@pytest.mark.anyio
async def test_a_lingering_batch_starts_when_it_is_full() -> None:
    broker = published("a", "b", "c")
    handler = Batches()
    async with started(batching(MemorySource(broker), handler, linger=3600.0)) as run:
        await turns()
        assert handler.calls == []
        broker.publish(key="d")
        await until(lambda: broker.unfinished == 0)
        assert [sorted(call) for call in handler.calls] == [[0, 1, 2, 3]]
        broker.publish(key="d")
        await turns()
        assert len(handler.calls) == 1
        # A lingering batch has not started, so it is abandoned.
        with anyio.fail_after(5):
            assert await run.stop() is None
    assert broker.unacked() == [4]


@pytest.mark.anyio
async def test_a_lingering_batch_starts_after_linger() -> None:
    clock = HandClock()
    broker = published("a", "b")
    handler = Batches()
    consumer = batching(MemorySource(broker), handler, linger=0.02, clock=clock)
    async with started(consumer) as run:
        await until(lambda: consumer.active and consumer.status().ready == 2)
        # The consumer's clock decides when a batch is due.
        await clock.asked_again()
        assert handler.calls == []
        clock.now += 0.02
        await until(lambda: broker.unfinished == 0)
        assert handler.calls == [[0, 1]]
        assert await run.stop() is None


# --- the result of a handler


@pytest.mark.anyio
@pytest.mark.parametrize("returned", [None, [None] * 4, (None,) * 4])
async def test_a_batch_handler_that_returns_none_acknowledges_the_whole_batch(returned: object) -> None:
    broker = published(*"abcd")
    handler = Batches()
    handler.returns = returned
    await batching(finite(broker), handler).run()
    assert broker.unfinished == 0
    assert len(handler.calls) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ([None] * 3, "a list of length 3"),
        ((None,) * 5, "a tuple of length 5"),
        ([], "a list of length 0"),
        ([True], "a list of length 1"),
        (0, "an int"),
        (False, "a bool"),
        ("done", "a str"),
        ({0: None}, "a dict"),
        (ValueError("bad"), "a ValueError"),
        ([None, None, None, ValueError], "a list with the class ValueError at index 3"),
        ([None, True, None, True], "a list with a bool at index 1"),
        ([None, None, None, KeyboardInterrupt()], "a list with a KeyboardInterrupt at index 3"),
        ([None, None, None, MemoryError()], "a list with a MemoryError at index 3"),
    ],
)
async def test_an_invalid_result_of_a_batch_handler_fails_the_whole_batch(returned: object, fault: str) -> None:
    broker = published(*"abcd")
    dead_letters = MemoryDeadLetters(broker)
    handler = Batches()
    handler.returns = returned
    await batching(finite(broker), handler, dead_letters=dead_letters).run()
    assert sorted(dead_letter.position for dead_letter in broker.dead_letters) == [0, 1, 2, 3]
    (text,) = {dead_letter.error_text for dead_letter in broker.dead_letters}
    assert text == (
        f"the batch handler returned {fault}: return None, or a list with None or an exception for each of its 4 "
        "messages"
    )


@pytest.mark.anyio
async def test_each_message_has_its_own_outcome() -> None:
    broker = published(*"abcd")
    attempts: dict[int, int] = {}

    async def handler(batch: list[Message]) -> list[BaseException | None]:
        outcomes: list[BaseException | None] = []
        for message in batch:
            attempts[message.position] = message.attempt
            first = message.attempt == 1
            outcomes.append(
                {
                    0: None,
                    1: ValueError("once") if first else None,
                    2: Nak(delay=0.0) if first else None,
                    3: Term("never"),
                }[message.position]
            )
        return outcomes

    consumer = batching(finite(broker), handler, retry=AT_ONCE, dead_letters=MemoryDeadLetters(broker))
    await consumer.run()
    assert attempts == {0: 1, 1: 2, 2: 2, 3: 1}
    assert [(dead_letter.position, dead_letter.error_type) for dead_letter in broker.dead_letters] == [(3, "Term")]
    assert consumer.status().retries == 2


@pytest.mark.anyio
async def test_no_outcome_counts_after_a_failure_in_its_lane() -> None:
    broker = published(*"aaab")
    calls: list[list[tuple[int, int]]] = []

    async def handler(batch: list[Message]) -> list[BaseException | None]:
        calls.append([(message.position, message.attempt) for message in batch])
        return [ValueError("once") if (m.position, m.attempt) == (1, 1) else None for m in batch]

    await batching(finite(broker), handler, retry=AT_ONCE, concurrency=1).run()
    assert calls[0] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    # 0 and 3 are done. 2 runs again after 1, without a failed attempt.
    assert [one for call in calls[1:] for one in call] == [(1, 2), (2, 1)]


@pytest.mark.anyio
async def test_an_exception_of_a_batch_handler_fails_the_whole_batch() -> None:
    broker = published(*"abcc")
    attempts: dict[int, int] = defaultdict(int)

    async def handler(batch: list[Message]) -> None:
        for message in batch:
            attempts[message.position] += 1
        if batch[0].attempt == 1 and batch[0].position == 0:
            raise Nak(delay=0.0)

    await batching(finite(broker), handler, retry=AT_ONCE, concurrency=1).run()
    assert attempts == {0: 2, 1: 2, 2: 2, 3: 2}
    assert broker.unfinished == 0


@pytest.mark.anyio
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
async def test_an_exception_that_is_no_attempt_stops_the_consumer(error: type[BaseException]) -> None:
    broker = published(*"abcde")

    async def handler(batch: list[Message]) -> None:
        if batch[0].position == 0:
            raise error

    consumer = batching(MemorySource(broker), handler, dead_letters=MemoryDeadLetters(broker))
    with pytest.raises(error):
        await consumer.run()
    assert broker.unacked()[:4] == [0, 1, 2, 3]
    assert broker.dead_letters == []


@pytest.mark.anyio
async def test_a_plain_function_that_returns_an_awaitable_is_refused() -> None:
    async def handle(batch: list[Message]) -> None:
        raise AssertionError("is never awaited")

    for where in ("threads", "inline"):
        consumer = batching(MemorySource(published("a")), lambda batch: handle(batch), sync_handlers=where)
        with pytest.raises(ConfigError, match="declare the handler and its wrappers as async def"):
            await consumer.run()


# --- messages that cannot be read


@pytest.mark.anyio
async def test_unreadable_messages_do_not_reach_the_handler() -> None:
    broker = published(*"aabbcc")
    seen: list[tuple[int, object]] = []

    def decode(message: Message) -> str:
        if message.position in (0, 3):
            raise UnicodeError("no text")
        return f"data {message.position}"

    async def handler(batch: list[Message]) -> None:
        seen.extend((message.position, message.data) for message in batch)

    consumer = batching(
        finite(broker), handler, decode=decode, batch=6, concurrency=1, dead_letters=MemoryDeadLetters(broker)
    )
    await consumer.run()
    # 1 waited for the dead letter of 0, in another call.
    assert seen == [(number, f"data {number}") for number in (2, 4, 5, 1)]
    dead_letters = [
        (dead_letter.position, dead_letter.error_type, dead_letter.attempts) for dead_letter in broker.dead_letters
    ]
    assert sorted(dead_letters) == [
        (0, "MessageError", 1),
        (3, "MessageError", 1),
    ]


@pytest.mark.anyio
async def test_a_batch_of_unreadable_messages_calls_no_handler(tmp_path: Path) -> None:
    broker = published(*"ab")
    handler = Batches()

    def decode(message: Message) -> None:
        raise ValueError("never")

    consumer = batching(
        finite(broker), handler, decode=decode, dead_letters=MemoryDeadLetters(broker), history=History(tmp_path)
    )
    await consumer.run()
    assert handler.calls == []
    assert len(broker.dead_letters) == 2
    assert_kept(tmp_path)
