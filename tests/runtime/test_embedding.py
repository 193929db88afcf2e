"""An application learns of a failed start and of the end of its consumer, and other threads may make some calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

import lanes
from lanes import ConfigError, Consumer, HandlerHalted, LanesError, Message, SourceError
from memsource import MemoryDeadLetters, MemorySource
from tests.fakes.support import Gated, acknowledge, consumer_of, fail, living, published, started, turns, until

ANY_THREAD: Final = {"stop", "pause", "resume", "status", "health", "healthy", "ready", "active"}
"""The members of a consumer that any thread may use."""

ONE_THREAD: Final = {"run", "opened", "until_ready", "ended", "drain", "unblock", "park"}
"""The members that only the thread of the event loop may use."""


# --- the start


@pytest.mark.anyio
async def test_opened_returns_once_the_source_is_open() -> None:
    source = MemorySource(published("a"))
    source.block("open")
    consumer = consumer_of(source, acknowledge)
    waited: list[bool] = []

    async def wait() -> None:
        await consumer.opened()
        waited.append(consumer.ready)

    async with anyio.create_task_group() as tasks, started(consumer) as run:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
        await until(lambda: source.called("open"))
        await turns()
        assert waited == []
        source.unblock("open")
        await until(lambda: waited == [True, True])
        await consumer.opened()
        assert await run.stop() is None
    # The consumer has ended without an error.
    await consumer.opened()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ConfigError("no topic"), SourceError("no server"), ValueError("a bug")])
async def test_opened_raises_the_error_of_the_start(error: Exception) -> None:
    source = MemorySource(published("a"))
    source.block("open")
    source.fail("open", error)
    consumer = consumer_of(source, acknowledge)
    async with started(consumer) as run:
        await until(lambda: source.called("open"))
        source.unblock("open")
        with pytest.raises(type(error)) as caught:
            await consumer.opened()
        assert caught.value is error
        assert await run.end() is error
        with pytest.raises(type(error)):
            await consumer.opened()


@pytest.mark.anyio
@pytest.mark.parametrize("wait", [Consumer.opened, Consumer.until_ready])
async def test_one_warning_says_that_nobody_runs_the_consumer(
    wait: Callable[[Consumer], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lanes.runtime.lifecycle.RUN_WITHIN", 0.02)
    consumer = consumer_of(MemorySource(published("a")), acknowledge)
    ended: list[bool] = []

    async def waiting() -> None:
        await wait(consumer)
        ended.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiting)
        tasks.start_soon(waiting)
        await until(lambda: "run() was not called within 0.02 s" in caplog.text)
        await anyio.sleep(0.06)
        assert caplog.text.count("was not called within") == 1
        assert ended == []
        # A later start ends the wait.
        async with started(consumer) as run:
            await until(lambda: ended == [True, True])
            assert await run.stop() is None


@pytest.mark.anyio
async def test_no_warning_says_that_nobody_runs_a_consumer_that_is_opening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    within, wait = 3_600.0, anyio.CancelScope()
    monkeypatch.setattr("lanes.runtime.lifecycle.RUN_WITHIN", within)
    limit = anyio.move_on_after
    monkeypatch.setattr(anyio, "move_on_after", lambda seconds: wait if seconds == within else limit(seconds))
    source = MemorySource(published("a"))
    source.block("open")
    consumer = consumer_of(source, acknowledge)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.opened)
        await turns()
        async with started(consumer) as run:
            await until(lambda: source.called("open"))
            # The time for a start is over.
            wait.cancel()
            await turns()
            source.unblock("open")
            await consumer.opened()
            assert await run.stop() is None
    assert "was not called within" not in caplog.text


@pytest.mark.anyio
async def test_opened_raises_the_error_of_the_dead_letters() -> None:
    broker = published("a")
    dead_letters = MemoryDeadLetters(broker)
    dead_letters.fail("open", SourceError("no topic for dead letters"))
    consumer = consumer_of(MemorySource(broker), acknowledge, dead_letters=dead_letters)
    async with started(consumer):
        with pytest.raises(SourceError, match="no topic for dead letters"):
            await consumer.opened()


@pytest.mark.anyio
async def test_opened_raises_an_error_that_has_ended_the_run() -> None:
    consumer = consumer_of(MemorySource(published("a")), fail, poison="exit")
    async with started(consumer) as run:
        assert isinstance(await run.end(), HandlerHalted)
        with pytest.raises(HandlerHalted):
            await consumer.opened()


@pytest.mark.anyio
async def test_opened_ends_with_a_run_that_was_cancelled_at_its_start() -> None:
    source = MemorySource(published("a"))
    source.block("open")
    consumer = consumer_of(source, acknowledge)
    async with started(consumer) as run:
        await until(lambda: source.called("open"))
        run.scope.cancel()
        with pytest.raises(LanesError, match="cancelled before the source was open"):
            await consumer.opened()


@pytest.mark.anyio
async def test_a_cancelled_wait_does_not_stop_the_consumer() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.block("open")
    consumer = consumer_of(source, acknowledge)
    async with started(consumer) as run:
        with anyio.move_on_after(0.01) as scope:
            await consumer.opened()
        assert scope.cancelled_caught
        source.unblock("open")
        await consumer.opened()
        await until(lambda: broker.acked() == [0])
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_block_that_waits_fails_with_the_error_of_the_start() -> None:
    before = living()
    source = MemorySource(published("a"))
    error = ConfigError("no topic")
    source.fail("open", error)
    entered = False

    async def enter() -> None:
        nonlocal entered
        async with consumer_of(source, acknowledge) as consumer:
            await consumer.opened()
            entered = True

    with pytest.raises(ConfigError) as caught:
        await enter()
    assert caught.value is error
    assert not entered
    assert living() <= before


# --- the end


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["start", "run"])
async def test_an_error_that_ends_the_run_is_logged(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """The exception may stay in a task without a waiting caller."""
    source = MemorySource(published("a"))
    if where == "start":
        source.fail("open", SourceError("no server"))
    consumer = consumer_of(source, fail, poison="exit")
    async with started(consumer) as run:
        assert isinstance(await run.end(), SourceError if where == "start" else HandlerHalted)
    lines = [one for one in caplog.records if "has stopped and handles no more messages" in one.getMessage()]
    (line,) = lines
    assert line.levelno == logging.ERROR
    expected = "(SourceError: no server)" if where == "start" else "(HandlerHalted: memory: the handler failed 1 time"
    assert expected in line.getMessage()


@pytest.mark.anyio
async def test_a_stop_and_a_second_run_are_not_logged_as_errors(caplog: pytest.LogCaptureFixture) -> None:
    consumer = consumer_of(MemorySource(published("a")), acknowledge)
    async with started(consumer) as run:
        await consumer.opened()
        with pytest.raises(LanesError, match="already"):
            await consumer.run()
        assert await run.stop() is None
    assert "has stopped" not in caplog.text


def test_serve_reports_an_error_once(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    source = MemorySource(published("a"))
    source.fail("open", SourceError("no server"))
    assert anyio.run(lanes.serve, consumer_of(source, acknowledge)) == 1
    assert capfd.readouterr().err == "lanes: SourceError: no server\n"
    assert "no server" not in caplog.text


@pytest.mark.anyio
async def test_an_application_ends_with_its_consumer() -> None:
    """The pattern of docs/guides/embedding.md, under a server that survives a failed lifespan."""
    signals: list[int] = []
    gate = anyio.Event()

    async def break_down(message: Message) -> None:
        await gate.wait()
        raise ValueError("poison")

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        try:
            async with consumer_of(MemorySource(published("a")), break_down, poison="exit") as consumer:
                await consumer.opened()
                yield
        except Exception:
            signals.append(signal.SIGTERM)
            raise

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(lifespan(None))
            gate.set()
            await anyio.sleep_forever()

    with pytest.raises(HandlerHalted):
        await serve()
    assert signals == [signal.SIGTERM]


# --- other threads


def test_every_member_says_which_threads_may_use_it() -> None:
    members = {name: member for name, member in vars(Consumer).items() if not name.startswith("_")}
    assert members.keys() == ANY_THREAD | ONE_THREAD
    for name, member in members.items():
        text = " ".join((inspect.getdoc(member) or "").split())
        assert ("ny thread" in text) == (name in ANY_THREAD), f"Consumer.{name}"
        assert ("Only the thread of the event loop may call" in text) == (name in ONE_THREAD), f"Consumer.{name}"


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Switch threads in the middle of everything."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.anyio
@pytest.mark.usefixtures("frequent_switches")
async def test_any_thread_may_ask_while_messages_are_handled() -> None:
    keys = [str(number) for number in range(6_000)]
    broker = published(*keys)
    over = threading.Event()
    asked = 0

    async def handler(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if message.attempt == 1 and message.position % 2:
            raise ValueError("again")

    consumer = consumer_of(
        MemorySource(broker), handler, attempts=2, concurrency=100, max_in_flight=3_000, unhealthy_after=1e-9
    )

    def ask() -> None:
        nonlocal asked
        while not over.is_set():
            assert consumer.status().in_flight <= 3_000
            consumer.health()
            assert consumer.ready
            assert isinstance(consumer.active and consumer.healthy, bool)
            asked += 1

    async with started(consumer) as run:
        await consumer.opened()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, ask)
            try:
                # The thread that asks takes most of the interpreter's time.
                while broker.unfinished or asked <= 100:
                    await anyio.lowlevel.checkpoint()
            finally:
                over.set()
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_thread_may_pause_and_resume() -> None:
    broker = published("a")
    handler = Gated(free=[b"a", b"b", b"c"])
    consumer = consumer_of(MemorySource(broker), handler)
    await anyio.to_thread.run_sync(consumer.pause)
    async with started(consumer) as run:
        await until(lambda: consumer.active)
        await turns()
        assert handler.started == []
        await anyio.to_thread.run_sync(consumer.resume)
        await until(lambda: broker.acked() == [0])
        await anyio.to_thread.run_sync(consumer.pause)
        await turns()
        broker.publish(key="b")
        await turns()
        assert handler.started == [0]
        assert consumer.status().paused
        # ``receive`` waits for no message now; only the call of the thread can wake it.
        await anyio.to_thread.run_sync(consumer.resume)
        await until(lambda: broker.acked() == [0, 1])
        assert await run.stop() is None
    await anyio.to_thread.run_sync(consumer.pause)


@pytest.mark.anyio
async def test_a_handler_in_a_thread_may_pause_and_ask() -> None:
    broker = published("a", "b")
    statuses: list[lanes.Status] = []

    def handler(message: Message) -> None:
        consumer.pause()
        statuses.append(consumer.status())

    consumer = consumer_of(MemorySource(broker), handler)
    async with started(consumer) as run:
        await until(lambda: broker.unfinished == 0)
        assert statuses[0].paused
        assert statuses[0].running >= 1
        assert await run.stop() is None


Call = Callable[[Consumer], object]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "call", "remedy"),
    [
        ("unblock", lambda consumer: consumer.unblock("a"), r"anyio\.from_thread\.run_sync\(consumer\.unblock, key\)"),
        ("park", lambda consumer: consumer.park("a"), r"anyio\.from_thread\.run_sync\(consumer\.park, key\)"),
        ("drain", lambda consumer: anyio.run(consumer.drain), r"call stop\(\), which any thread may call"),
        ("opened", lambda consumer: anyio.run(consumer.opened), "await it in that event loop"),
    ],
)
async def test_calls_that_belong_to_the_loop_are_refused_on_another_thread(name: str, call: Call, remedy: str) -> None:
    broker = published("a")
    consumer = consumer_of(MemorySource(broker), fail, dead_letters=MemoryDeadLetters(broker), poison="block")
    here = threading.current_thread().name
    async with started(consumer) as run:
        await consumer.opened()
        await until(lambda: consumer.status().blocked == 1)
        text = rf"Consumer\.{name} was called on the thread '.+', but .* of the thread {here!r}: .*{remedy}"
        with pytest.raises(LanesError, match=text):
            await anyio.to_thread.run_sync(call, consumer)
        await turns()
        assert (consumer.status().blocked, run.ended.is_set()) == (1, False)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_run_is_refused_where_another_thread_waits_for_its_start() -> None:
    consumer = consumer_of(MemorySource(published("a")), acknowledge)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.opened)
        await turns()
        with pytest.raises(LanesError, match=r"Consumer\.run was called on the thread"):
            await anyio.to_thread.run_sync(lambda: anyio.run(consumer.run))
        async with started(consumer) as run:
            await consumer.opened()
            assert await run.stop() is None


def from_a_worker_thread(call: Callable[[], Any]) -> Any:
    """As FastAPI calls a plain function."""
    return anyio.from_thread.run_sync(call)


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["from_thread", "callback"])
@pytest.mark.parametrize("name", ["unblock", "park"])
async def test_the_loop_runs_the_calls_of_other_threads(name: str, where: str) -> None:
    """The remedies that the refusals name."""
    broker = published("a", "a")
    calls = 0
    dead_letters = MemoryDeadLetters(broker)

    async def fail_once(message: Message) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("once")

    consumer = consumer_of(MemorySource(broker), fail_once, dead_letters=dead_letters, poison="block")
    counts: list[int] = []

    def call() -> None:
        counts.append(getattr(consumer, name)("a"))

    async with started(consumer) as run:
        await consumer.opened()
        await until(lambda: consumer.status().blocked == 1)
        if where == "from_thread":
            await anyio.to_thread.run_sync(from_a_worker_thread, call)
        elif anyio.get_cancelled_exc_class() is asyncio.CancelledError:
            enter = asyncio.get_running_loop().call_soon_threadsafe
            await anyio.to_thread.run_sync(enter, call)
        else:
            import trio

            await anyio.to_thread.run_sync(trio.lowlevel.current_trio_token().run_sync_soon, call)
        await until(lambda: broker.unfinished == 0)
        assert counts == [1]
        # The message that was unblocked runs again; the one that was parked does not.
        assert (len(dead_letters.called("put")), calls) == ((1, 2) if name == "park" else (0, 3))
        assert await run.stop() is None
