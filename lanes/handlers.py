"""The kinds of handlers, and the functions that workers call for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from lanes.config import Settings
from lanes.core.types import Message
from lanes.errors import ConfigError, MessageError

BatchOutcomes = Sequence[BaseException | None] | None
"""Result of a batch handler: ``None`` = every message is done; otherwise ``None`` or an exception for each message."""

Handler = Callable[[Message], object] | Callable[[list[Message]], object]
"""An async or plain function of one message, or of a list of messages with ``Settings(batch=…)``.

A return acknowledges the message. An exception fails the attempt; see ``Nak`` and ``Term``. For a batch, see
``BatchOutcomes``.
"""

Decode = Callable[[Message], object]
"""A plain function that returns ``Message.data`` for a message. It runs right before the handler of the message."""

AsyncHandler = Callable[[Message], Awaitable[object]]
SyncHandler = Callable[[Message], object]
BatchHandler = Callable[[list[Message]], object]


def is_async(handler: Callable[..., object]) -> bool:
    """Return whether a handler, or its ``__call__``, is a coroutine function."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def handler_name(handler: object) -> str:
    """Return the name of a handler for the log, without its module."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    name = str(getattr(handler, "__qualname__", type(handler).__qualname__))
    # A function in a function is named ``outer.<locals>.inner``.
    return name.rpartition("<locals>.")[2]


def check_handler(handler: object, decode: object, settings: Settings) -> None:
    """Raise ``ConfigError`` for a handler or a decoder that cannot work."""
    if not callable(handler):
        raise ConfigError(f"handler={handler!r} is not callable: pass a function of one message, async or plain")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise ConfigError(f"handler={handler!r} is a generator: its body would never run; use return, not yield")
    if decode is not None and (not callable(decode) or is_async(decode)):
        raise ConfigError(f"decode={decode!r}: pass a plain function of one message")
    if settings.timeout is not None and not is_async(handler) and settings.sync_handlers == "inline":
        raise ConfigError(
            f'timeout={settings.timeout:g} with sync_handlers="inline": such a handler runs on the event loop and '
            'cannot be interrupted; use sync_handlers="threads", or leave timeout out'
        )


def fill_data(message: Message, decode: Decode) -> None:
    """Fill ``message.data``. A failure is a ``MessageError``, because another attempt would fail as well."""
    try:
        message.data = decode(message)
    except MessageError:
        raise
    except Exception as error:
        raise MessageError(
            f"decode failed at {message.partition.id} position {message.position} with {type(error).__qualname__}: "
            "correct decode=…, or the producer of such messages"
        ) from error


def async_handler(handler: Callable[..., object], decode: Decode | None) -> AsyncHandler:
    """Return a handler of one message as an async function, which workers on the event loop call."""
    if is_async(handler):
        awaited = cast(AsyncHandler, handler)
        if decode is None:
            return awaited

        async def decoding(message: Message) -> None:
            fill_data(message, decode)
            await awaited(message)

        return decoding

    async def inline(message: Message) -> None:
        if decode is not None:
            fill_data(message, decode)
        refuse_awaitable(handler, handler(message), message)

    return inline


def sync_handler(handler: Callable[..., object], decode: Decode | None) -> SyncHandler:
    """Return a handler of one message as a plain function, which threads call."""

    def plain(message: Message) -> None:
        if decode is not None:
            fill_data(message, decode)
        refuse_awaitable(handler, handler(message), message)

    return plain


def refuse_awaitable(handler: object, returned: object, message: Message) -> None:
    """Raise ``ConfigError`` if a plain function returned an awaitable, which would never be awaited."""
    if returned is not None and inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            # Otherwise Python warns about a coroutine that was never awaited, without naming the handler.
            returned.close()
        raise ConfigError(
            f"handler={handler!r} is a plain function and returned an awaitable ({type(returned).__name__}) at "
            f"{message.partition.id} position {message.position}, so the message was not handled: declare the handler "
            "and its wrappers as async def"
        )
