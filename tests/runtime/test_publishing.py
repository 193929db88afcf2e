"""Outputs of a handler leave after the handler has succeeded, and the message is settled after their confirmation."""

from __future__ import annotations

import logging
import threading
from typing import Any

import anyio
import pytest

from lanes import ConfigError, Consumer, LanesError, Message, Settings, SourceError, Term
from lanes.core.types import PartitionId
from lanes.outputs.publisher import Output, Report
from memsource.memory.broker import MemoryBroker
from memsource.memory.publisher import MemoryPublisher
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import consumer_of, published, started, turns, until
from tests.fakes.telemetry import TRACE, TRACEPARENT, Sdk


def told(publisher: MemoryPublisher, target: str = "out") -> list[bytes]:
    return [output.value or b"" for output in publisher.published(target)]


async def copy(message: Message) -> None:
    await message.publish("out", message.value, key=message.key)


def copy_soon(message: Message) -> None:
    message.publish_soon("out", message.value, key=message.key)


def copy_batch(batch: list[Message]) -> None:
    for message in batch:
        copy_soon(message)


async def copy_batch_on_the_loop(batch: list[Message]) -> None:
    copy_batch(batch)


HANDLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "async": (copy, {}),
    "threads": (copy_soon, {}),
    "inline": (copy_soon, {"sync_handlers": "inline"}),
    "batch": (copy_batch_on_the_loop, {"batch": 3}),
    "batch in threads": (copy_batch, {"batch": 3}),
}


async def run_all(broker: MemoryBroker, handler: Any, publisher: MemoryPublisher | None = None, **options: Any) -> None:
    source = MemorySource(broker)
    source.finish()
    with anyio.fail_after(20):
        await consumer_of(source, handler, publisher=publisher, **options).run()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", HANDLERS)
async def test_each_kind_of_handler_publishes_in_the_order_of_its_key(kind: str) -> None:
    handler, settings = HANDLERS[kind]
    broker, publisher = published("a", "b", "a", "a", "b", "c", "a"), MemoryPublisher()
    await run_all(broker, handler, publisher, **settings)
    assert sorted(told(publisher)) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    of_key = {key: [o.value for o in publisher.outputs if o.key == key] for key in (b"a", b"b", b"c")}
    assert of_key == {b"a": [b"0", b"2", b"3", b"6"], b"b": [b"1", b"4"], b"c": [b"5"]}
    assert broker.unfinished == 0


@pytest.mark.anyio
@pytest.mark.parametrize("kind", HANDLERS)
async def test_a_message_is_settled_only_after_its_outputs_are_confirmed(kind: str) -> None:
    handler, settings = HANDLERS[kind]
    broker, publisher = published("a", "a", "b"), MemoryPublisher()
    publisher.block("publish")
    async with started(consumer_of(MemorySource(broker), handler, publisher=publisher, **settings)) as run:
        await until(lambda: len(publisher.called("publish")) > 0)
        await turns()
        assert (broker.acked(), publisher.outputs) == ([], [])
        # The handlers have ended, and their slots are free.
        assert run.consumer.status().running == 0
        publisher.unblock("publish")
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert sorted(told(publisher)) == [b"0", b"1", b"2"]


@pytest.mark.anyio
async def test_the_lane_waits_for_the_confirmation_and_the_slot_does_not() -> None:
    broker, publisher = published("a", "a", "b", "c"), MemoryPublisher()
    publisher.block("publish")
    begun: list[int] = []

    async def handler(message: Message) -> None:
        begun.append(message.position)
        await copy(message)

    consumer = consumer_of(MemorySource(broker), handler, publisher=publisher, concurrency=1)
    async with started(consumer) as run:
        await until(lambda: len(begun) == 3)
        await turns()
        assert begun == [0, 2, 3]  # one slot, and the second message of "a" waits
        publisher.unblock("publish")
        await until(lambda: broker.unfinished == 0)
        assert begun == [0, 2, 3, 1]
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["async", "threads", "batch", "batch in threads"])
async def test_a_failed_attempt_publishes_nothing(kind: str) -> None:
    settings = HANDLERS[kind][1]
    broker, publisher = published("a", "a"), MemoryPublisher()
    failed = {b"0", b"1"}

    def fail_once(message: Message) -> None:
        message.publish_soon("out", b"of attempt %d of %s" % (message.attempt, message.value))
        if message.value in failed:
            failed.discard(message.value)
            raise ValueError("not yet")

    async def one(message: Message) -> None:
        fail_once(message)

    def each(batch: list[Message]) -> list[BaseException | None]:
        results: list[BaseException | None] = []
        for message in batch:
            try:
                fail_once(message)
                results.append(None)
            except ValueError as error:
                results.append(error)
        return results

    async def each_on_the_loop(batch: list[Message]) -> list[BaseException | None]:
        return each(batch)

    failing = {"async": one, "threads": fail_once, "batch": each_on_the_loop, "batch in threads": each}[kind]
    await run_all(broker, failing, publisher, attempts=2, **settings)
    assert len(told(publisher)) == 2
    assert not any(value.startswith(b"of attempt 1 of 0") for value in told(publisher))
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_cancelled_handler_publishes_nothing() -> None:
    broker, publisher = published("a"), MemoryPublisher()

    async def handler(message: Message) -> None:
        await copy(message)
        if message.attempt == 1:
            await anyio.sleep_forever()

    await run_all(broker, handler, publisher, timeout=0.05, attempts=2)
    assert [output.attempt for output in publisher.outputs] == [2]


