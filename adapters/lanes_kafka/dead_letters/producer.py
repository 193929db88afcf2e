"""A producer for an event loop. A send waits until the broker confirms the record or the write fails.

A separate thread serves the client.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import anyio
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from lanes.arguments import shown_value
from lanes.clock import monotonic
from lanes.errors import ConfigError, SourceError
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.callbacks import CallbackError, named_callbacks
from lanes_kafka.client_log import ClientLog
from lanes_kafka.config import UserSettings, check_addresses, connects
from lanes_kafka.dead_letters.wire import Headers, Record
from lanes_kafka.errors import ErrorLog, exception_text, settings_error

log = logging.getLogger("lanes.kafka")

WRITE_TIMEOUT_MS: Final = 10_000
"""Milliseconds after which a write without confirmation fails, unless the user sets another time."""

FLUSH_TIMEOUT: Final = 5.0
"""Seconds that a close waits for unconfirmed records."""

_POLL: Final = 0.1
"""Maximum seconds of one poll while records are unconfirmed. A delivery report ends the poll at once."""

_SERVE: Final = 30.0
"""Seconds between two polls of an idle client, which serve its callbacks."""

_ANY_PARTITION: Final = -1

_SAFE_SETTINGS: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "linger.ms": 0,
    # Without batches, a record that is too large fails alone.
    "batch.num.messages": 1,
    # The topic has its own limit. The client would apply ``message.max.bytes`` before compression.
    "message.max.bytes": 1_000_000_000,
    "message.timeout.ms": WRITE_TIMEOUT_MS,
}
_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "acks": ("acks", "request.required.acks"),
    "linger.ms": ("linger.ms", "queue.buffering.max.ms"),
    "message.timeout.ms": ("message.timeout.ms", "delivery.timeout.ms"),
}
_SILENT: Final = "delivery.report.only.error"
_PURGED: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)

T = TypeVar("T")


def producer_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the settings of a safe producer from the dictionary of a consumer. Pure.

    The function omits settings that only consumers have. Raises ``ConfigError`` if ``config`` is not a dictionary of
    settings, or if a setting makes writes unsafe. The call also refuses settings without a broker, and an address that
    is not ``host:port``.
    """
    return safe_settings(config, _SAFE_SETTINGS, "dead letters")


