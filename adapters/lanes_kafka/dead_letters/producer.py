"""A producer whose every record is confirmed or has failed, awaited on the event loop; one thread serves the client."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import anyio
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from lanes.clock import monotonic
from lanes.errors import ConfigError, SourceError
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.config import UserSettings, check_addresses, connects
from lanes_kafka.dead_letters.wire import Record
from lanes_kafka.errors import ErrorLog, settings_error

log = logging.getLogger("lanes.kafka")

WRITE_TIMEOUT_MS: Final = 10_000
"""Milliseconds after which a record that is not confirmed has failed. Whoever wrote it decides about another try."""

FLUSH_TIMEOUT: Final = 5.0
"""Seconds that a close waits for records on their way."""

_POLL: Final = 0.1
"""Seconds the thread stays in the client while records are on their way; a report ends it at once."""

_SERVE: Final = 30.0
"""Seconds between two looks at an idle client, for what it wants to call back."""

_ANY_PARTITION: Final = -1

_OURS: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "linger.ms": 0,
    # So that a record that is too large fails by itself, without those beside it.
    "batch.num.messages": 1,
    # The topic has a limit of its own; with this one the client would refuse first, before it compresses.
    "message.max.bytes": 1_000_000_000,
    "message.timeout.ms": WRITE_TIMEOUT_MS,
    # What it would print in an outage comes by its errors too, and those are not repeated many times a second.
    "log_level": 0,
}
_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "acks": ("acks", "request.required.acks"),
    "linger.ms": ("linger.ms", "queue.buffering.max.ms"),
    "message.timeout.ms": ("message.timeout.ms", "delivery.timeout.ms"),
    "log_level": ("log_level", "logger", "log_cb", "debug"),
}
_PURGED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)

_T = TypeVar("_T")


def producer_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a producer is made from, of the dictionary a consumer is made from: what is the consumer's alone is left
    out, and what makes every write safe is set. Pure.

    Raises ``ConfigError`` where the dictionary says otherwise, names no broker, or is none.
    """
    whole = UserSettings(config)
    check_addresses(whole)
    given = {name: value for name, value in whole.client.items() if connects(name)}
    if str(given.get("enable.idempotence", True)).lower() not in ("true", "t", "1"):
        raise ConfigError(
            f"enable.idempotence={given['enable.idempotence']!r}: dead letters would be written twice or in another "
            "order; leave it out"
        )
    for name in _SPELLINGS["acks"]:
        if str(given.get(name, "all")).lower() not in ("all", "-1"):
            raise ConfigError(f"{name}={given[name]!r}: dead letters must outlive a broker; set 'all', or leave it out")
    ours = {name: value for name, value in _OURS.items() if not any(other in given for other in _spellings(name))}
    return {**given, **ours}


def _spellings(name: str) -> tuple[str, ...]:
    names = _SPELLINGS.get(name, (name,))
    return (*names, *(f"topic.{other}" for other in names))


class _Outcome(Generic[_T]):
    """What comes of something done in the thread: an ``Answer`` with a value."""

    def __init__(self, bridge: Bridge) -> None:
        self._answer = Answer(bridge)
        self._value: list[_T] = []

    @property
    def given_up(self) -> bool:
        """Whether nobody waits any more."""
        return self._answer.given_up

    async def wait(self) -> _T:
        await self._answer.wait()
        return self._value[0]

    def give(self, value: _T) -> None:
        """From the thread. Does not block."""
        self._value.append(value)
        self._answer.give()

    def fail(self, error: Exception) -> None:
        """From the thread. Does not block."""
        self._answer.give(error)