@pytest.mark.anyio
async def test_a_failed_send_is_repeated_without_calling_the_handler() -> None:
    broker, publisher = published("a", "a", "b"), MemoryPublisher()
    publisher.fail("publish", OSError("not now"), times=4)
    publisher.fail("publish", SourceError("not now", retryable=True), times=4)
    handled: list[int] = []

    async def handler(message: Message) -> None:
        handled.append(message.position)
        await copy(message)

    await run_all(broker, handler, publisher, attempts=2)
    assert sorted(handled) == [0, 1, 2]
    assert [o.value for o in publisher.outputs if o.key == b"a"] == [b"0", b"1"]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_repeated_send_has_the_unconfirmed_outputs_only_and_keeps_their_order() -> None:
    broker, publisher = published("a"), MemoryPublisher()

    async def handler(message: Message) -> None:
        for number in range(3):
            await message.publish("out", b"%d" % number, key="a")
        await message.publish("other", b"3")

    publisher.refused["out"] = SourceError("not now", retryable=True)
    async with started(consumer_of(MemorySource(broker), handler, publisher=publisher, backoff=0.01)) as run:
        await until(lambda: len(publisher.called("publish")) > 2)
        assert (told(publisher), told(publisher, "other")) == ([], [b"3"])
        del publisher.refused["out"]
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert (told(publisher), told(publisher, "other")) == ([b"0", b"1", b"2"], [b"3"])
    assert [output.number for output in publisher.published("out")] == [1, 2, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("error", [SourceError("no such topic"), ConfigError("no such topic")])
async def test_a_permanent_failure_follows_the_poison_policy(error: Exception) -> None:
    broker, publisher = published("a", "a", "b"), MemoryPublisher()
    publisher.refused["nowhere"] = error
    handled: list[int] = []

    async def handler(message: Message) -> None:
        handled.append(message.position)
        await message.publish("nowhere" if message.position == 0 else "out", message.value)

    await run_all(broker, handler, publisher, attempts=5, dead_letters=MemoryDeadLetters(broker))
    assert sorted(handled) == [0, 1, 2]
    assert [letter.position for letter in broker.dead_letters] == [0]
    assert broker.dead_letters[0].error_text == "no such topic"
    assert sorted(told(publisher)) == [b"1", b"2"]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_permanent_failure_of_a_batch_returns_the_later_messages_of_its_lane() -> None:
    broker, publisher = published("a", "a", "a"), MemoryPublisher()
    publisher.refused["nowhere"] = SourceError("no such topic")

    async def handler(batch: list[Message]) -> None:
        for message in batch:
            await message.publish("nowhere" if message.position == 0 else "out", message.value)

    await run_all(broker, handler, publisher, batch=3, dead_letters=MemoryDeadLetters(broker))
    assert [letter.position for letter in broker.dead_letters] == [0]
    assert told(publisher) == [b"1", b"2"]


@pytest.mark.anyio
async def test_a_blocked_lane_publishes_again_after_unblock() -> None:
    broker, publisher = published("a", "a"), MemoryPublisher()
    publisher.refused["out"] = SourceError("no such topic")
    consumer = consumer_of(MemorySource(broker), copy, publisher=publisher, poison="block", attempts=5)
    async with started(consumer) as run:
        await until(lambda: consumer.status().blocked == 1)
        del publisher.refused["out"]
        assert consumer.unblock("a") == 1
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert told(publisher) == [b"0", b"1"]


@pytest.mark.anyio
async def test_a_drain_waits_for_the_confirmation() -> None:
    broker, publisher = published("a"), MemoryPublisher()
    publisher.block("publish")
    consumer = consumer_of(MemorySource(broker), copy, publisher=publisher)
    async with started(consumer) as run:
        await until(lambda: len(publisher.called("publish")) == 1)
        consumer.stop()
        await turns()
        assert not run.ended.is_set()
        publisher.unblock("publish")
        assert await run.end() is None
    assert (told(publisher), broker.acked()) == ([b"0"], [0])


@pytest.mark.anyio
async def test_a_drain_repeats_a_failed_send() -> None:
    broker, publisher = published("a"), MemoryPublisher()
    publisher.fail("publish", OSError("not now"), times=3)
    publisher.block("publish")
    consumer = consumer_of(MemorySource(broker), copy, publisher=publisher, backoff=0.01)
    async with started(consumer) as run:
        await until(lambda: len(publisher.called("publish")) == 1)
        consumer.stop()
        publisher.unblock("publish")
        assert await run.end() is None
    assert (told(publisher), broker.acked()) == ([b"0"], [0])


@pytest.mark.anyio
async def test_a_drain_does_not_report_a_message_whose_outputs_it_sends_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes")
    broker, publisher = published("a"), MemoryPublisher()
    publisher.refused["out"] = OSError("not now")
    consumer = consumer_of(MemorySource(broker), copy, publisher=publisher, backoff=0.01)
    async with started(consumer) as run:
        await until(lambda: consumer.status().publish_held == 1)
        consumer.stop()
        await turns()
        del publisher.refused["out"]
        assert await run.end() is None
    assert (told(publisher), broker.acked()) == ([b"0"], [0])
    assert "its next owner runs" not in caplog.text


@pytest.mark.anyio
async def test_a_drain_gives_up_outputs_at_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    broker, publisher = published("a", "b"), MemoryPublisher()
    publisher.block("publish")
    consumer = consumer_of(MemorySource(broker), copy, publisher=publisher, drain_timeout=0.05, grace=0.0)
    async with started(consumer) as run:
        await until(lambda: len(publisher.called("publish")) >= 1)
        assert await run.stop() is None
    assert (publisher.outputs, broker.acked(), broker.unacked()) == ([], [], [0, 1])
    assert "the outputs of 2 message(s) of memory/0 were not confirmed before its hand-over" in caplog.text


@pytest.mark.anyio
async def test_a_lost_partition_sends_nothing_more() -> None:
    broker, publisher = published("a"), MemoryPublisher()
    publisher.fail("publish", OSError("not now"), times=1)
    source = MemorySource(broker)
    consumer = consumer_of(source, copy, publisher=publisher, backoff=0.1)
    async with started(consumer) as run:
        await until(lambda: len(publisher.called("publish")) == 1)
        source.lose(0)
        await until(lambda: not consumer.active)
        await anyio.sleep(0.3)
        assert len(publisher.called("publish")) == 1
        assert consumer.status().in_flight == 0
        assert await run.stop() is None
    assert publisher.outputs == []


@pytest.mark.anyio
@pytest.mark.parametrize("kind", HANDLERS)
async def test_publishing_without_a_publisher_stops_the_consumer_with_a_remedy(kind: str) -> None:
    handler, settings = HANDLERS[kind]
    with pytest.raises(
        ConfigError, match=r"publish at memory/0 position 0: the consumer has no publisher; pass publisher="
    ):
        await run_all(published("a"), handler, **settings)


@pytest.mark.anyio
async def test_an_output_is_refused_after_the_end_of_its_handler() -> None:
    kept: list[Message] = []

    async def keep(message: Message) -> None:
        kept.append(message)

    publisher = MemoryPublisher()
    await run_all(published("a"), keep, publisher)
    with pytest.raises(LanesError, match="the handler of this message does not run"):
        kept[0].publish_soon("out", b"late")
    assert publisher.outputs == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("count", "size", "limits", "said"),
    [
        (4, 1, {"max_outputs": 3}, "has published max_outputs=3 outputs already"),
        (2, 60, {"max_output_bytes": 100}, "would have 120 bytes, above max_output_bytes=100"),
    ],
)
async def test_too_many_outputs_fail_the_message_for_good(
    count: int, size: int, limits: dict[str, int], said: str
) -> None:
    broker, publisher = published("a", "b"), MemoryPublisher()

    async def handler(message: Message) -> None:
        for _ in range(count if message.key == b"a" else 1):
            await message.publish("out", bytes(size))

    await run_all(broker, handler, publisher, attempts=3, dead_letters=MemoryDeadLetters(broker), **limits)
    [letter] = broker.dead_letters
    assert said in letter.error_text
    assert (letter.position, letter.attempts, len(publisher.outputs)) == (0, 1, 1)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", b""), "target is empty"),
        ((7, b""), "target is"),
        (("out", "text"), "value is"),
        (("out", b"", {"name": 3}), "the value of header 'name' is an int; pass bytes or a str"),
        (("out", b"", ["name"]), "headers has"),
    ],
)
async def test_an_output_of_a_wrong_type_fails_the_attempt(arguments: tuple[Any, ...], said: str) -> None:
    broker = published("a")

    async def handler(message: Message) -> None:
        target, value, *headers = arguments
        message.publish_soon(target, value, headers=headers[0] if headers else ())

    await run_all(broker, handler, MemoryPublisher(), dead_letters=MemoryDeadLetters(broker))
    assert broker.dead_letters[0].error_type == "TypeError"
    assert said in broker.dead_letters[0].error_text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("target", "header", "said"),
    [
        ("out\udc80", "name", "target has a control character or half a character"),
        ("out\n", "name", "target has a control character or half a character"),
        ("out", "name\udc80", "a header's name is empty, or has a control character or half a character"),
        ("out", "na\0me", "a header's name is empty, or has a control character or half a character"),
        ("out", "", "a header's name is empty, or has a control character or half a character"),
    ],
)
async def test_a_name_that_no_broker_can_store_fails_the_attempt(target: str, header: str, said: str) -> None:
    broker, publisher = published("a"), MemoryPublisher()

    async def handler(message: Message) -> None:
        await message.publish(target, b"", headers={header: b""})

    await run_all(broker, handler, publisher, dead_letters=MemoryDeadLetters(broker))
    assert broker.dead_letters[0].error_type == "ValueError"
    assert said in broker.dead_letters[0].error_text
    assert publisher.outputs == []