def safe_settings(config: Mapping[str, Any], safe: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the settings of an idempotent producer. Pure.

    Args:
        config: Settings of the user.
        safe: Default settings, for names that the user has not set.
        what: Name of the records that the producer writes, for the errors.

    Returns:
        The settings, without those that only consumers have.

    Raises:
        ConfigError: See ``producer_settings``.
    """
    whole = UserSettings(config)
    check_addresses(whole)
    given = named_callbacks({name: value for name, value in whole.client.items() if connects(name)})
    if str(given.get("enable.idempotence", True)).lower() not in ("true", "t", "1"):
        raise ConfigError(
            f"enable.idempotence={shown_value(given['enable.idempotence'])}: retries could write {what} twice or "
            "out of order; leave the setting out"
        )
    for name in _SPELLINGS["acks"]:
        if str(given.get(name, "all")).lower() not in ("all", "-1"):
            raise ConfigError(
                f"{name}={shown_value(given[name])}: {what} must survive a lost broker; set 'all', or leave it out"
            )
    if str(given.get(_SILENT, False)).lower() not in ("false", "f", "0"):
        raise ConfigError(
            f"{_SILENT}={shown_value(given[_SILENT])}: the confirmations of {what} would be missing; leave the setting "
            "out"
        )
    missing = [name for name in safe if not any(other in given for other in _spellings(name))]
    return given | {name: safe[name] for name in missing}


def _nothing() -> None:
    """Do nothing."""


def _spellings(name: str) -> tuple[str, ...]:
    names = _SPELLINGS.get(name, (name,))
    return (*names, *(f"topic.{other}" for other in names))


class _Write(Generic[T]):
    """The records of one call of ``ConfirmedProducer.write_all``. The producer's thread collects their ends.

    Args:
        ended_writes: List to which the first ended record appends this object.
        ended: See ``ConfirmedProducer.write_all``.

    Attributes:
        ended: See ``Args``.
    """

    __slots__ = ("_confirmed", "_ended_writes", "_failed", "ended")

    def __init__(
        self,
        ended_writes: list[_Write[Any]],
        ended: Callable[[Sequence[tuple[T, KafkaException | None]]], None],
    ) -> None:
        self._ended_writes = ended_writes
        self._confirmed: list[tuple[T, None]] = []
        self._failed: list[tuple[T, KafkaError]] = []
        self.ended = ended

    def confirmed(self, name: T, error: KafkaError | None, _: Message) -> None:
        """Keep the end of a record. The client calls this method within ``poll`` and ``flush``."""
        if not (self._confirmed or self._failed):
            self._ended_writes.append(self)
        if error is None:
            self._confirmed.append((name, None))
        else:
            self._failed.append((name, error))

    def take(self) -> tuple[_Write[T], list[tuple[T, None]], list[tuple[T, KafkaError]]]:
        """Remove the ended records, and return this object, the confirmed records and the failed records."""
        confirmed, self._confirmed = self._confirmed, []
        failed, self._failed = self._failed, []
        return self, confirmed, failed


class ConfirmedProducer:
    """One producer and its thread.

    Call ``open`` first and ``aclose`` last. Make all calls from one event loop, of asyncio or trio.

    Args:
        settings: Configuration of the client, whose secrets no error or log line shows.
        name: Name of the producer, for errors and log lines.

    Attributes:
        settings: Configuration for all clients that the thread serves, with a ``logger``.
    """

    def __init__(self, settings: Mapping[str, Any], name: str) -> None:
        self._client_log = ClientLog(name, monotonic, settings)
        self.settings = self._client_log.added_to(settings)
        self._name = name
        self._errors = ErrorLog(name, monotonic, None, self.settings)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._producer: Producer | None = None
        self._fatal = KafkaError(KafkaError._STATE, "the client failed")
        self._thread: threading.Thread | None = None
        # The writes with records that have ended since the last poll. Only the thread reads and writes the list.
        self._ended_writes: list[_Write[Any]] = []

    def open(self) -> None:
        """Start the thread. The call does not block. Idempotent."""
        if self._thread is not None:
            return
        self._bridge = Bridge()
        self._ended: Answer[None] = Answer(self._bridge)
        # The thread is a daemon, so that a loop that ended without ``aclose`` does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="lanes-kafka-producer", daemon=True)
        self._thread.start()

    async def connect(self) -> None:
        """Create the client, which connects in the background. Idempotent.

        Raises ``ConfigError`` if the client refuses its settings, and ``SourceError`` if the producer is not open.
        """
        if self._producer is None:
            await self.call(lambda wanted: self._connect())

    async def call(self, function: Callable[[Callable[[], bool]], T]) -> T:
        """Call a blocking function in the thread. A cancelled call drops the result.

        Args:
            function: Blocking function. The argument of ``function`` is a function that returns False after a
                cancellation of the call.

        Returns:
            The result of the function.

        Raises:
            SourceError: The producer is not open, or a callback of the settings raised an error.
            Exception: An exception of ``function``, unchanged.
        """
        self._check_open()
        outcome: Answer[T] = Answer(self._bridge)

        def job() -> None:
            try:
                outcome.give(function(lambda: not outcome.given_up))
            except CallbackError as error:
                failure = SourceError(f"{self._name}: {exception_text(error, self.settings)}; correct {error.name}")
                failure.__cause__ = error.raised
                outcome.fail(failure)
            except Exception as error:
                outcome.fail(error)
            except BaseException as error:
                # A function of the user may raise SystemExit. Uncaught, SystemExit would end the thread silently.
                failure = SourceError(
                    f"{self._name}: a callback of the settings raised {type(error).__name__}; correct the callback"
                )
                failure.__cause__ = error
                outcome.fail(failure)

        self._jobs.put(job)
        return await outcome.wait()

    async def send(self, topic: str, record: Record, partition: int = _ANY_PARTITION) -> tuple[int, int]:
        """Write a record and wait for its confirmation.

        Without a client, for example after a fatal error, the call first creates a client. A cancelled call may still
        write the record.

        Args:
            topic: Name of the topic.
            record: The record.
            partition: Number of the partition; -1 = the partitioner of the client chooses.

        Returns:
            The partition and the offset of the record.

        Raises:
            KafkaException: The broker did not confirm the record, the client's queue is full, or the client has
                failed. The log may contain the record.
            SourceError: The producer is not open.
        """
        self._check_open()
        await self.connect()
        outcome: Answer[tuple[int, int]] = Answer(self._bridge)
        producer = self._producer
        if producer is None:
            raise KafkaException(self._fatal)
        try:
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=record.headers,
                partition=partition,
                on_delivery=functools.partial(_report, outcome),
            )
            # An empty job wakes the thread, which then waits for the confirmation.
            self._jobs.put(_nothing)
            return await outcome.wait()
        except BufferError as full:
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL, "the client's queue is full")) from full
        except KafkaException as failure:
            cause = self._cause(producer, failure)
            if cause is failure:
                raise
            raise cause from failure

    def write_all(
        self,
        records: Iterable[tuple[T, str, bytes | None, bytes | None, Headers]],
        ended: Callable[[Sequence[tuple[T, KafkaException | None]]], None],
    ) -> None:
        """Write records without a wait.

        Await ``connect`` first. Calls of one task leave in their order.

        Args:
            records: A name of the caller, the topic, the value, the key and the headers, for each record.
            ended: Called on the event loop with the names of records that have ended, each with None or the error of
                the write. The call may happen within this call. All calls together have each name once.
        """
        producer = self._producer
        write = _Write(self._ended_writes, ended)
        failed: list[tuple[T, KafkaException | None]] = []
        confirmed = write.confirmed
        for name, topic, value, key, headers in records:
            if producer is None:
                failed.append((name, KafkaException(self._fatal)))
                continue
            try:
                if headers:
                    producer.produce(
                        topic, value, key, _ANY_PARTITION, functools.partial(confirmed, name), headers=headers
                    )
                else:
                    # The client takes several times as long for named arguments.
                    producer.produce(topic, value, key, _ANY_PARTITION, functools.partial(confirmed, name))
            except BufferError:
                failed.append((name, KafkaException(KafkaError(KafkaError._QUEUE_FULL, "the client's queue is full"))))
            except KafkaException as failure:
                failed.append((name, self._cause(producer, failure)))
        # An empty job wakes the thread, which then waits for the confirmations.
        self._jobs.put(_nothing)
        if failed:
            ended(failed)

    def _tell(self, producer: Producer) -> None:
        """Pass the ended writes to the event loop, which one call wakes. The producer's thread calls this method."""
        if not self._ended_writes:
            return
        told = [write.take() for write in self._ended_writes]
        self._ended_writes.clear()

        def tell() -> None:
            for write, confirmed, failed in told:
                write.ended(
                    confirmed + [(name, self._cause(producer, KafkaException(error))) for name, error in failed]
                )

        self._bridge.post(tell)

    def _cause(self, producer: Producer, failure: KafkaException) -> KafkaException:
        """Return the cause of a failed write, and replace a client that has failed permanently."""
        error = failure.args[0]
        if error.fatal() or error.code() == KafkaError._FATAL:
            self._jobs.put(functools.partial(self._fail, producer, error))
        elif error.code() in _PURGED and self._thread is not None:
            # The client has failed and dropped the record, so return the failure of the client.
            return KafkaException(self._fatal)
        return failure

    @property
    def is_open(self) -> bool:
        """Whether ``open`` was called, and ``aclose`` was not called since."""
        return self._thread is not None

    def _check_open(self) -> None:
        if not self.is_open:
            raise SourceError(f"{self._name}: not opened, or already closed; await open() first")

    async def aclose(self, timeout: float = FLUSH_TIMEOUT) -> None:
        """Wait up to ``timeout`` seconds for unconfirmed records, and then end client and thread. Idempotent.

        Records that are still unconfirmed after this time fail.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(functools.partial(self._end, timeout))
        self._jobs.put(None)
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        # The thread has run its last line, so the join does not block for long.
        thread.join()

    # --- in the thread

    def _run(self) -> None:
        while True:
            try:
                job = self._next()
                if job is None:
                    break
                job()
            except BaseException as error:
                callback = error.name if isinstance(error, CallbackError) else "a callback of the settings"
                log.exception("%s: %s raised an error; correct the callback", self._name, callback)
        self._producer = None
        self._client_log.end()
        self._ended.give(None)

    def _next(self) -> Callable[[], None] | None:
        """Serve the client until a job arrives, and return the job; None = end the thread."""
        while True:
            busy = self._serve()
            self._client_log.due()
            try:
                return self._jobs.get_nowait() if busy else self._jobs.get(timeout=_SERVE)
            except Empty:
                continue

    def _serve(self) -> bool:
        """Serve the callbacks of the client, and return whether the client has unconfirmed records."""
        producer = self._producer
        if producer is None:
            return False
        try:
            # The length counts unconfirmed records and unread reports.
            producer.poll(_POLL if len(producer) else 0)
        except KafkaException as failure:
            self._fail(producer, failure.args[0])
            return False
        finally:
            self._tell(producer)
        return len(producer) > 0

    def _connect(self) -> None:
        if self._producer is None:
            settings: dict[str, Any] = {**self.settings, "error_cb": self._on_error}
            try:
                self._producer = Producer(settings)
            except (KafkaException, TypeError, ValueError) as failure:
                raise settings_error(failure.args[0], self.settings) from None

    def _on_error(self, error: KafkaError) -> None:
        # The client reports its permanent failure before it drops its records.
        if error.fatal():
            self._fatal = error
        self._errors.on_error(error)

    def _end(self, timeout: float) -> None:
        if self._producer is not None:
            _finish(self._producer, timeout)
            self._tell(self._producer)

    def _fail(self, failed: Producer, error: KafkaError) -> None:
        """Drop a producer that has failed permanently. The next ``send`` creates another producer."""
        if self._producer is failed:
            log.warning("%s: the client has failed permanently and is rebuilt (%s)", self._name, error.name())
            self._fatal, self._producer = error, None
            _finish(failed, 0.0)
            self._tell(failed)


def _finish(producer: Producer, timeout: float) -> None:
    """Wait up to ``timeout`` seconds for confirmations, and then fail the unconfirmed records."""
    if producer.flush(timeout):
        producer.purge()
        producer.flush(_POLL)


def _report(outcome: Answer[tuple[int, int]], error: KafkaError | None, message: Message) -> None:
    if error is not None:
        outcome.fail(KafkaException(error))
        return
    partition, offset = message.partition(), message.offset()
    # A confirmed record has a partition and an offset.
    assert partition is not None and offset is not None
    outcome.give((partition, offset))
