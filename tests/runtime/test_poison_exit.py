"""The poison policy ``exit``: every finished message is settled, and the error names the failed one."""

from __future__ import annotations

import json
from typing import Any, cast

import anyio
import pytest
from pydantic import BaseModel

from lanes import Consumer, HandlerHalted, LanesError, Message, Retry, Settings, Term
from memsource import MemoryDeadLetters
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import (
    Gated,
    acknowledge,
    acknowledge_all,
    break_positions,
    consumer_of,
    published,
    settled,
    started,
    turns,
    until,
)


class Refused(Exception):
    """The exception of the handler."""


@pytest.mark.anyio
async def test_the_error_names_the_message_and_its_cause() -> None:
    broker = MemoryBroker(name="orders")
    broker.publish(key="a")

    async def handler(message: Message) -> None:
        raise Refused("no stock")

    with pytest.raises(HandlerHalted) as caught:
        await consumer_of(MemorySource(broker, name="shop"), handler, attempts=2).run()
    assert isinstance(caught.value.__cause__, Refused)
    text = str(caught.value)
    for part in ("shop", "2 time(s)", "orders/0", "position 0", "Refused", "no stock", "dead_letters"):
        assert part in text


@pytest.mark.anyio
async def test_a_halt_settles_running_messages_and_starts_none() -> None:
    broker = published("poison", "a", "b", "poison", "a", "b")
    source = MemorySource(broker)
    gated = Gated()

    async def handler(message: Message) -> None:
        await gated(message)
        if message.key == b"poison":
            raise Refused

    async with started(consumer_of(source, handler, concurrency=3)) as run:
        await until(lambda: gated.running == 3)
        gated.let(0)
        await until(lambda: 0 in gated.ended)
        await turns()
        assert sorted(gated.started) == [0, 1, 2]
        gated.let(1, 2)
        assert isinstance(await run.end(), HandlerHalted)
    assert sorted(gated.started) == [0, 1, 2]
    assert sorted(settled(source)) == broker.acked() == [1, 2]
    assert broker.unacked() == [0, 3, 4, 5]
    names = [call.name for call in source.calls]
    assert names.index("release") > max(i for i, name in enumerate(names) if name == "settle")
    assert names[-1] == "aclose"


@pytest.mark.anyio
async def test_no_handler_starts_after_a_halting_failure() -> None:
    broker = published("poison", "a", "b")
    handled: list[int] = []

    async def handler(message: Message) -> None:
        # Without a suspension: the worker asks for the next message before any other task has its turn.
        handled.append(message.position)
        if message.key == b"poison":
            raise Refused

    with pytest.raises(HandlerHalted):
        await consumer_of(MemorySource(broker), handler, concurrency=1).run()
    assert handled == [0]
    assert broker.unacked() == [0, 1, 2]


@pytest.mark.anyio
async def test_the_next_start_redelivers_the_failed_message() -> None:
    broker = published("a", "a", "b")

    async def halting(message: Message) -> None:
        if message.key == b"a":
            raise Term("never")

    with pytest.raises(HandlerHalted):
        await consumer_of(MemorySource(broker), halting).run()
    handled: list[int] = []

    async def mended(message: Message) -> None:
        handled.append(message.position)

    source = MemorySource(broker)
    source.finish()
    await consumer_of(source, mended).run()
    assert [position for position in handled if position != 2] == [0, 1]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_the_first_of_two_failures_is_reported() -> None:
    broker = published("a", "b")
    both = anyio.Event()
    waiting = 0

    async def handler(message: Message) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        if message.key == b"b":
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
        raise Refused(message.value.decode())

    with pytest.raises(LanesError) as caught:
        await consumer_of(MemorySource(broker), handler).run()
    assert str(caught.value.__cause__) == "0"
    assert broker.unacked() == [0, 1]


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 2])
async def test_an_unreadable_message_is_not_the_fault_of_the_handler(batch: int | None) -> None:
    def decode(message: Message) -> object:
        raise ValueError("no JSON at\nline 1")

    with pytest.raises(HandlerHalted) as caught:
        await Consumer(
            MemorySource(published("a")),
            acknowledge if batch is None else acknowledge_all,
            decode=decode,
            settings=Settings(batch=batch),
        ).run()
    assert str(caught.value) == (
        "memory: decode failed with ValueError: correct decode=…, or the producer of such messages (ValueError: no "
        'JSON at\\nline 1). The handler was not called at memory/0 position 0. The poison policy is "exit", so '
        "everything else was drained and the next start delivers this message again. To go on without unreadable "
        'messages, pass dead_letters=… and leave out poison="exit"'
    )
    assert caught.value.place == "memory/0 position 0"


@pytest.mark.anyio
async def test_a_decoder_of_values_gets_a_remedy() -> None:
    def reads_json(value: Any) -> object:
        return json.loads(value)

    remedy = r"write decode=lambda message: \S*reads_json\(message\.value\) \(TypeError: the "
    with pytest.raises(HandlerHalted, match=remedy):
        await Consumer(MemorySource(published("a")), acknowledge, decode=reads_json).run()


@pytest.mark.anyio
async def test_a_decoder_of_values_from_a_pydantic_model_gets_a_remedy() -> None:
    class Order(BaseModel):
        amount: int

        @classmethod
        def of(cls, value: Any) -> object:
            return cls.model_validate_json(value)

    remedy = r"decode gets the Message; write decode=lambda message: \S*Order\.of\(message\.value\)"
    with pytest.raises(HandlerHalted, match=f"decode failed with ValidationError: {remedy}"):
        await Consumer(MemorySource(published("a")), acknowledge, decode=Order.of).run()