@pytest.mark.anyio
async def test_an_output_has_its_origin_and_its_content() -> None:
    broker, publisher = published("a", "b"), MemoryPublisher()

    async def handler(message: Message) -> None:
        if message.key == b"b":
            message.publish("one", None)
            await message.publish("two", b"v", key=3, headers={"name": "text", "other": b"\xff"})

    await run_all(broker, handler, publisher)
    first, second = publisher.outputs
    assert (first.target, first.value, first.key, first.headers, first.number) == ("one", None, None, (), 1)
    assert (second.target, second.value, second.key) == ("two", b"v", (3).to_bytes(16, "little"))
    assert (second.headers, second.number) == ((("name", b"text"), ("other", b"\xff")), 2)
    origin = (second.source.source, second.source.number, second.position, second.attempt, second.message_key)
    assert origin == ("memory", 0, 1, 1, b"b")
    assert second.size == 16 + 1 + 8 + 6


@pytest.mark.anyio
async def test_the_outputs_in_memory_stop_new_handlers_at_the_bound() -> None:
    broker, publisher = published(*map(str, range(20))), MemoryPublisher()
    publisher.block("publish")
    begun: list[int] = []

    async def handler(message: Message) -> None:
        begun.append(message.position)
        await message.publish("out", bytes(1000))

    consumer = consumer_of(MemorySource(broker), handler, publisher=publisher, concurrency=2, max_in_flight_bytes=7500)
    async with started(consumer) as run:
        await until(lambda: len(begun) == 5)  # an output of 1,000 bytes counts as 1,500
        await turns()
        assert len(begun) <= 6
        publisher.unblock("publish")
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert len(publisher.outputs) == 20


