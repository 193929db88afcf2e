"""The kinds of handlers, and the functions that workers call for them."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import pickle
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableSequence, Sequence
from typing import Any, Final, Literal, cast, get_origin

from lanes.arguments import kind_of, shown_value
from lanes.config import Settings
from lanes.core.types import Message
from lanes.dead_letter import error_text, printable
from lanes.errors import ConfigError, MessageError

BatchOutcomes = Sequence[BaseException | None] | None
"""Result of a batch handler: ``None`` = every message is done; otherwise ``None`` or an exception for each message."""

Handler = Callable[[Message], object] | Callable[[list[Message]], object]
"""An async or plain function of one message, or of a list of messages with ``Settings(batch=…)``.

A return acknowledges the message. An exception fails the attempt; see ``Nak`` and ``Term``. A returned exception, or a
returned awaitable, stops the consumer. For a batch, see ``BatchOutcomes``.
"""

Decode = Callable[[Message], object]
"""A plain function that returns ``Message.data`` for a message. The function runs immediately before the handler of the
message.
"""

AsyncHandler = Callable[[Message], Awaitable[object]]
SyncHandler = Callable[[Message], object]
BatchHandler = Callable[[list[Message]], object]

_DECODING_MODULES: Final = frozenset(
    (
        "_pickle",
        "builtins",
        "cbor2",
        "json",
        "msgpack",
        "msgspec",
        "orjson",
        "pickle",
        "pydantic",
        "simplejson",
        "ujson",
    )
)
_DECODING_NAMES: Final = frozenset(("decode", "loads", "model_validate_json", "parse_raw", "unpackb", "validate_json"))
"""Functions of these names in these modules decode bytes or text, never a ``Message``."""

log = logging.getLogger("lanes")

_FAILING_RESULTS: Final = frozenset(
    ("nack", "nak", "retry", "requeue", "reject", "term", "dead_letter", "dead-letter", "dlq")
)
"""Texts by which handlers of other libraries fail a message."""

_told_results: Final[set[str]] = set()
"""Modules and names of the handlers whose result was reported in the log."""

_ANNOTATIONS_AS_TEXT: Final[dict[str, Any]] = (
    {"annotation_format": importlib.import_module("annotationlib").Format.STRING} if sys.version_info >= (3, 14) else {}
)
"""From Python 3.14 on, reading an annotation evaluates it, and the annotation may contain names that only type checkers
know.
"""

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
    check_function("handler", handler, wanted)
    assert callable(handler), "it was checked"
    _check_annotation(handler, batch=settings.batch is not None)
    if decode is not None:
        check_plain_function("decode", decode, "one message")
        _check_decodes_messages(decode)
    if settings.processes is not None:
        _check_processes(handler, decode, settings)
    if settings.timeout is not None and not is_async(handler) and settings.sync_handlers == "inline":
        raise ConfigError(
            f'timeout={settings.timeout:g} with sync_handlers="inline": such a handler runs on the event loop and '
            'cannot be interrupted; use sync_handlers="threads", or leave timeout out'
        )


def _check_decodes_messages(decode: object) -> None:
    """Raise ``ConfigError`` for a known decoder of bytes, such as ``json.loads``, which does not accept a message."""
    if isinstance(decode, type):
        takes_value = decode.__module__ == "builtins"
    else:
        owner = getattr(decode, "__objclass__", decode)
        module = str(getattr(owner, "__module__", None) or "").partition(".")[0]
        takes_value = module in _DECODING_MODULES and getattr(decode, "__name__", "") in _DECODING_NAMES
    if takes_value:
        raise ConfigError(
            f"decode={_name(decode)} takes a value, but decode gets the Message: write decode=lambda message: "
            f"{_call_of(decode)}(message.value)"
        )


def _check_processes(handler: object, decode: object, settings: Settings) -> None:
    """Raise ``ConfigError`` for a handler, decoder or setup that cannot run in another process."""
    if is_async(handler):
        raise ConfigError(
            f'handler={_name(handler)} is async, but sync_handlers="processes" runs only plain functions: write def in '
            "place of async def, or leave sync_handlers out"
        )
    if os.name != "posix":
        raise ConfigError(f'sync_handlers="processes" needs Linux or macOS, not {sys.platform}: use "threads"')
    if is_async(settings.process_setup):
        raise ConfigError(
            f"process_setup={_name(settings.process_setup)} is async: pass a plain function without arguments"
        )
    for name, function in (("handler", handler), ("decode", decode), ("process_setup", settings.process_setup)):
        try:
            pickle.dumps(function)
        except Exception as error:
            raise ConfigError(
                f"{name}={_name(function)} cannot be sent to another process ({type(error).__qualname__}: "
                f"{printable(error_text(error))}). Define {'the class' if _of_a_class(function) else 'it with def'} "
                "at the top of a module, and open locks, files and connections in process_setup=…"
            ) from error


def _of_a_class(function: object) -> bool:
    """Return whether a function is a class, or a method of a class or an object."""
    return isinstance(function, type) or inspect.ismethod(function)


def check_plain_function(name: str, function: object, wanted: str) -> None:
    """Raise ``ConfigError`` for an async function, or an object that ``check_function`` refuses."""
    if is_async(function):
        raise ConfigError(f"{name}={_name(function)} is async: pass a plain function of {wanted}")
    check_function(name, function, wanted)


def check_function(name: str, function: object, wanted: str) -> None:
    """Raise ``ConfigError`` for an object that does not accept one argument, or whose call would do nothing.

    Args:
        name: Name of the argument.
        function: The argument.
        wanted: The function's own argument, such as "one message".
    """
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
                f"{name} is a functools.partial with arguments that {_name(function)} does not take; bind only its "
                "parameters"
            )
        return
    try:
        signature.bind(None)
    except TypeError as error:
        if isinstance(function, functools.partial) and not _places(signature) and _places(_signature(function.func)):
            raise ConfigError(
                f"{name} is a functools.partial that sets every argument of {_name(function)}, so {wanted} cannot be "
                "passed: leave the first argument out of the partial, and set the others by name"
            ) from None
        takes = ", ".join(signature.parameters) or "nothing"
        alone = " alone" if signature.parameters else ""
        remedy = f"pass a function of {wanted}; functools.partial sets further arguments"
        if method := _method_without_instance(function, signature):
            remedy = f"pass the method of an instance, such as {method}"
        raise ConfigError(
            f"{name}={_name(function)} takes {takes}, and cannot be called with {wanted}{alone} ({error}): {remedy}"
        ) from None


def _places(signature: inspect.Signature | None) -> bool:
    """Return whether a function takes a positional argument."""
    kinds = (*_BY_POSITION, inspect.Parameter.VAR_POSITIONAL)
    return signature is not None and any(parameter.kind in kinds for parameter in signature.parameters.values())


def _method_without_instance(function: Callable[..., object], signature: inspect.Signature) -> str:
    """Return the expression that the user must write for the method of an instance; "" = no method of a class."""
    owner, _, name = handler_name(function).rpartition(".")
    if not inspect.isfunction(function) or not owner or next(iter(signature.parameters), "") != "self":
        return ""
    return f"{owner}(…).{name}"


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature of a function itself, not of a function that it wraps; None = Python finds no signature."""
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
            f"handler={_name(handler)} takes one message ({named}), but batch= passes lists of messages: take "
            "list[Message], or leave batch out"
        )
    if takes == "list" and not batch:
        raise ConfigError(
            f"handler={_name(handler)} takes a list of messages ({named}), but without batch= each call has one "
            "message: set Settings(batch=…), or take one Message"
        )
    if not batch and _excludes_message(annotation):
        # The message of a client has the same name.
        same = named.endswith(": Message")
        raise ConfigError(
            f"handler={_name(handler)} takes {f'{parameter.name}: {text}' if same else named}, "
            f"but each call has a Message{' of lanes' if same else ''}: annotate the parameter as "
            "lanes.Message, and read message.value, or message.data with decode=…"
        )