class ConfirmedProducer:
    """One producer, made of ``settings``, and the thread that serves it. ``name``: what logs call it.

    Runs on asyncio and on trio. ``open`` comes first, and ``aclose`` last; all calls are those of one event loop.
    """

    def __init__(self, settings: Mapping[str, Any], name: str) -> None:
        self._settings = dict(settings)
        self._name = name
        self._errors = ErrorLog(name, monotonic, None, self._settings)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._producer: Producer | None = None
        self._fatal = KafkaError(KafkaError._STATE, "the client failed")
        self._thread: threading.Thread | None = None
        self._bridge: Bridge
        self._ended: _Outcome[None]

    def open(self) -> None:
        """Start the thread. Does not block. Idempotent."""
        if self._thread is not None:
            return
        self._bridge = Bridge()
        self._ended = _Outcome(self._bridge)
        # A daemon, so that an event loop that was left without a close does not keep the process.
        self._thread = threading.Thread(target=self._run, name="lanes-kafka-producer", daemon=True)
        self._thread.start()

    async def connect(self) -> None:
        """Make the client, which reaches for the brokers by itself. Idempotent.

        Raises ``ConfigError`` for settings that the client refuses.
        """
        if self._producer is None:
            await self.call(lambda wanted: self._connect())

    async def call(self, function: Callable[[Callable[[], bool]], _T]) -> _T:
        """Have a plain function that blocks called in the thread. Cancelled, its result is dropped.

        It is given a function that says whether its result is still waited for. Raises ``SourceError`` when there is no
        thread, before ``open`` and from ``aclose`` on.
        """
        self._check_open()
        outcome: _Outcome[_T] = _Outcome(self._bridge)

        def job() -> None:
            try:
                outcome.give(function(lambda: not outcome.given_up))
            except Exception as error:
                outcome.fail(error)
            except BaseException as error:
                # Of a callback of the user's that calls sys.exit(): it would end the thread without a word.
                failure = SourceError(f"{self._name}: a function of its settings raised {type(error).__name__}")
                failure.__cause__ = error
                outcome.fail(failure)

        self._jobs.put(job)
        return await outcome.wait()

    async def send(self, topic: str, record: Record, partition: int = _ANY_PARTITION) -> tuple[int, int]:
        """Write a record and wait for the confirmation: its partition and offset.

        Makes the client first where there is none, as after an error that ended it. Raises ``KafkaException`` when the
        record is not confirmed; it may be in the log all the same. Not cancelled by the cancellation of the wait.
        """
        self._check_open()
        await self.connect()
        producer = self._producer
        if producer is None:
            raise KafkaException(self._fatal)
        outcome: _Outcome[tuple[int, int]] = _Outcome(self._bridge)
        try:
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=record.headers,
                partition=partition,
                on_delivery=functools.partial(_report, outcome),
            )
            self._jobs.put(_wake)
            return await outcome.wait()
        except BufferError as full:
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL, "the client's queue is full")) from full
        except KafkaException as failure:
            error = failure.args[0]
            if error.fatal() or error.code() == KafkaError._FATAL:
                self._jobs.put(functools.partial(self._fail, producer, error))
            elif error.code() in _PURGED and self._thread is not None:
                # Its client had failed, and this is why.
                raise KafkaException(self._fatal) from failure
            raise

    def _check_open(self) -> None:
        if self._thread is None:
            raise SourceError(f"{self._name}: not opened, or closed already: await open() first")

    async def aclose(self, timeout: float = FLUSH_TIMEOUT) -> None:
        """Wait up to ``timeout`` seconds for records on their way, then end client and thread. Idempotent.

        What is not confirmed by then fails.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(functools.partial(self._end, timeout))
        self._jobs.put(None)
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        # It has run its last line: this waits for the system alone.
        thread.join()

    # --- in the thread

    def _run(self) -> None:
        while True:
            try:
                job = self._next()
                if job is None:
                    break
                job()
            except BaseException:
                # Of a function of the user's, such as oauth_cb.
                log.exception("%s: a function in its settings, such as oauth_cb, raised: correct it", self._name)
        self._producer = None
        self._ended.give(None)

    def _next(self) -> Callable[[], None] | None:
        """What is to be done next; None = end. Serves the client until there is something."""
        while True:
            busy = self._serve()
            try:
                return self._jobs.get_nowait() if busy else self._jobs.get(timeout=_SERVE)
            except Empty:
                continue

    def _serve(self) -> bool:
        """Let the client call back, waiting for it while records are on their way: then True."""
        producer = self._producer
        if producer is None:
            return False
        try:
            # len: what is on its way, and reports not looked at yet.
            producer.poll(_POLL if len(producer) else 0)
        except KafkaException as failure:
            self._fail(producer, failure.args[0])
            return False
        return len(producer) > 0

    def _connect(self) -> None:
        if self._producer is None:
            settings: dict[str, Any] = {**self._settings, "error_cb": self._errors.on_error}
            try:
                self._producer = Producer(settings)
            except (KafkaException, TypeError, ValueError) as failure:
                raise settings_error(failure.args[0], self._settings) from None

    def _end(self, timeout: float) -> None:
        if self._producer is not None:
            _finish(self._producer, timeout)

    def _fail(self, failed: Producer, error: KafkaError) -> None:
        """Do without a producer that an error has ended. The next record makes another."""
        if self._producer is failed:
            log.warning("%s: the client has failed for good and is made anew: %s", self._name, error.name())
            self._fatal, self._producer = error, None
            _finish(failed, 0.0)


def _finish(producer: Producer, timeout: float) -> None:
    """Wait for what is on its way, up to ``timeout`` seconds; whoever waits for the rest is told that it failed."""
    if producer.flush(timeout):
        producer.purge()
        producer.flush(_POLL)


def _report(outcome: _Outcome[tuple[int, int]], error: KafkaError | None, message: Message) -> None:
    if error is not None:
        outcome.fail(KafkaException(error))
        return
    partition, offset = message.partition(), message.offset()
    # A confirmed one has both.
    assert partition is not None and offset is not None
    outcome.give((partition, offset))


def _wake() -> None:
    """There is something on its way."""