@pytest.mark.anyio
async def test_outputs_without_bytes_stop_new_handlers_too() -> None:
    broker, publisher = published(*map(str, range(20))), MemoryPublisher()
    publisher.block("publish")
    begun: list[int] = []

    async def handler(message: Message) -> None:
        begun.append(message.position)
        for _ in range(4):
            await message.publish("out", b"")

    consumer = consumer_of(MemorySource(broker), handler, publisher=publisher, concurrency=2, max_in_flight_bytes=9000)
    async with started(consumer) as run:
        await until(lambda: len(begun) == 5)  # each message counts as 4 × 500 bytes
        await turns()
        assert len(begun) <= 6
        publisher.unblock("publish")
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert len(publisher.outputs) == 80


@pytest.mark.anyio
async def test_the_status_and_the_metrics_count_outputs(sdk: Sdk) -> None:
    broker, publisher = published("a", "b", "c"), MemoryPublisher()
    publisher.refused["out"] = OSError("not now")

    async def handler(message: Message) -> None:
        await message.publish("out" if message.key == b"a" else "other", b"123")
        await message.publish("third", b"4567")

    consumer = consumer_of(MemorySource(broker), handler, publisher=publisher, backoff=0.01)
    async with started(consumer) as run:
        await until(lambda: consumer.status().publish_held == 1 and consumer.status().published == 5)
        status = consumer.status()
        assert (status.publishing, status.publishing_bytes) == (1, 3 + 4 + 2 * 500)
        del publisher.refused["out"]
        await until(lambda: broker.unfinished == 0)
        status = consumer.status()
        assert (status.publishing, status.publish_held, status.publishing_bytes, status.published) == (0, 0, 0, 6)
        assert await run.stop() is None
    assert sum(number for number, _ in sdk.numbers("lanes.outputs")) == 6
    assert sum(number for number, _ in sdk.numbers("lanes.output_failures")) >= 1


