"""Plain handlers run in processes: results, exceptions, batches, spans and setups cross as they would from a thread."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from lanes import ConfigError, Consumer, Message, Settings, Term
from lanes.core.types import Partition, PartitionId
from lanes.errors import HandlerProcessError, MessageError, Nak
from lanes.observe.otel import carried, carrier
from lanes.workers.crossing import (
    Closed,
    HandlerTraceback,
    Skipped,
    pack,
    pack_error,
    pack_outcomes,
    receive,
    result_of,
    send,
    unpack,
)
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes import process_handlers as handlers
from tests.fakes.processes import PATIENCE, broker_of, in_processes, notes, pids
from tests.fakes.telemetry import TRACE, TRACEPARENT, Sdk

in_real_processes = [pytest.mark.process, pytest.mark.timeout(4 * PATIENCE)]


async def run(broker: MemoryBroker, handler: Any, settings: Settings, **options: Any) -> MemorySource:
    """Handle all messages of a broker."""
    source = MemorySource(broker)
    source.finish()
    letters = MemoryDeadLetters(broker)
    await Consumer(source, handler, settings=settings, dead_letters=letters, **options).run()
    assert broker.unfinished == 0
    return source


# --- what crosses, without a process


class _Reader:
    def value(self, raw: object) -> bytes:
        return b"value"

    def headers(self, raw: object) -> list[tuple[str, bytes]]:
        return [("a", b"1"), ("a", b"2")]

    def subject(self, raw: object) -> str:
        return "orders.eu"


def test_a_message_reaches_the_process_with_all_that_a_handler_reads() -> None:
    partition = Partition(PartitionId("orders", 3), _Reader(), "made", fencing_token=17)
    first = Message(partition, 5, b"key", 9, object(), object())
    second = Message(partition, 6, None, 9, object(), object())
    first.attempt, first.received = 4, 2.5
    (one, two), found = unpack(pack([first, second], {"traceparent": "x"}))
    for name in ("key", "value", "headers", "subject", "position", "attempt", "epoch", "size", "received", "lane"):
        assert getattr(one, name) == getattr(first, name), name
    assert (one.partition.id, one.partition.incarnation, one.partition.live) == (partition.id, "made", True)
    assert (two.key, two.position) == (None, 6)
    assert one.partition is two.partition
    assert found == {"traceparent": "x"}
    with pytest.raises(AttributeError, match=r"message\.raw has no timestamp with sync_handlers="):
        one.raw.timestamp()  # type: ignore[attr-defined]


def test_an_epoch_without_a_fencing_token_reaches_the_process() -> None:
    partition = Partition(PartitionId("orders", 0), _Reader())
    partition.assignment = 8
    (message,), _ = unpack(pack([Message(partition, 0, None, 0, None, None)], {}))
    assert message.epoch == 8


def crossed(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        frame = pack_error(raised, raised.__traceback__)
    with pytest.raises(type(error) if type(error).__module__ == "builtins" else BaseException) as caught:
        result_of(frame)
    assert isinstance(caught.value.__cause__, HandlerTraceback)
    assert "in crossed" in str(caught.value.__cause__)
    return caught.value


def test_an_exception_returns_from_the_process_with_its_attributes_and_its_traceback() -> None:
    nak = crossed(Nak(delay=3.0))
    assert isinstance(nak, Nak)
    assert (nak.delay, nak.reason) == (3.0, "")
    unread = MessageError("cannot read")
    unread.unread = True
    again = crossed(unread)
    assert isinstance(again, MessageError)
    assert again.unread
    assert str(crossed(KeyError("k"))) == "'k'"


class _LateNak(Nak):
    def __init__(self, *, code: int) -> None:
        super().__init__("later", delay=float(code))


class _OwnTerm(Term):
    def __init__(self) -> None:
        super().__init__("never")
        self.lock = threading.Lock()


class _Signal(BaseException):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


def test_an_exception_that_cannot_be_pickled_is_replaced_by_one_with_the_same_effect() -> None:
    late = crossed(_LateNak(code=7))
    assert (type(late), getattr(late, "delay", None)) == (Nak, 7.0)
    assert type(crossed(_OwnTerm())) is Term
    assert type(crossed(_Signal(code=7))) is ConfigError
    plain = crossed(handlers.Unpicklable(code=7))
    assert type(plain) is HandlerProcessError
    assert str(plain).startswith(
        "the handler raised Unpicklable (code 7), which cannot be sent to the process of the consumer (TypeError: "
    )
    assert "which cannot be sent" in str(crossed(handlers.Unsendable()))


def test_the_outcomes_of_a_batch_return_from_the_process_one_by_one() -> None:
    results = result_of(pack_outcomes([None, ValueError("poison"), handlers.Unsendable(), Skipped]))
    assert results is not None
    assert [type(one) for one in results[1:3]] == [ValueError, HandlerProcessError]
    assert (results[0], results[3]) == (None, Skipped)


def test_a_large_message_is_sent_to_the_process_in_parts() -> None:
    here, there = socket.socketpair()
    frame = os.urandom(3 << 20)
    sender = threading.Thread(target=send, args=(here, frame))
    sender.start()
    assert receive(there) == frame
    sender.join()
    here.close()
    with pytest.raises(Closed):
        receive(there)
    there.close()


def test_the_trace_context_reaches_the_process(sdk: Sdk) -> None:
    assert carrier() == {}
    with sdk.tracers.get_tracer("test").start_as_current_span("outer") as outer:
        found = carrier()
    assert f"{outer.get_span_context().span_id:016x}" in found["traceparent"]
    with carried(found), sdk.tracers.get_tracer("test").start_as_current_span("inner") as inner:
        pass
    assert inner.parent is not None  # type: ignore[attr-defined]
    assert inner.parent.span_id == outer.get_span_context().span_id  # type: ignore[attr-defined]
    with carried({}):
        assert carrier() == {}


# --- refusals


def _local_class() -> Any:
    class Order:
        def __init__(self, message: Message) -> None:
            self.value = message.value

        @classmethod
        def parse(cls, message: Message) -> Order:
            return cls(message)

    return Order


def test_a_handler_that_cannot_be_pickled_is_refused_at_the_start() -> None:
    source, settings = MemorySource(MemoryBroker()), in_processes()
    with pytest.raises(ConfigError) as local:
        Consumer(source, lambda message: None, settings=settings)
    assert "<lambda> cannot be sent to another process (" in str(local.value)
    assert str(local.value).endswith(
        "). Define it with def at the top of a module, and open locks, files and connections in process_setup=…"
    )
    with pytest.raises(
        ConfigError, match=r"handler=_with cannot be sent to another process \(TypeError: cannot pickle"
    ):
        Consumer(source, functools.partial(_with, threading.Lock()), settings=settings)
    for decode in (order := _local_class(), order.parse):
        with pytest.raises(
            ConfigError, match=r"decode=.*Order.* cannot be sent.*\. Define the class at the top of a mod"
        ):
            Consumer(source, handlers.record, settings=settings, decode=decode)
    with pytest.raises(ConfigError, match=r"decode=.*<lambda> cannot be sent"):
        Consumer(source, handlers.record, settings=settings, decode=lambda message: None)
    with pytest.raises(ConfigError, match=r"process_setup=.*<lambda> cannot be sent"):
        Consumer(source, handlers.record, settings=in_processes(process_setup=lambda: None))


def _with(lock: object, message: Message) -> None: ...


async def _async(message: Message) -> None: ...


async def _async_set_up() -> None: ...


def test_async_functions_are_refused() -> None:
    source = MemorySource(MemoryBroker())
    with pytest.raises(ConfigError, match=r"handler=_async is async, but sync_handlers=\"processes\" runs only plain"):
        Consumer(source, _async, settings=in_processes())
    with pytest.raises(ConfigError, match="process_setup=_async_set_up is async: pass a plain function"):
        Consumer(source, handlers.record, settings=in_processes(process_setup=_async_set_up))


def test_worker_processes_are_refused_on_an_unsupported_system(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource(MemoryBroker())
    monkeypatch.setattr("lanes.handlers.os", type("os", (), {"name": "nt"}))
    with pytest.raises(ConfigError, match='sync_handlers="processes" needs Linux or macOS'):
        Consumer(source, handlers.record, settings=in_processes())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_handlers": "processes"}, 'sync_handlers="processes" without processes: set processes=…'),
        ({"processes": 2}, 'processes=2 with sync_handlers="threads": set sync_handlers="processes", or leave'),
        ({"process_setup": print}, 'process_setup=a builtin_function_or_method with sync_handlers="threads"'),
        ({"sync_handlers": "processes", "processes": 0}, "processes=0: must be a whole number, 1 or more"),
        ({"sync_handlers": "processes", "processes": 5, "concurrency": 4}, "processes=5 is above concurrency=4"),
        ({"sync_handlers": "processes", "processes": 1, "process_setup": 3}, "process_setup=3: must be a function"),
    ],
)
def test_contradicting_settings_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings(**options)
    assert str(refused.value).startswith(text)


def test_the_bound_of_running_handlers_is_the_number_of_processes() -> None:
    consumer = Consumer(MemorySource(MemoryBroker()), handlers.record, settings=in_processes(3))
    assert consumer.status().concurrency == 3


# --- in real processes


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestInProcesses:
    """The threads of the workers call into the processes, so one backend shows what crosses."""

    pytestmark = in_real_processes

    async def test_messages_are_handled_in_order_of_their_keys(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LANES_TEST_FOLDER", str(tmp_path))
        broker = broker_of(tmp_path, *"abcabcabc")
        broker.publish(str(tmp_path), key="d", headers=[("h", b"1"), ("h", b"2")], subject="orders.eu")
        await run(broker, handlers.record, in_processes(2, process_setup=handlers.set_up))
        lines = notes(tmp_path)
        positions = [int(line.split()[2]) for line in lines if line.startswith("start ")]
        assert sorted(positions) == list(range(10))
        for key in range(3):
            assert [one for one in positions if one % 3 == key and one < 9] == sorted(range(key, 9, 3))
        assert 1 <= len(set(pids(tmp_path))) <= 2
        assert os.getpid() not in pids(tmp_path)
        # Each process calls its setup once, before its first message.
        assert sorted(line for line in lines if line.startswith("setup")) == sorted(
            {f"setup {line.split()[1]}" for line in lines if line.startswith("setup")}
        )
        assert set(pids(tmp_path)) <= {int(line.split()[1]) for line in lines if line.startswith("setup")}
        assert "crossed (b'd', [('h', b'1'), ('h', b'2')], 'orders.eu', PartitionId(" in "\n".join(lines)

    async def test_each_failure_has_its_effect(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        broker = broker_of(tmp_path, "nak", "term", "unpicklable", "unsendable", "attribute", "raw", "exit", "other")
        with caplog.at_level(logging.DEBUG, "lanes"):
            await run(broker, handlers.fail, in_processes(1, attempts=2))
        letters = {one.key: (one.attempts, one.error_type, one.error_text) for one in broker.dead_letters}
        assert letters[b"nak"] == (2, "Nak", "later")
        assert letters[b"term"] == (1, "Term", "never")
        assert letters[b"other"][:2] == (2, "ValueError")
        for key, kind in ((b"unpicklable", "Unpicklable (code 7)"), (b"unsendable", "Unsendable (")):
            assert letters[key][:2] == (2, "HandlerProcessError")
            assert f"raised {kind}" in letters[key][2]
        assert "read message.position" in letters[b"attribute"][2]
        assert "stays in the process of the consumer" in letters[b"raw"][2]
        assert letters[b"exit"] == (
            2,
            "HandlerProcessError",
            (
                "the process of the handler ended with status 3 during the call: look for a crash in C code, a lack of "
                "memory, or a call of os._exit"
            ),
        )
        # The log has the line of the handler.
        assert "in the process of the handler:" in caplog.text
        assert 'raise ValueError("poison")' in caplog.text

    async def test_the_decoder_runs_in_the_process(self, tmp_path: Path) -> None:
        broker = broker_of(tmp_path, "good", "bad")
        await run(broker, handlers.decoded, in_processes(attempts=3), decode=handlers.unreadable)
        assert notes(tmp_path) == ["decoded True"]
        (letter,) = broker.dead_letters
        assert (letter.attempts, letter.error_type) == (1, "MessageError")
        assert letter.error_text.startswith("ValueError: ")
        assert "(decode failed with ValueError: correct decode=…" in letter.error_text

    async def test_a_wrong_setting_of_the_handler_stops_the_consumer(self, tmp_path: Path) -> None:
        broker = broker_of(tmp_path, "a")
        source = MemorySource(broker)
        with pytest.raises(ConfigError, match="a setting of the handler"):
            await Consumer(source, handlers.misconfigured, settings=in_processes()).run()
        assert broker.unfinished == 1

    async def test_the_messages_of_a_batch_end_one_by_one(self, tmp_path: Path) -> None:
        broker = broker_of(tmp_path, "a", "poison", "bad", "bad", "b")
        settings = in_processes(batch=5, linger=0.05)
        await run(broker, handlers.batch, settings, decode=handlers.unreadable)
        letters = {letter.position: letter.error_type for letter in broker.dead_letters}
        assert letters == {
            1: "HandlerProcessError",
            2: "MessageError",
            3: "MessageError",
        }
        handled = [line for line in notes(tmp_path) if line.startswith("batch")]
        assert not any("2" in line or "3" in line for line in handled)

    async def test_a_batch_whose_process_dies_is_tried_again(self, tmp_path: Path) -> None:
        broker = broker_of(tmp_path, "a", "crash", "b")
        await run(broker, handlers.batch, in_processes(attempts=2, batch=3, linger=0.05))
        assert broker.dead_letters == []
        assert len(set(pids(tmp_path))) == 2

    async def test_a_batch_that_takes_too_long_fails(self, tmp_path: Path) -> None:
        broker = broker_of(tmp_path, "forever")
        await run(broker, handlers.batch, in_processes(batch=3, timeout=0.2))
        assert [letter.error_text for letter in broker.dead_letters] == ["the handler did not end within timeout=0.2 s"]

    async def test_spans_continue_in_the_process(self, tmp_path: Path, sdk: Sdk) -> None:
        broker = MemoryBroker(1)
        broker.publish(str(tmp_path), key="a", headers=[TRACEPARENT])
        await run(broker, handlers.traced, in_processes())
        (span,) = [span for span in sdk.spans() if span.name.startswith("process")]
        context = span.get_span_context()
        assert context is not None
        assert notes(tmp_path) == [f"span {TRACE} {context.span_id:016x}"]

    async def test_a_setup_that_fails_stops_the_consumer(self, tmp_path: Path) -> None:
        broker = broker_of(tmp_path, "a", "b")
        source = MemorySource(broker)
        settings = in_processes(2, process_setup=handlers.broken_set_up)
        with pytest.raises(ConfigError) as refused:
            await Consumer(source, handlers.record, settings=settings).run()
        assert str(refused.value).startswith("the handler record cannot start in a process (RuntimeError: no model): ")
        assert "broken_set_up" in str(refused.value.__cause__)
        assert (broker.unfinished, notes(tmp_path)) == (2, [])

    @pytest.mark.parametrize("batched", [None, 2])
    async def test_processes_that_die_before_they_are_ready_stop_the_consumer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: int | None
    ) -> None:
        monkeypatch.setattr("lanes.workers.processes._STARTS", 2)
        broker = broker_of(tmp_path, "a")
        handler = handlers.record if batched is None else handlers.batch
        settings = in_processes(batch=batched, process_setup=handlers.die_in_set_up)
        with pytest.raises(
            ConfigError, match="2 processes in a row ended before they were ready, and the last process "
        ):
            await Consumer(MemorySource(broker), handler, settings=settings).run()
        assert broker.unfinished == 1

    async def test_a_process_that_the_system_refuses_stops_the_consumer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: str(tmp_path / "missing"))
        with pytest.raises(ConfigError, match=r"the system refused process [12] of processes=2 \("):
            await Consumer(MemorySource(broker_of(tmp_path, "a")), handlers.record, settings=in_processes(2)).run()
