"""The JetStream publisher keeps the contract of publishers, on real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace

import pytest
from nats.aio.client import Client

import lanes
from lanes.errors import ConfigError, SourceError
from lanes.outputs.publisher import Output, Publisher
from lanes_jetstream import JetStreamPublisher, JetStreamSource, subject_token
from memsource.contract.publishers import (
    PublisherAbility,
    PublisherCheck,
    PublisherHarness,
    Visible,
    output_to,
    publisher_checks,
)
from tests.components import NatsServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import Stream
from tests.memsource.contract.outage import killed


class JetStreamHarness:
    """A stream for the outputs, on ``server``, which is killed in an outage."""

    wrong_target = "no subject *"

    def __init__(self, stream: Stream, can: Collection[PublisherAbility], server: NatsServer | None = None) -> None:
        self.can = can
        self._stream, self._out, self._server = stream, f"{stream.name}out", server
        self.target = f"{self._out}.x"

    @contextlib.asynccontextmanager
    async def made(self) -> AsyncIterator[None]:
        """Create the stream of the outputs, and delete it after the test."""
        jetstream = self._stream.client.jetstream()
        await jetstream.add_stream(name=self._out, subjects=[f"{self._out}.x"], duplicate_window=60)
        yield
        await jetstream.delete_stream(self._out)

    def publisher(self, name: str = "one") -> Publisher:
        return JetStreamPublisher(self._stream.url, name)

    async def visible(self) -> Sequence[Visible]:
        jetstream = self._stream.client.jetstream()
        last = (await jetstream.stream_info(self._out)).state.last_seq
        found = []
        for sequence in range(1, last + 1):
            message = await jetstream.get_msg(self._out, sequence)
            headers = {name: text.encode() for name, text in (message.headers or {}).items()}
            key = headers.pop("Lanes-Key", None)
            del headers["Nats-Msg-Id"]
            found.append(Visible(key, message.data or b"", headers))
        return found

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        return killed(self._server)


ON_THE_SHARED_SERVER: tuple[PublisherAbility, ...] = ("targets", "deduplicates")
OUTAGE: tuple[PublisherAbility, ...] = ("outage",)


@pytest.mark.anyio
@pytest.mark.parametrize("check", publisher_checks(ON_THE_SHARED_SERVER), ids=lambda check: check.__name__)
async def test_the_contract_holds_on_a_server(check: PublisherCheck, stream: Stream) -> None:
    harness = JetStreamHarness(stream, ON_THE_SHARED_SERVER)
    kept: PublisherHarness = harness
    async with harness.made():
        await check(kept)


@pytest.mark.anyio
async def test_an_outage_of_a_server_is_retryable(fresh_nats: Callable[..., NatsServer]) -> None:
    (check,) = set(publisher_checks(OUTAGE)) - set(publisher_checks(()))
    server = fresh_nats()
    client: Client = await connect(server.url)
    harness = JetStreamHarness(Stream(server.url, client, "IN"), OUTAGE, server)
    async with harness.made():
        await check(harness)
    await client.close()


@pytest.mark.anyio
@pytest.mark.parametrize("key", [b"ann", None])
async def test_a_passed_on_key_and_id_are_not_those_of_an_output(key: bytes | None, stream: Stream) -> None:
    harness = JetStreamHarness(stream, ON_THE_SHARED_SERVER)
    publisher = JetStreamPublisher(stream.client, "billing")
    await publisher.open()
    passed_on = (("Lanes-Key", b"bob"), ("lanes-key", b"eve"), ("nats-msg-id", b"1"), ("team", b"a"))

    def report(output: Output, error: Exception | None) -> None:
        assert error is None

    async with harness.made():
        await publisher.publish([replace(output_to(f"{harness._out}.x", 1), key=key, headers=passed_on)], report)
        [seen] = await harness.visible()
    assert seen.key == key
    assert sorted(seen.headers) == ["team", "traceparent"]


BAD = {
    "value": ({"value": None}, "JetStream has no messages without a value"),
    "rollup": ({"headers": (("Nats-Rollup", b"all"),)}, "the header Nats-Rollup would delete earlier outputs"),
    "repeated": ({"headers": (("a", b"1"), ("a", b"2"))}, "the header 'a' occurs twice"),
    "bytes": ({"headers": (("a", b"\xff"),)}, "the header 'a' is not UTF-8"),
    "break": ({"headers": (("a", b"1\r\nb: 2"),)}, "the header 'a' has a blank, a colon or a line break"),
    "size": ({"value": bytes(2_000_000)}, "are above the server's max_payload"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", BAD)
async def test_an_output_that_cannot_be_sent_fails_for_good(kind: str, stream: Stream) -> None:
    changes, said = BAD[kind]
    publisher = JetStreamPublisher(stream.client, "billing")
    await publisher.open()
    found: list[Exception | None] = []
    output = replace(output_to(f"{stream.name}.x", 1), **changes)  # type: ignore[arg-type]

    def report(output: Output, error: Exception | None) -> None:
        found.append(error)

    await publisher.publish([output], report)
    [error] = found
    assert isinstance(error, SourceError) and not error.retryable
    assert said in str(error)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("value", "headers", "said"),
    [
        (bytes(200), (), "message size exceeds maximum allowed"),
        (b"", (("Nats-Expected-Stream", b"another"),), "expected stream does not match"),
        (b"", (("Nats-Expected-Last-Sequence", b"7"),), "wrong last sequence"),
    ],
)
async def test_an_output_that_its_stream_refuses_fails_for_good(
    value: bytes, headers: tuple[tuple[str, bytes], ...], said: str, stream: Stream
) -> None:
    name = f"{stream.name}limited"
    await stream.client.jetstream().add_stream(name=name, subjects=[name], max_msg_size=150)
    publisher = JetStreamPublisher(stream.client, "billing")
    await publisher.open()
    found: list[Exception | None] = []
    output = replace(output_to(name, 1), value=value, headers=headers)
    await publisher.publish([output], lambda output, error: found.append(error))
    await stream.client.jetstream().delete_stream(name)
    [error] = found
    assert isinstance(error, SourceError) and not error.retryable
    assert said in str(error)


@pytest.mark.anyio
async def test_a_subject_without_a_stream_is_named_and_sent_again(stream: Stream) -> None:
    publisher = JetStreamPublisher(stream.client, "billing")
    await publisher.open()
    found: list[Exception | None] = []
    await publisher.publish([output_to("nowhere.x", 1)], lambda output, error: found.append(error))
    [error] = found
    assert isinstance(error, SourceError) and error.retryable
    assert str(error).startswith("no stream captures the subject 'nowhere.x' of an output")


@pytest.mark.anyio
async def test_a_consumer_publishes_each_message_in_the_order_of_its_key(stream: Stream) -> None:
    harness = JetStreamHarness(stream, ())
    async with harness.made():
        await stream.publish(100, keys=5)
        seen: list[tuple[bytes | None, int]] = []
        source = JetStreamSource(stream.url, stream=stream.name, durable="copy", key=subject_token(1))

        async def handler(message: lanes.Message) -> None:
            await message.publish(harness.target, b"%d" % message.position, key=message.key)
            seen.append((message.key, message.position))
            if len(seen) == 100:
                consumer.stop()

        consumer = lanes.Consumer(source, handler, publisher=JetStreamPublisher(stream.url, "copy"))
        await consumer.run()
        visible = [(one.key, int(one.value or b"")) for one in await harness.visible()]
    assert sorted(visible) == sorted(seen)
    for key in {key for key, _ in visible}:
        positions = [position for other, position in visible if other == key]
        assert positions == sorted(positions)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_publisher_needs_the_name_of_its_service(name: object) -> None:
    with pytest.raises(ConfigError, match="JetStreamPublisher: name is"):
        JetStreamPublisher("nats://localhost:4222", name)  # type: ignore[arg-type]


async def reports_of(publisher: Publisher, outputs: Sequence[Output]) -> dict[int, Exception | None]:
    """Publish outputs in one call, and return their errors by position."""
    found: dict[int, Exception | None] = {}

    def report(output: Output, error: Exception | None) -> None:
        assert output.position not in found
        found[output.position] = error

    await publisher.publish(outputs, report)
    return found


@pytest.mark.anyio
async def test_many_outputs_are_published_without_a_task_for_each(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.confirmations._MOST", 50, raising=False)
    harness = JetStreamHarness(stream, ON_THE_SHARED_SERVER)
    publisher = harness.publisher()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(asyncio.all_tasks()))
            await asyncio.sleep(0)

    async with harness.made():
        await publisher.open()
        watching = asyncio.create_task(watch())
        before = len(asyncio.all_tasks())
        found = await asyncio.gather(
            *(
                reports_of(publisher, [output_to(harness.target, begin + number) for number in range(100)])
                for begin in (0, 100, 200)
            )
        )
        watching.cancel()
        await publisher.aclose()
        assert found == [dict.fromkeys(range(begin, begin + 100)) for begin in (0, 100, 200)]
        assert len(await harness.visible()) == 300
    # Three tasks of the test make the calls, and the client makes some tasks of its own.
    assert most <= before + 10


@pytest.mark.anyio
async def test_outputs_without_an_answer_fail_in_time_and_make_room(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.confirmations._MOST", 3)
    monkeypatch.setattr("lanes_jetstream.wire.confirmations.API_TIMEOUT", 0.2)
    silent = f"{stream.name}silent"
    # A subscriber that does not answer.
    subscription = await stream.client.subscribe(silent)
    publisher = JetStreamPublisher(stream.client, "billing")
    await publisher.open()
    found = await reports_of(publisher, [output_to(silent, position) for position in range(5)])
    await subscription.unsubscribe()
    assert sorted(found) == [0, 1, 2, 3, 4]
    for error in found.values():
        assert isinstance(error, SourceError) and error.retryable
        assert f"{silent} did not confirm a output (TimeoutError)" in str(error)
    harness = JetStreamHarness(stream, ON_THE_SHARED_SERVER)
    monkeypatch.undo()
    async with harness.made():
        assert await reports_of(publisher, [output_to(harness.target, 7)]) == {7: None}
    await publisher.aclose()