@pytest.mark.anyio
@pytest.mark.parametrize("kind", HANDLERS)
async def test_the_trace_of_the_handler_goes_on_in_its_outputs(kind: str, sdk: Sdk) -> None:
    handler, settings = HANDLERS[kind]
    publisher = MemoryPublisher()
    await run_all(published("a"), handler, publisher, **settings)
    [span], [output] = sdk.spans(), publisher.outputs
    assert span.context is not None and output.headers == ()
    trace, parent, flags = span.context.trace_id, span.context.span_id, span.context.trace_flags
    assert dict(output.trace) == {"traceparent": f"00-{trace:032x}-{parent:016x}-{flags:02x}".encode()}


@pytest.mark.anyio
async def test_a_passed_on_trace_context_is_replaced(sdk: Sdk) -> None:
    broker, publisher = MemoryBroker(), MemoryPublisher()
    broker.publish("0", key="a", headers=[("Traceparent", TRACEPARENT[1]), ("x", b"1")])

    async def handler(message: Message) -> None:
        await message.publish("out", b"", headers=message.headers)

    await run_all(broker, handler, publisher)
    [span], [output] = sdk.spans(), publisher.outputs
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE
    assert output.headers == (("x", b"1"),)
    assert dict(output.trace) == {"traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01".encode()}


@pytest.mark.anyio
async def test_without_telemetry_the_headers_pass_unchanged() -> None:
    publisher = MemoryPublisher()

    async def handler(message: Message) -> None:
        await message.publish("out", b"", headers=[TRACEPARENT])

    await run_all(published("a"), handler, publisher)
    [output] = publisher.outputs
    assert (output.headers, list(output.trace)) == ((TRACEPARENT,), [])


class Silent(MemoryPublisher):
    """A publisher that breaks its contract: it does not report its outputs."""

    async def publish(self, outputs: Any, report: Report) -> None:
        self.outputs += outputs


@pytest.mark.anyio
async def test_a_publisher_that_reports_nothing_fails_the_message() -> None:
    broker = published("a")
    await run_all(broker, copy, Silent(), dead_letters=MemoryDeadLetters(broker))
    assert "has not reported an output; please report this bug of the publisher" in broker.dead_letters[0].error_text


@pytest.mark.anyio
async def test_a_handler_may_publish_and_then_give_its_message_up() -> None:
    broker, publisher = published("a"), MemoryPublisher()

    async def handler(message: Message) -> None:
        await copy(message)
        raise Term("no")

    await run_all(broker, handler, publisher, dead_letters=MemoryDeadLetters(broker))
    assert (publisher.outputs, len(broker.dead_letters)) == ([], 1)


def test_handlers_in_processes_cannot_publish() -> None:
    settings = Settings(sync_handlers="processes", processes=1)
    with pytest.raises(ConfigError, match=r'publisher=… with sync_handlers="processes"'):
        Consumer(MemorySource(MemoryBroker()), copy_soon, publisher=MemoryPublisher(), settings=settings)


def test_a_publisher_needs_its_methods() -> None:
    with pytest.raises(ConfigError, match="publisher is"):
        consumer_of(MemorySource(MemoryBroker()), copy, publisher=object())


@pytest.mark.anyio
async def test_several_threads_of_a_handler_may_publish() -> None:
    broker, publisher = published("a"), MemoryPublisher()

    def handler(message: Message) -> None:
        threads = [threading.Thread(target=copy_soon, args=(message,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    await run_all(broker, handler, publisher)
    assert sorted(output.number for output in publisher.outputs) == list(range(1, 9))


def test_the_repr_of_an_output_shows_no_content() -> None:
    output = Output(
        target="out",
        value=b"secret",
        key=b"secret",
        headers=(),
        trace=(),
        number=1,
        source=PartitionId("S", 0),
        incarnation="",
        position=3,
        attempt=1,
        message_key=None,
    )
    assert "secret" not in repr(output)
