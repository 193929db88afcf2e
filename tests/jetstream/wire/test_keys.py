"""Keys come from subjects, headers and functions; a failing key function affects only its message."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from nats.aio.msg import Msg

import lanes
from lanes.core.types import Room
from lanes.errors import MessageError
from lanes.source import Delivered
from lanes_jetstream import header, subject_token, whole_subject
from memsource import MemoryBroker, MemoryDeadLetters
from tests.jetstream.workload import DURABLE, Recorder, Stream, running

pytestmark = pytest.mark.anyio


class FakeMessage:
    def __init__(self, subject: str, headers: dict[str, str] | None = None) -> None:
        self.subject = subject
        self.headers = headers


def test_a_key_function_reads_the_subject_or_a_header() -> None:
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


@pytest.mark.parametrize("make", [subject_token, header])
def test_the_error_for_a_wrong_argument_shows_no_message(make: Any) -> None:
    class Message(FakeMessage):
        def __repr__(self) -> str:
            return "a payload"

    with pytest.raises(lanes.ConfigError, match=r"\(a \S*Message\)") as refused:
        make(Message("orders.42"))
    assert "payload" not in str(refused.value)


async def test_a_failing_key_function_halts_at_that_message(stream: Stream) -> None:
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
async def test_an_invalid_key_becomes_a_dead_letter_and_blocks_no_message(stream: Stream, returned: Any) -> None:
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


async def test_a_key_of_several_tokens_keeps_order(stream: Stream) -> None:
    await stream.client.publish(f"{stream.name}.eu.42.paid", b"")
    source = stream.source(key=subject_token(1, 2), durable=DURABLE)
    await source.open()
    room = Room(10, 1 << 20)
    await source.receive(room)
    with anyio.fail_after(10):
        (run,) = await source.receive(room)
    await source.aclose()
    assert isinstance(run, Delivered)
    assert run.run[0].key == b"eu.42"
    assert repr(subject_token(1, -1)) == "subject_token(1, -1)"
    assert whole_subject(run.run[0].raw) == f"{stream.name}.eu.42.paid".encode()  # type: ignore[arg-type]
