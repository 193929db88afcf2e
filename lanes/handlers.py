"""What a user may pass as a handler, and how it is made into what the workers call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from lanes.config import Settings
from lanes.core.types import Message
from lanes.errors import ConfigError, MessageError

__all__ = [
    "AsyncHandler",
    "BatchHandler",
    "BatchOutcomes",
    "Decode",
    "Handler",
    "SyncHandler",
    "async_handler",
    "check_handler",
    "decoded",
    "is_async",
    "refuse_awaitable",
    "sync_handler",
]

BatchOutcomes = Sequence[BaseException | None] | None
"""What a batch handler returns: None when all of it is done, or for each message None or why it failed."""

Handler = Callable[[Message], object] | Callable[[list[Message]], object]
"""A function of one message, or of a list of them with ``Settings(batch=…)``: async, or plain.

Returning acknowledges it; see ``Nak`` and ``Term`` for the rest. For a batch see ``BatchOutcomes``.
"""

Decode = Callable[[Message], object]
"""A plain function that makes ``Message.data`` of a message. It runs in the message's turn, before the handler."""

AsyncHandler = Callable[[Message], Awaitable[object]]
SyncHandler = Callable[[Message], object]
BatchHandler = Callable[[list[Message]], object]


def is_async(handler: Callable[..., object]) -> bool:
    """Whether calling it gives something to await: a coroutine function, or an object whose call is one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def check_handler(handler: object, decode: object, settings: Settings) -> None:
    """Raise ``ConfigError`` for what can be no handler."""
    if not callable(handler):
        raise ConfigError(f"handler={handler!r} is not callable: pass a function of one message, async or plain")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise ConfigError(f"handler={handler!r} is a generator: it would never run; use return, not yield")
    if decode is not None and (not callable(decode) or is_async(decode)):
        raise ConfigError(f"decode={decode!r}: pass a plain function of one message")
    if settings.timeout is not None and not is_async(handler) and settings.sync_handlers == "inline":
        raise ConfigError(
            f'timeout={settings.timeout:g} with sync_handlers="inline": the event loop waits for such a handler, so '
            'nothing can interrupt it; use sync_handlers="threads", or leave timeout out'
        )


def decoded(message: Message, decode: Decode) -> None:
    """Fill ``message.data``. Raises ``MessageError`` when ``decode`` fails: another attempt would fail as well."""
    try:
        message.data = decode(message)
    except MessageError:
        raise
    except Exception as error:
        raise MessageError(
            f"decode failed at {message.partition.id} position {message.position} with {type(error).__qualname__}: "
            "correct decode=…, or what writes such messages"
        ) from error


def async_handler(handler: Callable[..., object], decode: Decode | None) -> AsyncHandler:
    """The handler of one message as the workers on the event loop call it."""
    if is_async(handler):
        awaited = cast(AsyncHandler, handler)
        if decode is None:
            return awaited

        async def decoding(message: Message) -> None:
            decoded(message, decode)
            await awaited(message)

        return decoding

    async def inline(message: Message) -> None:
        if decode is not None:
            decoded(message, decode)
        refuse_awaitable(handler, handler(message), message)

    return inline


def sync_handler(handler: Callable[..., object], decode: Decode | None) -> SyncHandler:
    """The handler of one message as the threads call it."""

    def plain(message: Message) -> None:
        if decode is not None:
            decoded(message, decode)
        refuse_awaitable(handler, handler(message), message)

    return plain


def refuse_awaitable(handler: object, returned: object, message: Message) -> None:
    """Raise ``ConfigError`` for what a plain function must not return: it would never be awaited."""
    if returned is not None and inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            # Or it would warn, and name no handler, that it was never awaited.
            returned.close()
        raise ConfigError(
            f"handler={handler!r} is a plain function and returned something to await ({type(returned).__name__}) at "
            f"{message.partition.id} position {message.position}, which was not handled: declare the handler, and what "
            "wraps it, as async def"
        )
