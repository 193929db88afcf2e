"""A history of handlers in threads: each row is in its file first, and every promise holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lanes import History, Message
from memsource.memory.source import MemorySource
from tests.fakes.support import consumer_of, published, started, starts_by_write, turns, until
from tests.fakes.threaded import Gates, assert_kept


@pytest.mark.anyio
async def test_a_started_row_is_in_the_file_before_its_handler_is_called(tmp_path: Path) -> None:
    broker = published(*[number % 7 for number in range(40)])
    source = MemorySource(broker)
    source.finish()
    history = History(tmp_path)
    checked: list[int] = []

    def handler(message: Message) -> None:
        assert history.path is not None
        about = f'"position":{message.position},'
        rows = [row for row in history.path.read_text().splitlines() if about in row]
        assert '"event":"started"' in rows[-1] and f'"attempt":{message.attempt}' in rows[-1]
        checked.append(message.position)
        if message.position % 5 == 0 and message.attempt == 1:
            raise ValueError("not yet")

    await consumer_of(source, handler, history=history, attempts=2).run()
    assert len(checked) == 48
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_handlers_that_start_together_share_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = starts_by_write(monkeypatch)
    broker = published(*range(20))
    source = MemorySource(broker)
    source.finish()
    handler = Gates()
    async with started(consumer_of(source, handler, concurrency=20, history=History(tmp_path))) as run:
        await until(lambda: handler.running == 20)
        handler.let(*range(20))
        assert await run.end() is None
    assert writes == [20]
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_failures_and_losses_keep_the_promises(tmp_path: Path) -> None:
    broker = published(*[number % 5 for number in range(200)], partitions=2)
    source = MemorySource(broker)

    def handler(message: Message) -> None:
        os.sched_yield()
        if message.position % 7 == 0 and message.attempt == 1:
            raise ValueError("not yet")

    async with started(consumer_of(source, handler, attempts=2, history=History(tmp_path))) as run:
        for _ in range(5):
            await turns(5)
            source.lose(0)
            await turns(2)
            source.assign(0)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert_kept(tmp_path)
