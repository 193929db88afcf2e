"""The kinds of handlers, and the functions that workers call for them."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableSequence, Sequence
from typing import Any, Final, Literal, cast, get_origin

from lanes.config import Settings, kind_of
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

_ANNOTATIONS_AS_TEXT: Final[dict[str, Any]] = (
    {"annotation_format": importlib.import_module("annotationlib").Format.STRING} if sys.version_info >= (3, 14) else {}
)
"""From Python 3.14 on, an annotation is evaluated when it is read, and may have a name for type checkers only."""

_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_LISTS: Final = (list, Sequence, MutableSequence, Collection, Iterable)
_MESSAGE: Final = re.compile(r"(?:\w+\.)*Message")
_MODULES: Final = re.compile(r"(?:\w+\.)+")
_LIST: Final = re.compile(r"(?:\w+\.)*(?:[Ll]ist|Sequence|MutableSequence|Collection|Iterable)\[(?:\w+\.)*Message\]")


def is_async(handler: object) -> bool:
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
    """Raise ``ConfigError`` for an invalid handler or decoder."""
    wanted = "a list of messages" if settings.batch is not None else "one message"
    if isinstance(handler, type):
        # Each call would make an instance, and acknowledge the message.
        raise ConfigError(
            f"handler={handler.__qualname__} is a class: pass a function of {wanted}, or an instance with __call__"
        )
    _check_function("handler", handler, wanted)
    assert callable(handler), "it was checked"
    _check_annotation(handler, batch=settings.batch is not None)
    if decode is not None:
        if is_async(decode):
            raise ConfigError(f"decode={_name(decode)} is async: pass a plain function of one message")
        _check_function("decode", decode, "one message")
    if settings.timeout is not None and not is_async(handler) and settings.sync_handlers == "inline":
        raise ConfigError(
            f'timeout={settings.timeout:g} with sync_handlers="inline": such a handler runs on the event loop and '
            'cannot be interrupted; use sync_handlers="threads", or leave timeout out'
        )


def _check_function(name: str, function: object, wanted: str) -> None:
    """Raise ``ConfigError`` for an object that cannot be called with one argument, or whose call would do nothing."""
    if inspect.iscoroutine(function):
        # Otherwise Python warns about a coroutine that was never awaited, without naming the argument.
        function.close()
        raise ConfigError(
            f"{name} is a coroutine, the result of {function.__qualname__}(…): pass the function itself, without a call"
        )
    if inspect.isgenerator(function) or inspect.isasyncgen(function):
        raise ConfigError(
            f"{name} is a generator, the result of {function.__qualname__}(…): pass a function of {wanted}, with return"
            " in place of yield"
        )
    if not callable(function):
        raise ConfigError(f"{name} is {kind_of(function)}, which is not callable: pass a function of {wanted}")
    bodies = (function, getattr(function, "__call__", None))  # noqa: B004
    if any(inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body) for body in bodies):
        raise ConfigError(f"{name}={_name(function)} is a generator: its body would never run; use return, not yield")
    signature = _signature(function)
    if signature is None:
        if isinstance(function, functools.partial) and _signature(function.func) is not None:
            raise ConfigError(
                f"{name} is a functools.partial with arguments that {_name(function)} does not take: correct them"
            )
        return
    try:
        signature.bind(None)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise ConfigError(
            f"{name}={_name(function)} takes {takes}, and cannot be called with {wanted} alone ({error}): pass a "
            f"function of {wanted}; functools.partial sets further arguments"
        ) from None


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature of a function itself, not of a function that it wraps. None = unknown to Python."""
    try:
        return inspect.signature(function, follow_wrapped=False, **_ANNOTATIONS_AS_TEXT)
    except (TypeError, ValueError):
        # Some functions in C have no signature.
        return None


def _check_annotation(handler: Callable[..., object], *, batch: bool) -> None:
    """Raise ``ConfigError`` if the annotation of the first parameter contradicts ``batch``."""
    # A wrapper has the annotations of the function that it wraps, and may call that function in another way.
    if hasattr(handler, "__wrapped__"):
        return
    try:
        signature: inspect.Signature | None = inspect.signature(handler, follow_wrapped=False, eval_str=True)
    except Exception:
        # A name may exist for type checkers only. The text of the annotation then decides.
        signature = _signature(handler)
    parameter = None if signature is None else next(iter(signature.parameters.values()), None)
    if parameter is None or parameter.kind not in _BY_POSITION:
        return
    takes = _takes(parameter.annotation)
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    named = f"{parameter.name}: {_MODULES.sub('', text)}"
    if takes == "message" and batch:
        raise ConfigError(
            f"handler={_name(handler)} takes one message ({named}), and batch= passes lists of messages: take "
            "list[Message], or leave batch out"
        )
    if takes == "list" and not batch:
        raise ConfigError(
            f"handler={_name(handler)} takes a list of messages ({named}), and without batch= each call has one "
            "message: set Settings(batch=…), or take one Message"
        )


def _takes(annotation: object) -> Literal["message", "list"] | None:
    """Return the kind of argument that an annotation asks for. None = any argument, or an unknown annotation."""
    if isinstance(annotation, str):
        text = annotation.replace(" ", "")
        return "message" if _MESSAGE.fullmatch(text) else "list" if _LIST.fullmatch(text) else None
    if annotation is Message:
        return "message"
    return "list" if (get_origin(annotation) or annotation) in _LISTS else None


def _name(function: object) -> str:
    """Return the name of a function. A repr may show arguments of ``functools.partial``, which may be secrets."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


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
