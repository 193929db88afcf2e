"""A history has each row in its file before the event happens, and the checkers pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes import HandlerHalted, History, Message, Nak, SourceError, Term
from lanes.core.types import Settlement
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import (
    Gated,
    consumer_of,
    publish,
    published,
    settled,
    started,
    starts_by_write,
    turns,
    until,
)
from tests.fakes.threaded import assert_kept


def rows(history: History) -> list[dict[str, Any]]:
    """The rows in the file."""
    assert history.path is not None
    return [json.loads(line) for line in history.path.read_text().splitlines()]


def names(history: History, position: int) -> list[str]:
    """The events of one position, in order."""
    return [row["event"] for row in rows(history) if row.get("position") == position]


async def finish_what_is_left(broker: MemoryBroker, directory: Path) -> None:
    """Handle the rest in a second process, and assert every promise over both."""
    source = MemorySource(broker)
    source.finish()

    async def handler(message: Message) -> None:
        await anyio.lowlevel.checkpoint()

    await consumer_of(source, handler, history=History(directory, member="second")).run()
    assert broker.unfinished == 0
    assert_kept(directory)


# --- the order of writes


@pytest.mark.anyio
async def test_a_started_row_is_in_the_file_before_its_handler_is_called(tmp_path: Path) -> None:
    source = MemorySource(published(*[number % 7 for number in range(40)]))
    source.finish()
    history = History(tmp_path)
    checked = 0

    async def handler(message: Message) -> None:
        nonlocal checked
        last = [row for row in rows(history) if row.get("position") == message.position][-1]
        assert (last["event"], last["attempt"]) == ("started", message.attempt)
        checked += 1
        if message.position % 5 == 0 and message.attempt == 1:
            raise ValueError("not yet")

    await consumer_of(source, handler, history=history, attempts=2).run()
    assert checked == 48
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_handlers_that_start_together_share_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = starts_by_write(monkeypatch)
    broker = published(*range(60))
    handler = Gated()
    history = History(tmp_path)
    async with started(consumer_of(MemorySource(broker), handler, concurrency=20, history=history)) as run:
        await until(lambda: handler.running == 20)
        assert writes == [20]
        handler.let(*range(60))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert sum(writes) == 60
    # Lanes that become free together start together.
    assert len(writes) <= 6
    assert_kept(tmp_path)


class ReadsAtSettle(MemorySource):
    """A source that reads the file at each settlement."""

    history: History
    unannounced: list[int]

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        acked = {row["position"] for row in rows(self.history) if row["event"] == "ack"}
        messages = [message for settlement in settlements for message in settlement.messages]
        self.unannounced += [message.position for message in messages if message.position not in acked]
        await super().settle(settlements)


@pytest.mark.anyio
async def test_an_ack_row_is_in_the_file_before_the_source_is_called(tmp_path: Path) -> None:
    broker = published(*[number % 7 for number in range(40)])
    source = ReadsAtSettle(broker)
    source.history = History(tmp_path)
    source.unannounced = []
    source.finish()
    source.fail("settle", SourceError("not now", retryable=True), times=2)
    dead_letters = MemoryDeadLetters(broker)

    async def handler(message: Message) -> None:
        if message.position == 3:
            raise Term("never")

    await consumer_of(source, handler, history=source.history, dead_letters=dead_letters).run()
    assert source.unannounced == []
    # Once more for every failed settlement.
    assert [name for name in names(source.history, 3) if name != "ack"][-2:] == ["dlq_sent", "dlq_confirmed"]
    assert names(source.history, 3)[-1] == "ack"
    assert_kept(tmp_path)


# --- the verdicts of the checkers


@pytest.mark.anyio
async def test_retries_dead_letters_and_a_full_bound_keep_the_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes.runtime.dead_lettering.DEAD_LETTER_RETRY", (0.001, 0.002))
    broker = published(*[number % 5 for number in range(80)], partitions=2)
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.fail("put", OSError("not now"), times=3)

    async def handler(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if message.position % 10 == 7:
            raise ValueError("poison")
        if message.position % 6 == 1 and message.attempt == 1:
            raise Nak(delay=0.001)

    history = History(tmp_path)
    consumer = consumer_of(
        source, handler, history=history, dead_letters=dead_letters, attempts=3, backoff=0.001, max_in_flight=9
    )
    await consumer.run()
    assert broker.unfinished == 0
    seen = {row["event"] for row in rows(history)}
    assert {"retry", "dlq_sent", "dlq_confirmed", "paused", "resumed", "assigned", "revoked", "end"} <= seen
    assert rows(history)[0]["max_in_flight"] == 9
    flow = [row["event"] for row in rows(history) if row["event"] in ("paused", "resumed")]
    assert flow == ["paused", "resumed"] * (len(flow) // 2)
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_redeliveries_have_rows_and_keep_the_promises(tmp_path: Path) -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"b"])
    history = History(tmp_path)
    async with started(consumer_of(source, handler, history=history)) as run:
        await until(lambda: broker.acked() == [2])
        source.redeliver([0, 1, 2])
        await until(lambda: broker.acked() == [2] and not broker.waiting())
        handler.let(0, 1)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert [row["cause"] for row in rows(history) if row["event"] == "redelivered"] == ["held", "held", "settled"]
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_second_process_after_a_stop_keeps_the_promises(tmp_path: Path) -> None:
    broker = published("a", "a", "b", "held", "c")
    handler = Gated()

    async def failing(message: Message) -> None:
        if message.key == b"held":
            raise Nak(delay=3600.0)
        await handler(message)

    history = History(tmp_path, member="first")
    async with started(consumer_of(MemorySource(broker), failing, history=history, attempts=2)) as run:
        await until(lambda: handler.running == 3 and run.consumer.status().held == 1)
        run.consumer.stop()
        await turns()
        handler.let(0, 2, 4)
        assert await run.end() is None
    assert rows(history)[-1]["event"] == "end"
    assert sorted(row["position"] for row in rows(history) if row["event"] == "abandoned") == [1, 3]
    assert_kept(tmp_path, left=True)
    await finish_what_is_left(broker, tmp_path)


@pytest.mark.anyio
async def test_a_second_process_after_a_halt_keeps_the_promises(tmp_path: Path) -> None:
    broker = published("a", "b", "a", "b")

    async def handler(message: Message) -> None:
        if message.position == 2:
            raise Term("never")
        await anyio.lowlevel.checkpoint()

    with pytest.raises(HandlerHalted):
        await consumer_of(MemorySource(broker), handler, history=History(tmp_path, member="first")).run()
    assert 2 in broker.unacked()
    assert_kept(tmp_path, left=True)
    await finish_what_is_left(broker, tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=lambda error: type(error).__name__)
async def test_a_second_process_after_a_fatal_error_keeps_the_promises(tmp_path: Path, error: BaseException) -> None:
    broker = published("a", "a", "b", "b", "c")
    gated = Gated()

    async def handler(message: Message) -> None:
        await gated(message)
        if message.position == 0:
            raise error

    history = History(tmp_path, member="first")
    async with started(consumer_of(MemorySource(broker), handler, history=history)) as run:
        await until(lambda: gated.running == 3)
        gated.let(0)
        await until(lambda: 0 in gated.ended)
        # Only after the start of the drain; otherwise a later message of the key may start.
        gated.let(2, 4)
        assert await run.end() is error
    # Every message in flight gets a row with its outcome.
    assert names(history, 0)[-1] == "ended"
    assert names(history, 1)[-1] == "abandoned"
    assert_kept(tmp_path, left=True)
    await finish_what_is_left(broker, tmp_path)


@pytest.mark.anyio
async def test_a_second_process_after_a_cancelled_run_keeps_the_promises(tmp_path: Path) -> None:
    broker = published("a", "b", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    history = History(tmp_path, member="first")
    async with started(consumer_of(source, handler, history=history)) as run:
        await until(lambda: broker.acked() == [0])
        run.scope.cancel()
        await run.end()
    assert rows(history)[-1]["reason"] == "stopped"
    assert [row["result"] for row in rows(history) if row["event"] == "ended"] == ["ok", "cancelled"]
    assert_kept(tmp_path, left=True)
    await finish_what_is_left(broker, tmp_path)


@pytest.mark.anyio
async def test_revoked_lost_and_returned_partitions_keep_the_promises(tmp_path: Path) -> None:
    broker = MemoryBroker(2)
    for partition in broker.partitions:
        publish(broker, ["a", "a", "b"], partition=partition)
    source = MemorySource(broker)
    gate = anyio.Event()
    ignoring = anyio.Event()

    async def handler(message: Message) -> None:
        if message.epoch > 2 or message.key == b"b":
            return
        if message.partition.id.number == 1:
            ignoring.set()
            with anyio.CancelScope(shield=True):
                await gate.wait()
        await gate.wait()

    history = History(tmp_path, member="first")
    async with started(consumer_of(source, handler, history=history)) as run:
        await until(lambda: len(settled(source)) == 2 and ignoring.is_set())
        source.revoke(0, timeout=0.01)
        source.lose(1)
        source.assign(1)
        await until(lambda: source.owned == [1])
        source.assign(0)
        await until(lambda: broker.acked(0) == [0, 1, 2])
        await turns()
        assert broker.acked(1) == [2]
        gate.set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    events = [row["event"] for row in rows(history)]
    assert [events.count(name) for name in ("assigned", "lost", "zombie")] == [4, 1, 1]
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_partition_lost_during_a_drain_has_no_revoked_row(tmp_path: Path) -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated()
    history = History(tmp_path, member="first")
    async with started(consumer_of(source, handler, history=history)) as run:
        await until(lambda: handler.running == 1)
        source.revoke(0, timeout=3600)
        await until(lambda: run.consumer.status().partitions["memory/0"].draining)
        source.lose(0)
        await until(lambda: handler.cancelled)
        assert await run.stop() is None
    events = [row["event"] for row in rows(history)]
    assert "lost" in events
    assert "revoked" not in events
    assert_kept(tmp_path, left=True)
    await finish_what_is_left(broker, tmp_path)