def _excludes_message(annotation: object) -> bool:
    """Return whether an annotation is a class without ``Message`` instances, such as ``bytes`` or a model."""
    origin = get_origin(annotation)
    kind = annotation if origin is None else origin
    if not isinstance(kind, type) or kind is Any or kind is inspect.Parameter.empty:
        return False
    if origin is not None and kind.__module__ not in ("builtins", "collections.abc"):
        return False  # A union, or another form of ``typing``.
    # A protocol may describe the attributes of a ``Message``, and a subclass may only add type hints.
    if getattr(kind, "_is_protocol", False) or issubclass(kind, Message):
        return False
    return not issubclass(Message, kind)


def _takes(annotation: object) -> Literal["message", "list"] | None:
    """Return the kind of argument that an annotation names; None = any argument, or an unknown annotation."""
    if isinstance(annotation, str):
        text = annotation.replace(" ", "")
        return "message" if _MESSAGE.fullmatch(text) else "list" if _LIST.fullmatch(text) else None
    if annotation is Message:
        return "message"
    return "list" if (get_origin(annotation) or annotation) in _LISTS else None


def _name(function: object) -> str:
    """Return the name of a function.

    The name does not come from the repr, which may show secret arguments of ``functools.partial``.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def fill_data(message: Message, decode: Decode) -> None:
    """Fill ``message.data``. A failure raises ``MessageError``, because another attempt would fail too."""
    try:
        message.data = decode(message)
    except MessageError as error:
        error.unread = True
        raise
    except Exception as error:
        remedy = "correct decode=…, or the producer of such messages"
        if _expects_a_value(error):
            remedy = f"decode gets the Message; {_remedy_of_value(decode)}"
        # Without the position, which each line and each dead letter has: one cause has one reason in all dead letters.
        unreadable = MessageError(f"decode failed with {type(error).__qualname__}: {remedy}")
        unreadable.unread = True
        text = error_text(error)
        unreadable.decoder_error = f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__
        raise unreadable from error
    if hasattr(type(message.data), "__await__"):
        if inspect.iscoroutine(message.data):
            message.data.close()
        raise ConfigError(
            f"decode={_name(decode)} returned an awaitable ({type(message.data).__name__}) at {message.partition.id} "
            f"position {message.position}: decode with a plain function, or await in the handler"
        )


def _expects_a_value(error: Exception) -> bool:
    """Return whether ``decode=`` failed because it takes bytes.

    For pydantic, the ``ValueError`` names the type of the input.
    """
    text = error_text(error)
    return "input_type=Message]" in text or (isinstance(error, TypeError) and "Message" in text)


def _remedy_of_value(decode: object) -> str:
    """Return the argument ``decode=…`` that the user must write for a decoder that takes bytes."""
    if _name(decode).endswith("<lambda>"):
        return "pass message.value on in the lambda, in place of the message"
    return f"write decode=lambda message: {_call_of(decode)}(message.value)"


def _call_of(function: object) -> str:
    """Return the name by which users call a function.

    The name of a class method includes the class, as in ``Order.parse``.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return f"{owner.__qualname__}.{getattr(function, '__name__', _name(function))}"
    return _name(function)


