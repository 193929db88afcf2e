"""What does not fit is refused before the first message, with the setting, the value and the remedy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import anyio
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

import lanes
from lanes.errors import MessageError
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, header, subject_token, whole_subject
from lanes_jetstream.wire.messages import sequences
from memsource import MemoryBroker, MemoryDeadLetters
from tests.components import NatsServer
from tests.jetstream.workload import DURABLE, Recorder, Stream, running

pytestmark = pytest.mark.anyio

MakeStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]

READERS = pytest.mark.parametrize("reader", [{"durable": "d"}, {"cohort": "c"}], ids=["durable", "cohort"])
"""One process on a durable, and a member of a cohort."""


async def handler(message: lanes.Message) -> None:
    """Never called here."""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ack_policy": "none"}, ["ack_policy", "'none'", "explicit"]),
        ({"ack_policy": "all"}, ["ack_policy", "'all'", "explicit"]),
        ({"max_deliver": 5}, ["max_deliver", "5", "-1"]),
        ({"backoff": [1_000_000_000, 5_000_000_000], "max_deliver": 5}, ["backoff", "remove it", "max_deliver"]),
        ({"ack_wait": 500_000_000}, ["ack_wait", "0.5 s", "1 s or more"]),
        ({"deliver_subject": "somewhere"}, ["push", "another durable"]),
        ({"priority_groups": ["g"], "priority_policy": "overflow"}, ["priority_groups", "without"]),
    ],
)
async def test_consumer_that_does_not_fit(stream: Stream, config: dict[str, Any], words: list[str]) -> None:
    await stream.add_consumer(**config)
    with pytest.raises(lanes.ConfigError) as refused:
        await lanes.run(stream.source(), handler)
    for word in [stream.name, DURABLE, *words]:
        assert word in str(refused.value)


async def test_consumer_with_another_filter(stream: Stream) -> None:
    await stream.add_consumer(filter_subject=f"{stream.name}.1")
    with pytest.raises(lanes.ConfigError, match="filters"):
        await lanes.run(stream.source(filter_subject=f"{stream.name}.2"), handler)


async def test_max_in_flight_above_max_ack_pending(stream: Stream) -> None:
    await stream.add_consumer(max_ack_pending=500)
    with pytest.raises(lanes.ConfigError, match=r"max_in_flight=501 is above the 500 .*max_ack_pending"):
        await lanes.run(stream.source(), handler, settings=lanes.Settings(max_in_flight=501))


async def test_default_max_in_flight_follows_max_ack_pending(stream: Stream) -> None:
    await stream.add_consumer(max_ack_pending=500)
    await stream.publish(10)
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(), recorder)
    async with running(consumer):
        with anyio.fail_after(10):
            await recorder.reached(10)
        assert consumer.status().max_in_flight == 500


async def test_adopted_consumer_is_not_changed(stream: Stream) -> None:
    await stream.add_consumer(description="ours", ack_wait=7_000_000_000)
    await stream.publish(10)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(ack_wait=60), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(10)
    config = (await stream.consumer_info()).config
    assert (config.description, config.ack_wait) == ("ours", 7.0)


async def test_missing_stream(stream: Stream) -> None:
    source = JetStreamSource(stream.url, stream="NOWHERE", durable="d", key=None)
    with pytest.raises(lanes.ConfigError, match=r"'NOWHERE' does not exist.*create it"):
        await lanes.run(source, handler)


@READERS
async def test_no_server(reader: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.5)
    source = JetStreamSource("nats://user:secret@127.0.0.1:9", stream="S", key=whole_subject, **reader)
    with pytest.raises(lanes.SourceError, match=r"nats://127\.0\.0\.1:9 within 0\.5 s.*correct the URL") as refused:
        await lanes.run(source, handler)
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(source)


@pytest.mark.parametrize("url", ["nats://127.0.0.1:99999", "nats://[", "http://127.0.0.1:4222"])
async def test_url_that_cannot_be(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.5)
    with pytest.raises(lanes.SourceError, match="correct the URL"):
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), handler)


async def test_wrong_credentials(fresh_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 1.0)
    server = fresh_nats(config="authorization { user: a, password: b }")
    url = server.url.replace("nats://", "nats://a:hunter2@")
    with pytest.raises(lanes.SourceError, match="Authorization") as refused:
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), handler)
    assert "hunter2" not in str(refused.value)


async def test_jetstream_disabled_for_the_account(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats(config="accounts { A { users: [{user: a, password: b}] } }\nno_auth_user: a")
    source = JetStreamSource(server.url, stream="S", durable="d", key=None)
    with pytest.raises(lanes.SourceError, match=r"'S' at nats://.*JetStream not enabled.*enable JetStream.*account"):
        await lanes.run(source, handler)


@READERS
async def test_jetstream_disabled_on_the_server(fresh_nats: Callable[..., NatsServer], reader: dict[str, Any]) -> None:
    server = fresh_nats(arguments=["-js=false"])
    source = JetStreamSource(server.url, stream="S", key=whole_subject, **reader)
    with pytest.raises(lanes.SourceError, match=r"nats://.*JetStream does not answer; enable it on the server \(-js\)"):
        await lanes.run(source, handler)


async def test_server_that_is_too_old(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.OLDEST_SERVER", (99, 1))
    with pytest.raises(lanes.ConfigError, match=r"nats-server \d+\.\d+ is too old; upgrade it to 99\.1 or newer"):
        await lanes.run(stream.source(), handler)


async def test_failing_key_function_is_the_outcome_of_that_message(stream: Stream) -> None:
    await stream.publish(5)
    recorder = Recorder()
    with pytest.raises(lanes.HandlerHalted, match=r"sequence \d with LookupError; correct the key function") as halted:
        with anyio.fail_after(10):
            await lanes.run(stream.source(key=subject_token(7)), recorder)
    error = halted.value.__cause__
    assert isinstance(error, MessageError)
    assert "the subject has 2 tokens" in str(error.__cause__)
    assert not recorder.done
    assert await stream.ack_pending() > 0


@pytest.mark.parametrize("returned", [-1, 1.5, True, 2**128])
async def test_wrong_key_goes_to_the_dead_letters_and_nothing_waits_for_it(stream: Stream, returned: Any) -> None:
    def key(raw: Msg) -> Any:
        return returned if raw.data == b"broken" else subject_token(1)(raw)

    await stream.publish(5, keys=2)
    await stream.client.publish(f"{stream.name}.0", b"broken")
    await stream.publish(5, keys=2)
    broker = MemoryBroker()
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(key=key), recorder, dead_letters=MemoryDeadLetters(broker))
    async with running(consumer):
        with anyio.fail_after(10):
            await recorder.reached(10)
            await stream.acknowledged()
    (letter,) = broker.dead_letters
    assert (letter.position, letter.key, letter.value, letter.attempts) == (6, None, b"broken", 1)
    assert letter.error_type == "MessageError"
    assert recorder.violations == []
    assert 6 not in recorder.done


async def test_consumer_deleted_in_mid_run(stream: Stream) -> None:
    await stream.publish(10)
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(), recorder)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def delete() -> None:
                await recorder.reached(10)
                await stream.client.jetstream().delete_consumer(stream.name, DURABLE)

            tasks.start_soon(delete)
            with pytest.raises(lanes.SourceError, match="deleted"):
                await consumer.run()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stream": "a b"}, "stream='a b'"),
        ({"stream": ""}, "stream=''"),
        ({"durable": "a.b"}, "durable='a.b'"),
        ({"key": "subject"}, "key='subject'"),
        ({"ack_wait": 0.5}, "ack_wait=0.5"),
        ({"ack_wait": float("nan")}, "ack_wait=nan"),
        ({"ack_wait": "30"}, "ack_wait='30'"),
        ({"takeover": "force"}, "takeover='force'"),
    ],
)
async def test_arguments_are_checked_when_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", **{"stream": "S", "durable": "d", "key": None, **arguments})


@READERS
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": 0}, "start=0 is invalid; use .* 1 or more"),
        ({"start": -5}, "start=-5 is invalid; use"),
        ({"start": True}, "start=True is invalid; use"),
        ({"start": "begining"}, "start='begining' is invalid; use"),
        ({"start": datetime(2020, 1, 1)}, "start=2020-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
        ({"max_ack_pending": 0}, "max_ack_pending=0: must be a whole number, 1 or more"),
        ({"max_ack_pending": -1}, "max_ack_pending=-1: must be a whole number, 1 or more"),
        ({"max_ack_pending": True}, "max_ack_pending=True: must be a whole number, 1 or more"),
    ],
)
async def test_what_both_take_is_checked_when_made(
    reader: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", stream="S", key=None, **reader, **arguments)


@pytest.mark.parametrize("where", ["", 42, None])
async def test_connection_is_checked_when_made(where: Any) -> None:
    with pytest.raises(lanes.ConfigError, match="no NATS connection"):
        JetStreamSource(where, stream="S", durable="d", key=None)


def test_trio_is_refused_by_name() -> None:
    async def job() -> None:
        await lanes.run(JetStreamSource("nats://x", stream="S", durable="d", key=None), handler)

    with pytest.raises(lanes.ConfigError, match=r"asyncio.*trio"):
        anyio.run(job, backend="trio")


async def test_closed_connection_is_refused(stream: Stream) -> None:
    await stream.publish(1)
    other = type(stream.client)()
    with pytest.raises(lanes.SourceError, match="not connected"):
        await lanes.run(stream.source(where=other), handler)


async def test_given_connection_stays_open(stream: Stream) -> None:
    await stream.publish(10)
    for where in (stream.client, stream.client.jetstream()):
        recorder = Recorder()
        async with running(lanes.Consumer(stream.source(where=where, durable=f"d{id(where)}"), recorder)):
            with anyio.fail_after(10):
                await recorder.reached(10)
        assert stream.client.is_connected


def test_ack_replies_of_both_formats() -> None:
    assert sequences("$JS.ACK.S.c.1.42.43.1795230450408747835.0") == (42, 43)
    assert sequences("$JS.ACK._.hash.S.c.1.42.43.1795230450408747835.0") == (42, 43)
    assert sequences("$JS.ACK.domain.hash.S.c.1.42.43.1795230450408747835.0.token") == (42, 43)


class FakeMessage:
    def __init__(self, subject: str, headers: dict[str, str] | None = None) -> None:
        self.subject = subject
        self.headers = headers


def test_keys() -> None:
    message: Any = FakeMessage("orders.42.paid", {"Customer": "c"})
    assert subject_token(1)(message) == b"42"
    assert subject_token(-1)(message) == b"paid"
    assert header("Customer")(message) == "c"
    assert header("Missing")(message) is None
    assert header("Customer")(FakeMessage("x")) is None  # type: ignore[arg-type]
    assert whole_subject(message) == b"orders.42.paid"
    with pytest.raises(LookupError, match="3 tokens"):
        subject_token(3)(message)
    bad: Any = "1"
    with pytest.raises(lanes.ConfigError, match="subject_token"):
        subject_token(bad)
    with pytest.raises(lanes.ConfigError, match="header"):
        header("")


@pytest.mark.parametrize("subject", ["", "a b", "a.*", "a.>"])
def test_dead_letter_subject_is_checked(subject: str) -> None:
    with pytest.raises(lanes.ConfigError, match="subject"):
        JetStreamDeadLetters("nats://x", subject)


async def test_a_client_that_loses_its_cancellation_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.1)

    async def select(client: Client) -> None:
        try:
            await anyio.sleep(1.0 if client.stats["reconnects"] == 0 else 0.01)
        except BaseException:
            client.stats["reconnects"] = 1
        raise OSError("refused")

    monkeypatch.setattr(Client, "_select_next_server", select)
    with pytest.raises(lanes.SourceError, match=r"no NATS server reached at nats://127\.0\.0\.1:1 "):
        await lanes.run(JetStreamSource("nats://127.0.0.1:1", stream="S", durable="d", key=None), handler)
