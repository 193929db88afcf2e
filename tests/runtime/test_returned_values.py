"""A handler of one message that returns an exception or an awaitable stops the consumer, and settles no message.

A result that looks like a failure, such as False, is a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

import lanes
from lanes import ConfigError, Consumer, DeadLetter, Message, Settings, handlers
from lanes.dead_letters.box import replay
from memsource import MemoryBroker, MemorySource
from tests.fakes.support import published

SECRET = "canary51fe"

EXCEPTIONS: list[tuple[Callable[[], object], str]] = [
    (lambda: lanes.Nak(SECRET, delay=1), "the exception Nak"),
    (lambda: lanes.Term(SECRET), "the exception Term"),
    (lambda: lanes.Nak, "the class Nak"),
    (lambda: lanes.Term, "the class Term"),
    (lambda: ValueError(SECRET), "the exception ValueError"),
    (lambda: SystemExit, "the class SystemExit"),
]

Kind = Literal["async", "threads", "inline"]


async def refusal(kind: Kind, result: Callable[[], object], *, decode: bool) -> tuple[str, MemoryBroker]:
    """The error of a run over two messages whose handler returns this result, and the broker after the run."""
    broker = published("a", "b")
    source = MemorySource(broker)
    source.finish()

    def plain(message: Message) -> object:
        return result()

    async def handle(message: Message) -> object:
        return result()

    consumer = Consumer(
        source,
        handle if kind == "async" else plain,
        settings=Settings(concurrency=1, sync_handlers="inline" if kind == "inline" else "threads"),
        decode=(lambda message: message.value) if decode else None,
    )
    with pytest.raises(ConfigError) as refused:
        await consumer.run()
    return str(refused.value), broker


@pytest.mark.anyio
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", ["async", "threads", "inline"])
@pytest.mark.parametrize(("result", "what"), EXCEPTIONS, ids=[what for _, what in EXCEPTIONS])
async def test_a_returned_exception_stops_the_consumer(
    kind: Kind, decode: bool, result: Callable[[], object], what: str
) -> None:
    text, broker = await refusal(kind, result, decode=decode)
    name = "handle" if kind == "async" else "plain"
    assert text == (
        f"handler=refusal.<locals>.{name} returned {what} at memory/0 position 0, and a return acknowledges the "
        "message: raise it, with raise in place of return"
    )
    assert broker.acked() == []


@pytest.mark.anyio
@pytest.mark.parametrize("decode", [False, True])
async def test_an_awaitable_of_an_async_handler_stops_the_consumer(decode: bool) -> None:
    # A warning about a coroutine that was never awaited would fail this test.
    async def save() -> None:
        raise AssertionError("is never awaited")

    text, broker = await refusal("async", save, decode=decode)
    assert text == (
        "handler=refusal.<locals>.handle returned an awaitable (coroutine) at memory/0 position 0, so the message was "
        "not handled: await it in the handler"
    )
    assert broker.acked() == []


@pytest.mark.anyio
async def test_a_batch_of_an_async_handler_that_returns_an_awaitable_is_refused() -> None:
    async def save() -> None:
        raise AssertionError("is never awaited")

    async def handle(batch: list[Message]) -> Any:
        return save()

    broker = published("a", "b")
    with pytest.raises(ConfigError, match=r"returned an awaitable \(coroutine\) at .*: await it in the handler$"):
        await Consumer(MemorySource(broker), handle, settings=Settings(batch=2)).run()
    assert broker.acked() == []


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["async", "threads", "inline"])
@pytest.mark.parametrize("result", [0, False, "text", [lanes.Nak()], {"a": 1}, int, object()])
async def test_any_other_result_has_no_meaning(kind: Kind, result: object) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    source.finish()

    def plain(message: Message) -> object:
        return result

    async def handle(message: Message) -> object:
        return result

    mode: Literal["inline", "threads"] = "inline" if kind == "inline" else "threads"
    await lanes.run(source, handle if kind == "async" else plain, settings=Settings(sync_handlers=mode))
    assert broker.acked() == [0, 1]


def dead_letter() -> DeadLetter:
    return DeadLetter(
        id="0" * 32,
        source="src",
        partition=0,
        position=5,
        subject="src",
        key=b"key",
        value=b"{}",
        headers=(),
        attempts=1,
        error_type="ValueError",
        error_text="no",
        epoch=1,
        time=0.0,
    )


async def returns_term(message: Message) -> object:
    return lanes.Term("no")


def plainly_returns_term(message: Message) -> object:
    return lanes.Term("no")


@pytest.mark.anyio
@pytest.mark.parametrize("handler", [returns_term, plainly_returns_term])
async def test_a_replay_with_a_returned_exception_fails(handler: Callable[[Message], object]) -> None:
    with pytest.raises(ConfigError, match="returned the exception Term at src/0 position 5"):
        await replay(dead_letter(), handler, None)


async def finished(kind: Kind, results: Sequence[object], *, decode: bool = False) -> MemoryBroker:
    """The broker after a run whose handler returned these results, one for each message."""
    broker = published(*(str(number) for number in range(len(results))))
    source = MemorySource(broker)
    source.finish()
    left = iter(results)

    def plain(message: Message) -> object:
        return next(left)

    async def handle(message: Message) -> object:
        return next(left)

    consumer = Consumer(
        source,
        handle if kind == "async" else plain,
        settings=Settings(concurrency=1, sync_handlers="inline" if kind == "inline" else "threads"),
        decode=(lambda message: message.value) if decode else None,
    )
    await consumer.run()
    return broker


@pytest.mark.anyio
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", ["async", "threads", "inline"])
@pytest.mark.parametrize(("result", "shown"), [(False, "False"), ("nack", "'nack'"), ("Retry", "'Retry'")])
async def test_the_first_result_that_looks_like_a_failure_is_a_warning(
    kind: Kind,
    decode: bool,
    result: object,
    shown: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handlers, "_told_results", set())
    broker = await finished(kind, [result, result, result], decode=decode)
    name = "handle" if kind == "async" else "plain"
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warning == (
        f"handler=finished.<locals>.{name} returned {shown} at memory/0 position 0, and a return acknowledges the "
        "message: write raise lanes.Nak(…) for another attempt, raise lanes.Term(…) to give the message up, or return "
        "None"
    )
    assert broker.acked() == [0, 1, 2]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["async", "threads", "inline"])
async def test_other_results_are_no_warning(
    kind: Kind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_told_results", set())
    broker = await finished(kind, [True, "ack", "nacked 3 orders", 0, [], {"retry": False}, None, ""])
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert len(broker.acked()) == 8


@pytest.mark.anyio
async def test_a_replay_warns_of_a_result_that_looks_like_a_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_told_results", set())
    await replay(dead_letter(), lambda message: "nack", None)
    assert caplog.text.count("and a return acknowledges the message: write raise lanes.Nak(…)") == 1