def async_handler(handler: Callable[..., object], decode: Decode | None) -> AsyncHandler:
    """Return a handler of one message as an async function, which workers on the event loop call.

    The caller passes a result that is not None to ``check_returned``.
    """
    if is_async(handler):
        awaited = cast(AsyncHandler, handler)
        if decode is None:
            return awaited

        async def decoding(message: Message) -> None:
            fill_data(message, decode)
            if (returned := await awaited(message)) is not None:
                check_returned(awaited, returned, message)

        decoding.__qualname__ = handler_name(handler)  # the name in a log line
        return decoding

    async def inline(message: Message) -> None:
        if decode is not None:
            fill_data(message, decode)
        if (returned := handler(message)) is not None:
            check_returned(handler, returned, message)

    return inline


def sync_handler(handler: Callable[..., object], decode: Decode | None) -> SyncHandler:
    """Return a handler of one message as a plain function, which threads call."""

    def plain(message: Message) -> None:
        if decode is not None:
            fill_data(message, decode)
        if (returned := handler(message)) is not None:
            check_returned(handler, returned, message)

    return plain


def check_returned(handler: object, returned: object, message: Message) -> None:
    """Raise ``ConfigError`` if a handler of one message returned an exception, or an awaitable.

    The handler should raise the exception, and no code would await the awaitable. The consumer ignores any other
    result. The first result that looks like a failure causes a warning in the log.
    """
    if returned is False or (isinstance(returned, str) and returned.casefold() in _FAILING_RESULTS):
        _warn_of_a_failing_result(handler, returned, message)
        return
    if isinstance(returned, BaseException) or (isinstance(returned, type) and issubclass(returned, BaseException)):
        kind = returned if isinstance(returned, type) else type(returned)
        what = f"the class {kind.__name__}" if isinstance(returned, type) else f"the exception {kind.__name__}"
        raise ConfigError(
            f"handler={_name(handler)} returned {what} at {message.partition.id} position {message.position}, and a "
            "return acknowledges the message: raise it, with raise in place of return"
        )
    refuse_awaitable(handler, returned, message)


def _warn_of_a_failing_result(handler: object, returned: object, message: Message) -> None:
    """Log the first result with which a handler probably intends to fail its message."""
    module = getattr(handler, "__module__", None)
    told = f"{module}:{_name(handler)}"
    if told in _told_results:
        return
    _told_results.add(told)
    log.warning(
        "handler=%s returned %s at %s position %d, and a return acknowledges the message: write raise lanes.Nak(…) for "
        "another attempt, raise lanes.Term(…) to give the message up, or return None",
        _name(handler),
        shown_value(returned),
        message.partition.id,
        message.position,
    )


def refuse_awaitable(handler: object, returned: object, message: Message) -> None:
    """Raise ``ConfigError`` if a handler returned an awaitable, because no caller would await it."""
    if returned is None or not inspect.isawaitable(returned):
        return
    if inspect.iscoroutine(returned):
        # Otherwise Python warns about a coroutine that was never awaited, without naming the handler.
        returned.close()
    kind, place = type(returned).__name__, f"{message.partition.id} position {message.position}"
    if is_async(handler):
        raise ConfigError(
            f"handler={_name(handler)} returned an awaitable ({kind}) at {place}, so the message was not handled: "
            "await it in the handler"
        )
    raise ConfigError(
        f"handler={_name(handler)} is a plain function and returned an awaitable ({kind}) at {place}, so the message "
        "was not handled: declare the handler and its wrappers as async def"
    )