@pytest.mark.anyio
async def test_an_exception_without_a_text_leaves_no_colon() -> None:
    async def handler(message: Message) -> None:
        raise TimeoutError

    with pytest.raises(HandlerHalted, match=r"at memory/0 position 0 with TimeoutError\. The poison policy"):
        await consumer_of(MemorySource(published("a")), handler, attempts=1).run()


@pytest.mark.anyio
async def test_unreadable_messages_of_one_cause_have_one_reason() -> None:
    def decode(message: Message) -> object:
        return json.loads(message.value)

    broker = MemoryBroker()
    for customer in ("ann", "bob"):
        broker.publish("{", key=customer)
    source = MemorySource(broker)
    source.finish()
    await Consumer(source, acknowledge, decode=decode, dead_letters=MemoryDeadLetters(broker)).run()
    (reason,) = {dead_letter.error_text for dead_letter in broker.dead_letters}
    assert reason == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) (decode failed "
        "with JSONDecodeError: correct decode=…, or the producer of such messages)"
    )


@pytest.mark.anyio
async def test_a_failed_key_function_is_not_the_fault_of_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource(published("a"))
    break_positions(source, {0}, monkeypatch)
    with pytest.raises(HandlerHalted) as caught:
        await Consumer(source, acknowledge).run()
    assert "the handler failed" not in str(caught.value) and "Fix the handler" not in str(caught.value)
    assert "The handler was not called at memory/0 position 0" in str(caught.value)


async def reads_data(message: Message) -> None:
    assert message.data


def loops_over_a_message(message: Any) -> None:
    list(message)


async def indexes_a_message(message: Any) -> None:
    message["key"]


async def acknowledges(message: Any) -> None:
    await message.ack()


def calls_the_value(message: Any) -> None:
    message.value().decode()


async def calls_the_headers(message: Any) -> None:
    dict(message.headers())


async def calls_a_missing_key(message: Any) -> None:
    message.key().decode()


async def calls_the_partition(message: Any) -> None:
    message.partition()


async def asks_for_an_error(message: Any) -> None:
    assert message.error() is None


async def indexes_the_value(message: Any) -> None:
    message.value["item"]


async def gets_from_the_value(message: Any) -> None:
    message.value.get("item")


async def calls_a_list_of_its_own(message: Any) -> None:
    cast(Any, [message])()


async def indexes_bytes_of_its_own(message: Any) -> None:
    cast(Any, b"cached")["item"]


async def reads_json(message: Any) -> None:
    message.json()


async def reads_the_topic(message: Any) -> None:
    assert message.topic


async def indexes_the_headers(message: Any) -> None:
    message.headers["tenant"]


async def gets_a_header(message: Any) -> None:
    message.headers.get("tenant")


async def reads_a_key_of_a_list(batch: Any) -> None:
    batch.key.decode()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("handler", "batch", "said"),
    [
        (reads_data, None, "no attribute 'data': pass decode=… to the consumer, or read message.value"),
        (
            loops_over_a_message,
            None,
            "is not iterable: the handler gets one Message, with attributes such as",
        ),
        (indexes_a_message, None, "is not subscriptable: the handler gets one Message, with attributes such as"),
        (acknowledges, None, "no attribute 'ack': leave the call out, because lanes acknowledges the message"),
        (calls_the_value, None, "not callable: message.value and message.key are attributes; read them without ()"),
        (
            calls_the_headers,
            None,
            "not callable: message.headers is an attribute, a list of pairs of name and bytes; read it without ()",
        ),
        (calls_a_missing_key, None, "'NoneType' object is not callable: message.key is an attribute; read it without"),
        (calls_the_partition, None, "not callable: read message.partition.id, with the attributes source and number"),
        (asks_for_an_error, None, "no attribute 'error': leave the call out, because the handler gets only messages"),
        (
            indexes_the_value,
            None,
            "not str: message.value is bytes; pass decode=lambda message: json.loads(message.value) to the consumer",
        ),
        (gets_from_the_value, None, "no attribute 'get': message.value is bytes; pass decode=lambda message: json."),
        (
            reads_json,
            None,
            "no attribute 'json': pass decode=lambda message: json.loads(message.value) to the consumer",
        ),
        (reads_the_topic, None, "no attribute 'topic': read message.subject"),
        (
            indexes_the_headers,
            None,
            "not str: message.headers is a list of pairs of name and bytes; read dict(message.headers)",
        ),
        (gets_a_header, None, "no attribute 'get': message.headers is a list of pairs of name and bytes; read dict("),
        (reads_a_key_of_a_list, 5, "no attribute 'key': with Settings(batch=…) the handler gets a list of messages;"),
    ],
)
async def test_a_handler_that_uses_its_argument_wrongly_gets_a_remedy(
    handler: Any, batch: int | None, said: str
) -> None:
    settings = Settings(batch=batch, retry=Retry(attempts=2, backoff=0))
    key = None if handler is calls_a_missing_key else "a"
    with pytest.raises(HandlerHalted) as caught:
        await Consumer(MemorySource(published(key)), handler, settings=settings).run()
    assert str(caught.value).count(said) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("handler", [calls_a_list_of_its_own, indexes_bytes_of_its_own])
async def test_an_error_about_an_object_of_the_handler_gets_no_remedy(handler: Any) -> None:
    with pytest.raises(HandlerHalted) as caught:
        await Consumer(MemorySource(published("a")), handler).run()
    assert "message." not in str(caught.value)
    assert "message." not in str(caught.value.__cause__)
