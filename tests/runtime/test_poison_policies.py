"""Each poison policy has its effect on a message without an attempt left, and on an unreadable message."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lanes import Consumer, HandlerHalted, History, Message, Retry, SourceError
from lanes.errors import MessageError
from memsource import Group, GroupSource, MemoryDeadLetters, MemorySource, read
from memsource.memory.group import Committed
from tests.fakes.grouped import group_of
from tests.fakes.support import break_positions, consumer_of, published, started, turns, until
from tests.fakes.threaded import assert_kept


class Poisoned:
    """A handler that fails with these positions as long as they are in ``poison``; ``done`` are the others."""

    def __init__(self, *poison: int) -> None:
        self.poison = set(poison)
        self.done: list[int] = []
        self.attempts: Counter[int] = Counter()

    async def __call__(self, message: Message) -> None:
        self.attempts[message.position] = message.attempt
        if message.position in self.poison:
            raise ValueError(f"poison {message.position}")
        self.done.append(message.position)


def blocked(consumer: Consumer) -> int:
    """Number of blocked lanes."""
    return consumer.status().blocked if consumer.ready else 0


# --- block


@pytest.mark.anyio
async def test_block_stops_one_key_until_it_is_unblocked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broker = published("secret", "b", "secret", "b", "c")
    handler = Poisoned(0)
    consumer = consumer_of(MemorySource(broker), handler, poison="block", history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: broker.acked() == [1, 3, 4] and blocked(consumer) == 1)
        broker.publish(key="b")
        await until(lambda: broker.acked() == [1, 3, 4, 5])
        record = next(record for record in caplog.records if "blocked" in record.getMessage())
        assert record.levelno == logging.ERROR
        assert "memory/0 position 0, key " in record.getMessage()
        assert "after 1 attempt(s) with ValueError" in record.getMessage()
        assert "until unblock or park is called" in record.getMessage()
        assert "secret" not in record.getMessage()
        # One more attempt, which fails.
        assert consumer.unblock("secret") == 1
        await until(lambda: handler.attempts[0] == 2 and blocked(consumer) == 1)
        assert 2 not in handler.done
        handler.poison.clear()
        assert consumer.unblock(b"secret") == 1
        assert consumer.unblock("secret") == 0
        await until(lambda: broker.unfinished == 0)
        assert handler.attempts[0] == 3
        assert handler.done[-2:] == [0, 2]
        assert consumer.healthy
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_park_gives_up_a_blocked_message(tmp_path: Path) -> None:
    broker = published("a", "a", "b")
    handler = Poisoned(0)
    dead_letters = MemoryDeadLetters(broker)
    consumer = consumer_of(
        MemorySource(broker), handler, poison="block", dead_letters=dead_letters, history=History(tmp_path)
    )
    async with started(consumer) as run:
        await until(lambda: broker.acked() == [2] and blocked(consumer) == 1)
        assert broker.dead_letters == []
        assert consumer.park("a") == 1
        await until(lambda: broker.unfinished == 0)
        assert handler.done[-1] == 1
        assert [(dead_letter.position, dead_letter.error_text) for dead_letter in broker.dead_letters] == [
            (0, "poison 0")
        ]
        assert consumer.status().dead_lettered == 1
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_held_lane_can_be_parked_but_not_unblocked(tmp_path: Path) -> None:
    broker = published("a", "a")
    handler = Poisoned(0)
    consumer = consumer_of(
        MemorySource(broker),
        handler,
        poison="block",
        dead_letters=MemoryDeadLetters(broker),
        retry=Retry(attempts=5, backoff=3600.0, max_backoff=3600.0),
        history=History(tmp_path),
    )
    async with started(consumer) as run:
        await until(lambda: consumer.ready and consumer.status().held == 1)
        assert consumer.unblock("a") == 0
        assert consumer.park("a") == 1
        assert consumer.park("a") == 0
        await until(lambda: broker.unfinished == 0)
        assert [dead_letter.attempts for dead_letter in broker.dead_letters] == [1]
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_messages_without_a_key_are_unblocked_together() -> None:
    broker = published(None, "a", None)
    handler = Poisoned(0, 2)
    consumer = consumer_of(MemorySource(broker), handler, poison="block")
    async with started(consumer) as run:
        await until(lambda: blocked(consumer) == 2)
        handler.poison.clear()
        assert consumer.unblock(None) == 2
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_unblock_continues_a_key_in_every_partition() -> None:
    group = Group(2)
    for partition in (0, 1):
        group.publish(key="a", partition=partition)
    failing = True

    async def handler(message: Message) -> None:
        if failing:
            raise ValueError("poison")

    consumer = consumer_of(GroupSource(group, "m"), handler, poison="block")
    async with started(consumer) as run:
        await until(lambda: blocked(consumer) == 2)
        failing = False
        assert consumer.unblock("a") == 2
        await until(lambda: group.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_drain_leaves_blocked_messages_to_the_next_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = group_of("abab")
    handler = Poisoned(0)
    consumer = consumer_of(GroupSource(group, "m-1"), handler, poison="block", history=History(tmp_path, member="m-1"))
    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer) as run:
            await until(lambda: group.committed(0) == Committed(0, ((1, 2), (3, 4))) and blocked(consumer) == 1)
            assert await run.stop() is None
    assert (
        "its next owner runs 1 message(s) again that waited for a retry, an unblock or their dead letter" in caplog.text
    )
    assert group.committed(0) == Committed(0, ((1, 2), (3, 4)))
    source = GroupSource(group, "m-2")
    source.finish()
    again = Poisoned()
    await consumer_of(source, again, poison="block", history=History(tmp_path, member="m-2")).run()
    assert again.done == [0, 2]
    # Attempts start at 1 in each assignment.
    assert again.attempts[0] == 1
    assert_kept(tmp_path)


# --- block_and_dlq


@pytest.mark.anyio
async def test_block_and_dlq_writes_the_dead_letter_then_stops_the_key(tmp_path: Path) -> None:
    broker = published("a", "a", "b")
    handler = Poisoned(0)
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.block("put")
    consumer = consumer_of(
        MemorySource(broker), handler, poison="block_and_dlq", dead_letters=dead_letters, history=History(tmp_path)
    )
    async with started(consumer) as run:
        await until(lambda: dead_letters.called("put"))
        assert (consumer.status().parking, consumer.status().blocked) == (1, 0)
        # The message is not blocked before its dead letter is confirmed.
        assert consumer.unblock("a") == 0
        dead_letters.unblock("put")
        await until(lambda: blocked(consumer) == 1)
        assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]
        assert 0 not in broker.acked()
        handler.poison.clear()
        assert consumer.unblock("a") == 1
        await until(lambda: broker.unfinished == 0)
        assert handler.done[-2:] == [0, 1]
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_block_and_dlq_continues_after_park(tmp_path: Path) -> None:
    broker = published("a", "a")
    handler = Poisoned(0)
    dead_letters = MemoryDeadLetters(broker)
    consumer = consumer_of(
        MemorySource(broker), handler, poison="block_and_dlq", dead_letters=dead_letters, history=History(tmp_path)
    )
    async with started(consumer) as run:
        await until(lambda: blocked(consumer) == 1)
        assert consumer.park("a") == 1
        await until(lambda: broker.unfinished == 0)
        assert [call.name for call in dead_letters.calls].count("put") == 1
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("order", ["key", "serial"])
async def test_block_and_dlq_writes_one_dead_letter_however_often_the_message_fails(tmp_path: Path, order: str) -> None:
    broker = published("a", "b", "a", "b")
    handler = Poisoned(0)
    dead_letters = MemoryDeadLetters(broker)
    consumer = consumer_of(
        MemorySource(broker),
        handler,
        poison="block_and_dlq",
        order=order,
        dead_letters=dead_letters,
        history=History(tmp_path),
    )
    async with started(consumer) as run:
        for attempt in (1, 2, 3):
            # With order="key", the messages of the other key may end after the block.
            await until(lambda: blocked(consumer) == 1 and handler.done == ([1, 3] if order == "key" else []))
            assert handler.attempts[0] == attempt
            assert consumer.unblock("a") == 1
        await until(lambda: blocked(consumer) == 1)
        handler.poison.clear()
        assert consumer.unblock("a") == 1
        await until(lambda: broker.unfinished == 0)
        assert [call.name for call in dead_letters.calls].count("put") == 1
        assert consumer.status().dead_lettered == 1
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_dead_letter_confirmed_after_the_drain_has_an_archived_row(tmp_path: Path) -> None:
    broker = published("a")
    source, dead_letters = MemorySource(broker), MemoryDeadLetters(broker)
    dead_letters.block("put")
    consumer = consumer_of(
        source, Poisoned(0), poison="block_and_dlq", dead_letters=dead_letters, history=History(tmp_path)
    )
    async with started(consumer) as run:
        await until(lambda: dead_letters.called("put"))
        source.revoke(0)
        await until(lambda: source.owned == [])
        dead_letters.unblock("put")
        await until(lambda: broker.dead_letters)
        assert await run.stop() is None
    # The message has a dead letter but is unfinished: a reader must not take it for settled.
    told = [row.event for segment in read([tmp_path]) for row in segment.rows]
    assert ("archived" in told, "dlq_confirmed" in told) == (True, False)
    assert_kept(tmp_path, left=True)


# --- skip, exit


@pytest.mark.anyio
async def test_skip_commits_past_a_message_after_its_dead_letter_is_confirmed(tmp_path: Path) -> None:
    group = group_of("abab")
    broker = published()
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.fail("put", SourceError("no stream", retryable=True), times=2)
    dead_letters.block("put")
    handler = Poisoned(0)
    consumer = consumer_of(
        GroupSource(group, "m"), handler, poison="skip", dead_letters=dead_letters, history=History(tmp_path)
    )
    async with started(consumer) as run:
        await until(lambda: group.committed(0) == Committed(0, ((1, 2), (3, 4))))
        assert dead_letters.called("put")
        dead_letters.unblock("put")
        await until(lambda: group.committed(0) == Committed(4))
        assert await run.stop() is None
    assert len(dead_letters.called("put")) == 3
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_exit_commits_below_the_failure_and_completed_messages_above(tmp_path: Path) -> None:
    group = group_of("abcabc")
    handler = Poisoned(3)
    consumer = consumer_of(GroupSource(group, "m"), handler, poison="exit", history=History(tmp_path), concurrency=1)
    with pytest.raises(
        HandlerHalted, match=r"failed 1 time\(s\) at memory/0 position 3 with ValueError: poison 3"
    ) as e:
        await consumer.run()
    assert isinstance(e.value.__cause__, ValueError)
    assert group.committed(0) == Committed(3)
    assert consumer.health().reasons == ("stopped by HandlerHalted",)
    assert_kept(tmp_path, left=True)


# --- messages that cannot be read


@pytest.mark.anyio
async def test_decode_makes_the_data_of_a_message() -> None:
    source = MemorySource(published("a", "b"))
    source.finish()
    seen: list[object] = []

    async def handler(message: Message) -> None:
        seen.append(message.data)

    def decode(message: Message) -> tuple[int, bytes]:
        return message.position, message.value

    await consumer_of(source, handler, poison=None, decode=decode).run()
    assert sorted(map(repr, seen)) == ["(0, b'0')", "(1, b'1')"]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["async", "threads", "inline"])
async def test_an_undecodable_message_is_neither_retried_nor_handled(kind: Any, tmp_path: Path) -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    source.finish()
    poisoned = Poisoned()

    def decode(message: Message) -> str:
        if message.position == 0:
            raise UnicodeError("not even text")
        return "text"

    def plain(message: Message) -> None:
        poisoned.done.append(message.position)

    consumer = consumer_of(
        source,
        poisoned if kind == "async" else plain,
        poison="skip",
        decode=decode,
        dead_letters=MemoryDeadLetters(broker),
        retry=Retry(attempts=5, backoff=3600.0, max_backoff=3600.0),
        history=History(tmp_path),
        **({} if kind == "async" else {"sync_handlers": kind}),
    )
    await consumer.run()
    (dead_letter,) = broker.dead_letters
    assert (dead_letter.position, dead_letter.error_type, dead_letter.attempts) == (0, "MessageError", 1)
    assert dead_letter.error_text == (
        "UnicodeError: not even text (decode failed with UnicodeError: correct decode=…, or the producer of such "
        "messages)"
    )
    assert sorted(poisoned.done) == [1, 2]
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_decode_runs_again_when_a_blocked_message_is_unblocked() -> None:
    broker = published("a")
    known = False

    def decode(message: Message) -> str:
        if not known:
            raise LookupError("schema 7")
        return "text"

    handler = Poisoned()
    consumer = consumer_of(MemorySource(broker), handler, poison="block", decode=decode)
    async with started(consumer) as run:
        await until(lambda: blocked(consumer) == 1)
        known = True
        consumer.unblock("a")
        await until(lambda: broker.unfinished == 0)
        assert handler.done == [0]
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["async", "threads", "inline"])
@pytest.mark.parametrize("poison", ["skip", "exit", "block"])
async def test_a_message_that_its_source_cannot_read_is_never_handled(
    kind: Any, poison: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    break_positions(source, {0}, monkeypatch)
    poisoned = Poisoned()

    def plain(message: Message) -> None:
        poisoned.done.append(message.position)

    consumer = consumer_of(
        source,
        poisoned if kind == "async" else plain,
        poison=poison,
        dead_letters=MemoryDeadLetters(broker),
        retry=Retry(attempts=5, backoff=3600.0, max_backoff=3600.0),
        history=History(tmp_path),
        **({} if kind == "async" else {"sync_handlers": kind}),
    )
    async with started(consumer) as run:
        if poison == "skip":
            await until(lambda: broker.unfinished == 0)
            assert await run.stop() is None
            assert [dead_letter.error_text for dead_letter in broker.dead_letters] == ["no key"]
            assert sorted(poisoned.done) == [1, 2]
        elif poison == "exit":
            error = await run.end()
            assert isinstance(error, HandlerHalted)
            assert isinstance(error.__cause__, MessageError)
            assert 0 not in poisoned.done
        else:
            await until(lambda: broker.acked() == [2] and blocked(consumer) == 1)
            assert consumer.unblock("a") == 1
            await until(lambda: blocked(consumer) == 1)
            await turns()
            # Another attempt cannot read the message either, so only `park` helps.
            assert consumer.park("a") == 1
            await until(lambda: broker.unfinished == 0)
            assert sorted(poisoned.done) == [1, 2]
            assert await run.stop() is None
    assert_kept(tmp_path, left=True)
