"""The constructor refuses a handler that cannot be called with its argument, before any message fails."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional, Protocol

import confluent_kafka
import pytest
from pydantic import BaseModel, TypeAdapter

import lanes
from lanes import ConfigError, Consumer, Message, Settings, handlers, run
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import acknowledge, acknowledge_all, published

if TYPE_CHECKING:
    from lanes.core.types import Message as Hidden

SECRET = "canary77d1"


def consumer(handler: Any, *, decode: Any = None, batch: int | None = None) -> Consumer:
    return Consumer(MemorySource(MemoryBroker()), handler, decode=decode, settings=Settings(batch=batch))


def refusal(handler: Any, *, decode: Any = None, batch: int | None = None) -> str:
    """The text of the refusal of this handler."""
    with pytest.raises(ConfigError) as refused:
        consumer(handler, decode=decode, batch=batch)
    return str(refused.value)


class Charges:
    def method(self, message: Message) -> None: ...

    def two(self, message: Message, account: str) -> None: ...


class PydanticOrder(BaseModel):
    amount: int


class CallableOfOne:
    def __call__(self, message: Message) -> None: ...


class CallableOfNothing:
    async def __call__(self) -> None: ...


class CallableGenerator:
    def __call__(self, message: Message) -> Iterator[None]:
        yield


def nothing() -> None: ...


async def two(message: Message, database: str) -> None: ...


async def needs_keyword(message: Message, *, database: str) -> None: ...


def generator(message: Message) -> Iterator[None]:
    yield


async def async_generator(message: Message) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("handler", "takes", "why"),
    [
        (nothing, "nothing takes nothing", "too many positional arguments"),
        (lambda: None, "<lambda> takes nothing", "too many positional arguments"),
        (two, "two takes message, database", "missing a required argument: 'database'"),
        (needs_keyword, "needs_keyword takes message, database", "missing a required"),
        (Charges().two, "Charges.two takes message, account", "missing a required argument: 'account'"),
        (CallableOfNothing(), "CallableOfNothing takes nothing", "too many positional arguments"),
        (functools.partial(two), "two takes message, database", "missing a required argument: 'database'"),
    ],
)
def test_a_wrong_number_of_parameters_is_refused(handler: Any, takes: str, why: str) -> None:
    said = refusal(handler)
    alone = "" if takes.endswith(" nothing") else " alone"
    assert re.sub("[^ ]*<locals>.", "", said).startswith(
        f"handler={takes}, and cannot be called with one message{alone} ({why}"
    )
    assert said.endswith("pass a function of one message; functools.partial sets further arguments")


def untyped(function: Any) -> Any:
    return function


async def of_account(message: Message, account: str = "x") -> None: ...


@pytest.mark.parametrize(
    "handler",
    [
        functools.partial(untyped(acknowledge), SECRET),
        functools.partial(untyped(acknowledge), message=SECRET),
        functools.partial(functools.partial(untyped(of_account), SECRET), "an account"),
    ],
    ids=["by place", "by name", "a partial of a partial"],
)
def test_a_partial_that_leaves_no_argument_is_refused(handler: Any) -> None:
    name = "of_account" if "of_account" in repr(handler) else "acknowledge"
    assert refusal(handler) == (
        f"handler is a functools.partial that sets every argument of {name}, so one message cannot be passed: leave "
        "the first argument out of the partial, and set the others by name"
    )


def test_a_method_without_its_instance_is_refused_with_the_call_that_makes_one() -> None:
    assert refusal(Charges.method) == (
        "handler=Charges.method takes self, message, and cannot be called with one message alone (missing a required "
        "argument: 'message'): pass the method of an instance, such as Charges(…).method"
    )


def test_the_result_of_a_call_is_refused_in_place_of_the_function() -> None:
    # A warning about a coroutine that was never awaited would fail this test.
    message: Any = None
    assert refusal(acknowledge(message)) == (
        "handler is a coroutine, the result of acknowledge(…): pass the function itself, without a call"
    )
    for made in (generator(message), async_generator(message)):
        said = refusal(made)
        assert re.match(r"handler is a generator, the result of \w+\(…\): pass a function of one message", said)


@pytest.mark.parametrize("handler", [generator, async_generator, CallableGenerator(), functools.partial(generator)])
def test_a_generator_function_is_refused(handler: Any) -> None:
    assert refusal(handler).endswith("is a generator: its body would never run; use return, not yield")


def test_a_class_is_refused() -> None:
    assert refusal(Charges) == (
        "handler=Charges is a class: pass a function of one message, or an instance with __call__"
    )


@pytest.mark.parametrize(("handler", "kind"), [(None, "None"), (5, "an int"), ({"a": 1}, "a dict"), (SECRET, "a str")])
def test_an_object_that_cannot_be_called_is_refused_without_its_value(handler: Any, kind: str) -> None:
    assert refusal(handler) == f"handler is {kind}, which is not callable: pass a function of one message"


def test_an_argument_of_a_partial_is_not_shown() -> None:
    said = refusal(functools.partial(untyped(two), SECRET, SECRET, SECRET))
    assert said == "handler is a functools.partial with arguments that two does not take; bind only its parameters"
    said = refusal(functools.partial(untyped(needs_keyword), extra=SECRET))
    assert SECRET not in said


# --- annotations and batch


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before Python 3.14 the definition of such a handler fails")
def test_a_handler_with_an_undefined_annotation_is_checked() -> None:
    names: dict[str, Any] = {}
    for text in ("def two(message: Hidden, database: Hidden): ...", "def lists(messages: list[Message]): ..."):
        exec(compile(text, "handlers.py", "exec", dont_inherit=True), names)
    assert "takes message, database" in refusal(names["two"])
    assert "takes a list of messages" in refusal(names["lists"])


def test_an_annotation_without_a_value_is_read_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = inspect.signature

    def of_python_3_14(function: Any, *, annotation_format: str = "value", **options: Any) -> inspect.Signature:
        if annotation_format == "value":
            raise NameError("name 'Hidden' is not defined")
        return signature(function, **options)

    monkeypatch.setattr(handlers, "_ANNOTATIONS_AS_TEXT", {"annotation_format": "text"}, raising=False)
    monkeypatch.setattr(inspect, "signature", of_python_3_14)
    assert "takes message, database" in refusal(two)
    assert "takes a list of messages" in refusal(a_list)


def a_list(messages: list[Message]) -> None: ...


def a_sequence(messages: Sequence[lanes.Message]) -> None: ...


def a_hidden_list(messages: list[Hidden], unknown: Unknown = None) -> None: ...  # type: ignore[name-defined] # noqa: F821


def a_hidden_message(message: lanes.Message, unknown: Unknown = None) -> None: ...  # type: ignore[name-defined] # noqa: F821


def unnamed_list(messages: list[Message], unknown: Unknown = None) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize("handler", [a_list, a_sequence, acknowledge_all, unnamed_list, functools.partial(a_list)])
def test_a_handler_of_lists_needs_batch(handler: Any) -> None:
    said = refusal(handler)
    assert " takes a list of messages (" in said
    assert said.endswith("but without batch= each call has one message: set Settings(batch=…), or take one Message")
    consumer(handler, batch=10)


@pytest.mark.parametrize("handler", [acknowledge, Charges().method, CallableOfOne(), a_hidden_message])
def test_a_handler_of_one_message_contradicts_batch(handler: Any) -> None:
    said = refusal(handler, batch=10)
    assert "takes one message (message: Message), but batch= passes lists of messages" in said
    assert said.endswith("take list[Message], or leave batch out")
    consumer(handler)


def wrapped(handler: Callable[[Message], object]) -> Callable[[list[Message]], object]:
    """Each message of a batch."""

    @functools.wraps(handler)
    def message(message: list[Message]) -> None: ...

    return message


def injected(handler: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(handler)
    async def inner(*args: object) -> None: ...

    return inner


def test_usual_handlers_are_accepted() -> None:
    def unknown(message, database=None, *more, **options): ...  # type: ignore[no-untyped-def]

    def either(message: Message | list[Message]) -> None: ...

    one: list[Any] = [unknown, either, print, [].append, injected(two)]
    for handler in (*one, functools.partial(two, database="d")):
        consumer(handler)
    for handler in (*one, wrapped(Charges().method), a_hidden_list):
        consumer(handler, batch=10)


# --- decode


@pytest.mark.parametrize("decode", [nothing, two, generator, acknowledge, 5])
def test_a_decoder_that_cannot_work_is_refused(decode: Any) -> None:
    assert refusal(acknowledge, decode=decode).startswith("decode")


def test_a_class_may_decode() -> None:
    class Order:
        def __init__(self, message: Message) -> None: ...

    consumer(acknowledge, decode=Order)


class Order:
    """A model, as pydantic makes it."""


class HasValue(Protocol):
    value: bytes


class TypedMessage(Message):
    """A message with type hints of its own."""


def of_bytes(message: bytes) -> None: ...


def of_a_dict(order: dict[str, Any]) -> None: ...


async def of_a_model(order: Order) -> None: ...


def test_the_message_of_a_client_is_named_with_its_module() -> None:
    async def of_a_client(message: confluent_kafka.Message) -> None: ...

    said = refusal(of_a_client)
    assert (
        "takes message: confluent_kafka.cimpl.Message, but each call has a Message of lanes: annotate the parameter"
        in said
    )


@pytest.mark.parametrize(
    ("handler", "takes"),
    [
        (of_bytes, "of_bytes takes message: bytes"),
        (of_a_dict, "of_a_dict takes order: dict[str, Any]"),
        (of_a_model, "of_a_model takes order: Order"),
    ],
)
def test_an_annotation_that_excludes_a_message_is_refused(handler: Any, takes: str) -> None:
    assert refusal(handler) == (
        f"handler={takes}, but each call has a Message: annotate the parameter as lanes.Message, and read "
        "message.value, or message.data with decode=…"
    )


def test_an_annotation_that_a_message_may_satisfy_is_accepted() -> None:
    def of_anything(message: Any) -> None: ...

    def of_an_object(message: object) -> None: ...

    def of_a_protocol(message: HasValue) -> None: ...

    def of_a_subclass(message: TypedMessage) -> None: ...

    def of_either(message: Message | bytes) -> None: ...

    def of_an_optional(message: Optional[Message]) -> None: ...  # noqa: UP045

    def annotated(message: Annotated[Message, "an order"]) -> None: ...

    def without(message) -> None: ...  # type: ignore[no-untyped-def]

    @functools.wraps(of_bytes)
    def wrapper(message: Message) -> None:
        of_bytes(message.value)

    for handler in (
        of_anything,
        of_an_object,
        of_a_protocol,
        of_a_subclass,
        of_either,
        of_an_optional,
        annotated,
        without,
        wrapper,
    ):
        consumer(handler)


@pytest.mark.parametrize(
    ("decode", "call"),
    [
        (json.loads, "loads(message.value)"),
        (pickle.loads, "loads(message.value)"),
        (bytes.decode, "bytes.decode(message.value)"),
        (str, "str(message.value)"),
        (PydanticOrder.model_validate_json, "PydanticOrder.model_validate_json(message.value)"),
        (TypeAdapter(int).validate_json, "TypeAdapter.validate_json(message.value)"),
    ],
    ids=["json", "pickle", "bytes", "str", "model", "adapter"],
)
def test_a_known_function_of_bytes_is_refused_as_a_decoder(decode: Any, call: str) -> None:
    said = refusal(acknowledge, decode=decode)
    assert said.endswith(f"takes a value, but decode gets the Message: write decode=lambda message: {call}")


async def parsed(message: Message) -> object: ...


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 1])
async def test_a_decoder_that_returns_an_awaitable_stops_the_consumer(batch: int | None) -> None:
    broker = published("a")
    seen: list[object] = []

    async def handle(message: Any) -> None:
        seen.append(message)

    consumer = Consumer(
        MemorySource(broker), handle, decode=lambda message: parsed(message), settings=Settings(batch=batch)
    )
    with pytest.raises(ConfigError) as refused:
        await consumer.run()
    assert re.sub("=[^ ]*<locals>.", "=", str(refused.value)) == (
        "decode=<lambda> returned an awaitable (coroutine) at memory/0 position 0: decode with a plain function, or "
        "await in the handler"
    )
    assert (seen, broker.acked()) == ([], [])


@pytest.mark.anyio
async def test_a_lambda_that_decodes_the_message_itself_is_named_as_such() -> None:
    broker = published("a")
    dead = MemoryDeadLetters(broker)
    source = MemorySource(broker)
    source.finish()
    await run(source, acknowledge, decode=lambda message: json.loads(untyped(message)), dead_letters=dead)
    (letter,) = broker.dead_letters
    assert letter.error_text.endswith(
        "decode gets the Message; pass message.value on in the lambda, in place of the message)"
    )


def test_a_decoder_of_ones_own_with_a_known_name_is_accepted() -> None:
    def loads(message: Message) -> object:
        return json.loads(message.value)

    consumer(acknowledge, decode=loads)
    consumer(acknowledge, decode=lambda message: json.loads(message.value))
