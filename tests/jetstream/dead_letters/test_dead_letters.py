"""Dead letters on a real stream: their headers, their order among other messages, and reading them back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote

import anyio
import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.api import StreamSource

import lanes
from lanes_jetstream import (
    JetStreamDeadLetters,
    JetStreamSource,
    read_dead_letter,
)
from tests.components import NatsServer
from tests.fakes.dead_letters import dead_letter
from tests.jetstream.cohort_workload import CohortStream
from tests.jetstream.workload import Recorder, Stream, never_called, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stored_dead_letters(client: Client, stream: Stream) -> AsyncIterator[str]:
    name = f"{stream.name}dead"
    await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"])
    yield f"{name}.x"
    await client.jetstream().delete_stream(name)


async def test_a_dead_letter_carries_origin_and_reason(
    stream: Stream, stored_dead_letters: str, client: Client
) -> None:
    origin = {
        "Color": "red",
        "Nats-Msg-Id": "mine",
        "Nats-Expected-Stream": stream.name,
        "Lanes-Error": "spoofed",
    }
    await client.jetstream().publish(f"{stream.name}.k é".replace(" ", "_"), b"payload", headers=origin)
    await stream.publish(1, seed=3)
    done = anyio.Event()

    async def handler(message: lanes.Message) -> None:
        if message.value == b"payload":
            raise lanes.Term("no such customer\r\nLanes-Epoch: 99\x00" + "x" * 2_000)
        done.set()

    consumer = lanes.Consumer(
        stream.source(),
        handler,
        dead_letters=JetStreamDeadLetters(stream.url, stored_dead_letters),
        settings=lanes.Settings(),
    )
    async with running(consumer):
        with anyio.fail_after(10):
            await done.wait()
            await stream.acknowledged()
    subscription = await client.jetstream().subscribe(stored_dead_letters)
    letter = await subscription.next_msg(5)
    await subscription.unsubscribe()
    headers = letter.headers or {}
    assert letter.data == b"payload"
    assert headers["Color"] == "red"
    assert headers["Lanes-Origin-Nats-Msg-Id"] == "mine"
    assert headers["Lanes-Origin-Nats-Expected-Stream"] == stream.name
    assert headers["Lanes-Origin-Lanes-Error"] == "spoofed"
    assert headers["Lanes-Error"] == "Term"
    text = unquote(headers["Lanes-Error-Text"])
    assert text.startswith("no such customer\r\nLanes-Epoch: 99\x00xxx")
    assert len(text) == 500
    assert headers["Lanes-Epoch"] == "1"
    assert (headers["Lanes-Source"], headers["Lanes-Partition"]) == (stream.name, "0")
    assert headers["Lanes-Position"] == "1"
    assert unquote(headers["Lanes-Key"]) == "k_é"
    assert headers["Lanes-Attempts"] == "1"
    assert len(headers["Nats-Msg-Id"]) == 32


async def test_dead_letters_are_read_back_by_an_ordinary_source(
    stream: Stream, stored_dead_letters: str, client: Client
) -> None:
    origin = {"Color": "red", "Nats-Msg-Id": "mine", "Lanes-Error": "spoofed"}
    await client.jetstream().publish(f"{stream.name}.k_é", b"payload", headers=origin)
    await stream.publish(1, seed=3)

    async def handler(message: lanes.Message) -> None:
        if message.value == b"payload":
            raise ValueError("no such customer: é %41\r\nLanes-Epoch: 99")

    retry = lanes.Retry(attempts=2, backoff=0.0)
    consumer = lanes.Consumer(
        stream.source(),
        handler,
        dead_letters=JetStreamDeadLetters(stream.url, stored_dead_letters),
        settings=lanes.Settings(retry=retry),
    )
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and bool(consumer.status().dead_lettered))
    # Any client may publish there.
    await client.jetstream().publish(stored_dead_letters, b"no letter", headers={"Lanes-Source": "S"})

    found: list[lanes.DeadLetter] = []
    refused: list[str] = []
    done = anyio.Event()

    async def read(message: lanes.Message) -> None:
        assert isinstance(message.data, lanes.DeadLetter)
        found.append(message.data)

    class Refused:
        """The target for messages that are no dead letters."""

        async def open(self) -> None:
            """Do nothing: a test has no connection."""

        async def put(self, dead_letter: lanes.DeadLetter) -> None:
            """Record the dead letter."""
            refused.append(dead_letter.error_text)
            done.set()

        async def aclose(self) -> None:
            """Do nothing: a test has no connection."""

    source = JetStreamSource(stream.url, stream=f"{stream.name}dead", durable="reader", key=None)
    async with running(lanes.Consumer(source, read, dead_letters=Refused(), decode=read_dead_letter)):
        with anyio.fail_after(10):
            await done.wait()
            await until(lambda: bool(found))
    (letter,) = found
    assert (letter.source, letter.partition, letter.position, letter.epoch) == (stream.name, 0, 1, 1)
    assert (letter.subject, letter.key, letter.value) == (f"{stream.name}.k_é", "k_é".encode(), b"payload")
    assert dict(letter.headers) == {name: value.encode() for name, value in origin.items()}
    assert (letter.attempts, letter.error_type) == (2, "ValueError")
    assert letter.error_text == "no such customer: é %41\r\nLanes-Epoch: 99"
    assert len(letter.id) == 32
    assert 0 <= time.time() - letter.time < 60
    (said,) = refused
    assert said.startswith(f"no dead letter: {stream.name}dead/0 position 2 has no header Nats-Msg-Id; read only")


async def test_a_dead_letter_written_twice_is_stored_once(
    stream: Stream, stored_dead_letters: str, client: Client
) -> None:
    target = JetStreamDeadLetters(client, stored_dead_letters)
    await target.open()
    letter = lanes.DeadLetter(
        id="0" * 32,
        source="S",
        partition=0,
        position=1,
        subject="s.1",
        key=None,
        value=b"v",
        headers=(),
        attempts=1,
        error_type="E",
        error_text="",
        epoch=1,
        time=0.0,
    )
    await target.put(letter)
    await target.put(letter)
    assert (await client.jetstream().stream_info(f"{stream.name}dead")).state.messages == 1


async def test_a_subject_without_a_stream_is_refused(stream: Stream) -> None:
    target = JetStreamDeadLetters(stream.url, f"{stream.name}nowhere.x")
    with pytest.raises(lanes.ConfigError, match="no stream captures"):
        await lanes.run(stream.source(), Recorder(), dead_letters=target)


async def test_a_server_that_is_not_reached_is_named_as_the_target_of_the_dead_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The source of the same program may have another address.
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.2)
    with pytest.raises(lanes.SourceError, match=r"^dead letters to dead\.x: no NATS server reached at nats://127\.0\."):
        await JetStreamDeadLetters("nats://127.0.0.1:1", "dead.x").open()
    with pytest.raises(lanes.SourceError, match=r"^dead letters to dead\.x: the given NATS client is not connected"):
        await JetStreamDeadLetters(Client(), "dead.x").open()


async def test_a_dead_letter_outage_blocks_only_its_lane(
    stream: Stream, stored_dead_letters: str, client: Client, nats_server: NatsServer
) -> None:
    """While the dead-letter stream is missing, one lane waits, the others continue, and nothing is acknowledged."""
    await client.jetstream().publish(f"{stream.name}.poison", b"poison")
    await stream.publish(200)
    recorder = Recorder()

    async def handler(message: lanes.Message) -> None:
        if message.value == b"poison":
            raise lanes.Term("poison")
        await recorder(message)

    consumer = lanes.Consumer(
        stream.source(), handler, dead_letters=JetStreamDeadLetters(stream.url, stored_dead_letters)
    )
    name = stored_dead_letters.removesuffix(".x")
    async with running(consumer):
        with anyio.fail_after(20):
            await recorder.reached(200)
            await until(lambda: bool(consumer.status().dead_lettered))
        await client.jetstream().delete_stream(name)
        await client.jetstream().publish(f"{stream.name}.poison", b"poison")
        await stream.publish(200, seed=5)
        with anyio.fail_after(20):
            await recorder.reached(400)
            while await stream.ack_pending() != 1:
                await anyio.sleep(0.02)
        assert consumer.status().parking == 1
        await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"])
        with anyio.fail_after(20):
            await stream.acknowledged()
    assert (await client.jetstream().stream_info(name)).state.messages == 1


async def test_a_dead_letter_above_the_payload_limit_is_cut(fresh_nats: Callable[..., NatsServer]) -> None:
    """Headers and body together exceed the limit, and the server disconnects a client that sends that."""
    server = fresh_nats(config="max_payload: 20000")
    client = await nats.connect(server.url)
    stream = Stream(server.url, client, "BIG")
    await stream.create()
    await client.jetstream().add_stream(name="DEAD", subjects=["dead"])
    await client.jetstream().publish("BIG.1", b"x" * 19_900, headers={"Color": "red"})
    await stream.publish(5, keys=5)
    recorder = Recorder()

    async def handler(message: lanes.Message) -> None:
        if len(message.value) > 1_000:
            raise lanes.Term("poison")
        await recorder(message)

    consumer = lanes.Consumer(stream.source(where=client), handler, dead_letters=JetStreamDeadLetters(client, "dead"))
    async with running(consumer):
        with anyio.fail_after(15):
            await recorder.reached(5)
            await stream.acknowledged()
    letter = await client.jetstream().get_msg("DEAD", 1)
    headers = letter.headers or {}
    assert headers["Lanes-Truncated"] == "19900"
    assert "Color" not in headers
    assert 19_000 < len(letter.data or b"") < 19_900
    await client.close()


async def test_a_dead_letter_of_its_own_subject_is_refused(stream: Stream) -> None:
    subject = f"{stream.name}.dead"
    target = JetStreamDeadLetters(stream.url, subject)
    await target.open()
    with pytest.raises(lanes.SourceError, match="each dead letter would create another"):
        await target.put(dead_letter(subject=subject))
    await target.aclose()
    assert (await stream.client.jetstream().stream_info(stream.name)).state.messages == 0


@pytest.mark.parametrize("subject", ["", "a b", "a.*", "a.>"])
def test_an_invalid_dead_letter_subject_is_refused(subject: str) -> None:
    with pytest.raises(lanes.ConfigError, match="subject"):
        JetStreamDeadLetters("nats://x", subject)


# --- dead letters that the source would read again


@pytest.mark.parametrize("subject", ["{}.dead", "{}.1"])
async def test_a_subject_of_the_sources_own_stream_is_refused_at_the_start(stream: Stream, subject: str) -> None:
    await stream.publish(3)
    subject = subject.format(stream.name)
    consumer = lanes.Consumer(stream.source(), never_called, dead_letters=JetStreamDeadLetters(stream.url, subject))
    with pytest.raises(lanes.ConfigError) as refused:
        await consumer.run()
    assert str(refused.value) == (
        f"jetstream {stream.name}/worker: the dead letters go to {stream.name!r} (subject {subject!r}), which this "
        "source also reads, so each dead letter would create another dead letter. Write the dead letters to a "
        "separate topic or stream"
    )
    assert (await stream.consumer_info()).num_pending == 3


async def test_a_subject_that_the_consumers_filter_excludes_is_accepted(stream: Stream) -> None:
    subject, recorder = f"{stream.name}.dead", Recorder()
    await stream.publish(1, keys=1)
    source = stream.source(filter_subject=f"{stream.name}.0", key=lambda message: message.subject)
    async with running(lanes.Consumer(source, recorder, dead_letters=JetStreamDeadLetters(stream.url, subject))):
        with anyio.fail_after(10):
            await recorder.reached(1)


async def test_a_subject_of_a_stream_that_the_source_copies_is_refused_at_the_start(
    stream: Stream, stored_dead_letters: str, client: Client
) -> None:
    origin = stored_dead_letters.partition(".")[0]
    copy = Stream(stream.url, client, f"{stream.name}copy")
    await client.jetstream().add_stream(name=copy.name, mirror=StreamSource(name=origin))
    target = JetStreamDeadLetters(stream.url, stored_dead_letters)
    try:
        with pytest.raises(lanes.ConfigError, match=f"go to '{origin}' .*, which this source also reads"):
            await lanes.Consumer(copy.source(), never_called, dead_letters=target).run()
    finally:
        await client.jetstream().delete_stream(copy.name)


async def test_a_cohort_refuses_dead_letters_in_its_own_stream_at_the_start(cohort_stream: CohortStream) -> None:
    name = cohort_stream.name
    await cohort_stream.publish(*cohort_stream.a_key_each())
    target = JetStreamDeadLetters(cohort_stream.url, f"{name}.dead")
    with pytest.raises(lanes.ConfigError, match=f"the dead letters go to '{name}' .*, which this source also reads"):
        await lanes.Consumer(cohort_stream.source("a"), never_called, dead_letters=target).run()


async def test_a_dead_letter_stream_that_is_deleted_during_the_run_is_named(
    stream: Stream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = f"{stream.name}gone"
    await client.jetstream().add_stream(name=subject, subjects=[subject])
    letters = JetStreamDeadLetters(stream.url, subject)
    await letters.open()
    await client.jetstream().delete_stream(subject)
    try:
        with pytest.raises(lanes.SourceError) as failed:
            await letters.put(dead_letter())
        assert str(failed.value) == (
            f"no stream captures the dead-letter subject '{subject}'; create a stream with this subject"
        )
        assert failed.value.retryable
        await client.jetstream().add_stream(name=subject, subjects=[subject])
        await letters.put(dead_letter())

        real = Client.request

        async def request(self: Client, to: str, *arguments: Any, **options: Any) -> Any:
            # A stream without a leader captures the subject, and does not respond.
            if to == subject:
                raise nats.errors.NoRespondersError
            return await real(self, to, *arguments, **options)

        monkeypatch.setattr(Client, "request", request)
        with pytest.raises(lanes.SourceError, match="check that the server is up and that the stream has a leader"):
            await letters.put(dead_letter())
    finally:
        monkeypatch.undo()
        await letters.aclose()
        await client.jetstream().delete_stream(subject)
