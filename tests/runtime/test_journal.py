"""A journal has every row of a run when it returns, and no handler waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lanes import ConfigError, Consumer, History, Journal, Message, Retry, Settings, Term, main, run
from lanes.handlers import Handler
from lanes.history.journal import buffer_of
from memsource import check, read
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import TIMEOUT, Gated, published, started, until
from tests.fakes.threaded import assert_kept
from tests.memsource.checkers.journals import WAIT, files, held_disk, reach, rows


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that blocks until the event is set."""
    with held_disk(monkeypatch) as opens:
        yield opens


async def awaiting(message: Message) -> None:
    await anyio.lowlevel.checkpoint()
    if message.position == 7:
        raise Term("never")
    if message.position % 5 == 0 and message.attempt == 1:
        raise ValueError("not yet")


def in_a_thread(message: Message) -> None:
    if message.position % 5 == 0 and message.attempt == 1:
        raise ValueError("not yet")


async def in_batches(messages: list[Message]) -> None:
    await anyio.lowlevel.checkpoint()


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a history"])
@pytest.mark.parametrize(
    ("handler", "settings"),
    [
        (awaiting, Settings(retry=Retry(backoff=0.0))),
        (in_a_thread, Settings(retry=Retry(backoff=0.0), concurrency=4)),
        (in_batches, Settings(batch=5)),
    ],
    ids=["async", "threads", "batches"],
)
async def test_a_run_is_in_the_journal_when_it_returns(
    handler: Handler, settings: Settings, beside: bool, tmp_path: Path
) -> None:
    broker = published(*[number % 7 for number in range(40)])
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    history = History(tmp_path / "history") if beside else None
    directory = tmp_path / "journal"
    await run(source, handler, settings=settings, dead_letters=dead_letters, history=history, journal=directory)
    assert not list(directory.glob(".*"))
    assert_kept(directory)
    made = rows(directory)
    assert {row["position"] for row in made if row["event"] == "ack"} == set(range(40))
    if history is not None:
        assert_kept(tmp_path / "history")
        told = {(one.name, one.checked) for one in check(read([tmp_path / "history"]))}
        assert {(one.name, one.checked) for one in check(read([directory]))} == told
        assert {row["member"] for row in made} == {history.member}


@pytest.mark.anyio
async def test_no_handler_waits_for_the_disk(tmp_path: Path, gate: threading.Event) -> None:
    broker = published(*[number % 7 for number in range(200)])
    journal = Journal(tmp_path)
    async with started(Consumer(MemorySource(broker), in_batches, settings=Settings(batch=2), journal=journal)) as one:
        await until(lambda: broker.unfinished == 0)
        # Queued rows are text, so no message and no payload is kept alive.
        assert {type(row) for row in buffer_of(journal).rows} == {str}
        assert journal.files == 0
        gate.set()
        assert await one.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_started_row_is_in_the_journal_while_its_handler_runs(tmp_path: Path) -> None:
    handler = Gated()
    broker = published("a")
    journal = Journal(tmp_path, rotate_after=0.001)
    async with started(Consumer(MemorySource(broker), handler, journal=journal)) as one:
        await until(lambda: handler.running == 1)
        told = partial(reach, lambda: files(tmp_path) and any(row["event"] == "started" for row in rows(tmp_path)))
        await anyio.to_thread.run_sync(told)
        handler.let(0)
        assert await one.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_hanging_disk_does_not_delay_the_end(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lanes.consumer.CLOSE_TIMEOUT", 0.05)
    source = MemorySource(published("a"))
    source.finish()
    journal = Journal(tmp_path)
    await Consumer(source, awaiting, journal=journal).run()
    assert "was not written within 0.05 s, so its last rows may be missing" in caplog.text
    gate.set()
    assert journal.join(WAIT)


@pytest.mark.anyio
async def test_an_impossible_journal_is_refused_before_the_first_message(tmp_path: Path) -> None:
    broker = published("a")
    consumer = Consumer(MemorySource(broker), awaiting, journal=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"gone': No such file"), anyio.fail_after(TIMEOUT):
        await consumer.run()
    assert broker.unfinished == 1
    with pytest.raises(ConfigError, match="rotate_bytes"):
        Journal(tmp_path, rotate_bytes=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"journal directory .*file"):
        Consumer(MemorySource(broker), awaiting, journal=tmp_path / "file")


@pytest.mark.anyio
async def test_consumers_of_one_process_may_share_a_directory(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        for key in ("a", "b", "c"):
            source = MemorySource(published(*[key] * 10))
            source.finish()
            tasks.start_soon(partial(run, source, in_batches, settings=Settings(batch=3), journal=tmp_path))
    assert len(files(tmp_path)) == 3
    assert len(read([tmp_path])) == 3


def test_lanes_main_takes_a_journal(tmp_path: Path) -> None:
    source = MemorySource(published(*"abc"))
    source.finish()
    with pytest.raises(SystemExit) as ended:
        main(source, in_batches, settings=Settings(batch=2), journal=tmp_path)
    assert ended.value.code == 0
    assert_kept(tmp_path)
