"""The thread that makes the transactions of one source, one after the other.

A transaction takes all waiting requests. The thread sends their outputs and positions, and looks once more whether this
process still owns the partitions. Then it commits. Until then a lost partition makes the thread abort the transaction,
and send the outputs of the other partitions again.

A commit may have an unknown outcome, for example after a fatal error of the producer. The thread then makes a new
producer with the same transactional id, whose start ends the transaction of the former producer. The thread then asks
for the stored positions, which decide about each output. Nothing is sent before.

This file is longer than most, because the steps of a transaction share the producer and the requests with the steps
after a failure.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import sleep
from typing import Any, Final

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from lanes.clock import monotonic
from lanes.core.types import Partition
from lanes.errors import ConfigError, SourceError
from lanes.outputs.publisher import Output
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.client.group_snapshot import GroupSnapshot
from lanes_kafka.client_log import ClientLog
from lanes_kafka.errors import NOT_ALLOWED, ErrorLog, client_text, settings_error
from lanes_kafka.transactions.coverage import Coverage
from lanes_kafka.transactions.refusals import (
    TOO_OLD,
    Failed,
    is_of_an_output,
    missing_topic,
    refusal,
    refused_output,
    thread_failure,
)
from lanes_kafka.transactions.requests import Counts, Request

log = logging.getLogger("lanes.kafka")

CALL: Final = 1.0
"""Seconds of one call of the client, after which the thread looks whether it must end. Every call is repeated."""

CLUSTER_TIMEOUT: Final = 10.0
"""Seconds allowed for the answer about the cluster at the start."""

OPEN_TIMEOUT: Final = 60.0
"""Seconds allowed for the first start of the producer, which ends the transaction of a former process."""

SNAPSHOT_WAIT: Final = 1.0
"""Seconds that an aborted transaction waits for the callback of a rebalance, before its requests fail."""

_PAUSE: Final = 0.02
_PAUSES: Final = (0.1, 10.0)
"""Seconds between two starts of the producer: the first time, and the maximum."""

_IDLE: Final = 1.0
"""Seconds between two polls of an idle producer, which serve its callbacks."""

_CLOSE_TIMEOUT: Final = 5.0

_MOVED: Final = frozenset(
    {
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.UNKNOWN_MEMBER_ID,
    }
)
"""Errors of a transaction whose snapshot is older than the generation of the group."""

_NEVER_ALLOWED: Final = NOT_ALLOWED | {
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    *TOO_OLD,
}

_NO_TOPIC: Final = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)


class _Closing(Exception):
    """Ends a wait, because the thread must end."""


class _Refused(Exception):
    """The broker refuses transactions for good."""

    def __init__(self, failure: KafkaException) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(eq=False, repr=False)
class TransactionThread:
    """The transactions of one source, and their thread.

    Attributes:
        settings: Configuration of the producer, whose secrets no error or log line shows.
        admin: Configuration of the source's admin client.
        group: Id of the group.
        name: Name of the source, for errors and log lines.
        snapshot: Function that returns the newest snapshot of the source's group.
        ended: Function that the event loop calls with each request that has an outcome.
        counts: Number of transactions.
        too_large: Whether the broker has refused the metadata of a position for its size.
    """

    settings: Mapping[str, Any]
    admin: Mapping[str, Any]
    group: str
    name: str
    snapshot: Callable[[], GroupSnapshot]
    ended: Callable[[Request], None]
    counts: Counts = field(default_factory=Counts)
    too_large: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._client_log = ClientLog(self.name, monotonic, self.settings)
        self._errors = ErrorLog(self.name, monotonic, None, self.settings)
        self._missing = ErrorLog(self.name, monotonic, None, self.settings)
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._closing = threading.Event()
        self._producer: Producer | None = None
        self._admin: AdminClient | None = None
        self._again: list[Request] = []
        self._current: list[Request] = []
        self._failures = 0
        self._failed_outputs: list[tuple[Output, KafkaError]] = []
        self._thread: threading.Thread | None = None
        # Why the thread has ended by itself; "" = it has not.
        self._fault = ""
        # Whether the producer has a transaction whose commit was not sent, or was refused.
        self._unsent = False

    # --- from the event loop

    @property
    def transactional_id(self) -> str:
        """The transactional id."""
        return str(self.settings["transactional.id"])

    @property
    def is_open(self) -> bool:
        """Whether the thread takes requests."""
        return self._thread is not None

    async def open(self) -> None:
        """Start the thread and the producer, which ends the transaction of a former process with the same id.

        Raises:
            ConfigError: The broker or the client refuses transactions, or the two dictionaries name two clusters.
            SourceError: No broker answers.
        """
        self._bridge = Bridge()
        self._opened: Answer[None] = Answer(self._bridge)
        self._over: Answer[None] = Answer(self._bridge)
        self._thread = threading.Thread(target=self._run, name="lanes-kafka-transactions", daemon=True)
        self._thread.start()
        await self._opened.wait()

    def answer(self) -> Answer[None]:
        """Make the answer of a request."""
        return Answer(self._bridge)

    def submit(self, request: Request) -> None:
        """Make a request part of the next transaction. The call does not block."""
        self._requests.put(request)
        if self._closing.is_set():
            # The thread may have read its last request already.
            self._fail_requests()

    async def aclose(self) -> None:
        """Abort the present transaction unless its commit was sent, and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        self._requests.put(None)
        await self._over.wait()
        # The thread has run its last line, so the join does not block for long.
        thread.join()

    # --- the thread

    def _run(self) -> None:
        try:
            self._open()
        except _Closing:
            self._opened.fail(SourceError(f"{self.name}: closed before the producer of transactions had started"))
        except Exception as error:
            self._opened.fail(error)
        else:
            self._opened.give(None)
            self._serve()
        self._end()
        self._over.give(None)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                requests = self._next()
                if requests:
                    self._current = requests
                    self._transact(requests)
                    self._current = []
        except _Closing:
            return
        except Exception as raised:
            self._fault = thread_failure(self.name, raised, self.settings)

    def _end(self) -> None:
        self._closing.set()
        for request in (*self._current, *self._again):
            self._fail_ended(request)
        self._fail_requests()
        if self._producer is not None:
            if self._unsent:
                self._abort_soon(self._producer)
            _drop(self._producer)
            self._producer = None
        self._admin = None
        self._client_log.end()

    def _fail_requests(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                request = self._requests.get_nowait()
                if request is not None:
                    self._fail_ended(request)

    def _fail_ended(self, request: Request) -> None:
        if self._fault:
            # Without this thread no settlement can succeed, so the consumer must end.
            self._fail(request, self._fault, retryable=False)
        else:
            self._fail(request, "the transactions have ended")

    def _next(self) -> list[Request]:
        """Wait for requests, and return those for the next transaction."""
        found, self._again = self._again, []
        try:
            first = None if found else self._requests.get(timeout=_IDLE)
            if first is not None:
                found.append(first)
            while True:
                request = self._requests.get_nowait()
                if request is not None:
                    found.append(request)
        except Empty:
            pass
        if not found and self._producer is not None:
            # The next transaction handles a failure of the client.
            with contextlib.suppress(KafkaException):
                self._producer.poll(0)
            self._client_log.due()
        return found

    # --- the producer

    def _open(self) -> None:
        try:
            self._admin = AdminClient(self._client_log.added_to(dict(self.admin)))
            self._check_cluster(self._admin)
            until = monotonic() + OPEN_TIMEOUT
            while not self._start_producer():
                if monotonic() >= until:
                    raise SourceError(
                        f"{self.name}: the producer of transactions did not start within {OPEN_TIMEOUT:g} s; check "
                        "that a broker runs, and that its transaction.state.log.replication.factor fits the cluster",
                        retryable=True,
                    )
        except _Refused as refused:
            raise refusal(self.name, refused.failure.args[0], self.settings, self.group) from None
        except (KafkaException, TypeError, ValueError) as failure:
            raise settings_error(failure.args[0], self.settings) from None

    def _check_cluster(self, admin: AdminClient) -> None:
        """Raise ``ConfigError`` if the publisher's dictionary names another cluster than the source's."""
        plain = {name: value for name, value in self.settings.items() if not name.startswith(("transaction", "topic."))}
        other = AdminClient(self._client_log.added_to(plain))
        futures = [client.describe_cluster(request_timeout=CLUSTER_TIMEOUT) for client in (admin, other)]
        try:
            mine, theirs = (future.result().cluster_id for future in futures)
        except KafkaException as failure:
            error = failure.args[0]
            raise SourceError(
                f"{self.name}: the cluster of the transactions is unknown ({client_text(error, self.settings)}); check "
                "that a broker runs",
                retryable=True,
            ) from None
        if mine != theirs:
            raise ConfigError(
                f"{self.name}: transactions=… with a publisher of another cluster, because the source reads from "
                f"cluster {mine}, and the publisher writes to {theirs}; give both the same bootstrap.servers, or leave "
                "transactions out"
            )

    def _start_producer(self) -> bool:
        """Try once to start the producer, and return whether it has started.

        The call blocks for about ``CALL`` seconds. Raises ``_Refused`` if the broker refuses the producer for good.
        """
        self._check_closing()
        if self._producer is None:
            settings = self._client_log.added_to(dict(self.settings))
            producer = Producer({**settings, "error_cb": self._errors.on_error})
        else:
            producer = self._producer
        try:
            # The client continues a start that has not ended in time.
            self._producer = producer
            producer.init_transactions(CALL)
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            if error.code() in _NEVER_ALLOWED:
                raise _Refused(failure) from None
            if not error.retriable():
                self._producer = None
                _drop(producer)
            self._pause(_PAUSE)
            return False
        return True

    def _restart_producer(self) -> None:
        """Replace a producer that has failed for good. Repeats the start until it succeeds.

        The new producer has the same id, so its start ends the transaction of the former producer.
        """
        if self._producer is not None:
            _drop(self._producer)
            self._producer = None
        self._unsent = False
        self.counts.restarts += 1
        self._failures += 1
        if self._failures > 1:
            self._pause(min(_PAUSES[1], _PAUSES[0] * 2.0 ** (self._failures - 2)))
        while not self._start_producer():
            pass

    def _pause(self, seconds: float) -> None:
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self._check_closing()
            sleep(min(left, 0.1))

    def _check_closing(self) -> None:
        if self._closing.is_set():
            raise _Closing

    # --- one transaction

    def _transact(self, requests: list[Request]) -> None:
        """Commit the requests in one transaction, or give each of them an outcome or another turn."""
        requests = self._owned(requests)
        if not requests:
            return
        sending = committing = False
        snapshot = self.snapshot()
        try:
            if self._producer is None:
                self._restart_producer()
            producer = self._producer
            assert producer is not None, "a started producer stays until it fails"
            self._failed_outputs = []
            producer.begin_transaction()
            sending = self._unsent = True
            self._send(producer, requests, snapshot)
            owned = self._owned(requests)
            if len(owned) < len(requests):
                self._abort(producer)
                self._again = owned
                return
            committing, self._unsent = True, False
            self._repeat(lambda: producer.commit_transaction(CALL))
        except _Refused as refused:
            self._fail_all(requests, refused.failure.args[0])
        except KafkaException as failure:
            try:
                self._failed(requests, failure.args[0], snapshot, sending=sending, committing=committing)
            except _Refused as refused:
                self._fail_all(requests, refused.failure.args[0])
        else:
            self._failures = 0
            self._committed(requests)

    def _owned(self, requests: list[Request]) -> list[Request]:
        """Return the requests whose partition this process still owns, and fail the others."""
        owned = self.snapshot().owned
        found = []
        for request in requests:
            if request.partition in owned and not request.answer.given_up:
                found.append(request)
            else:
                self._fail(request, "a partition was given up meanwhile")
        return found

    def _send(self, producer: Producer, requests: list[Request], snapshot: GroupSnapshot) -> None:
        for request in requests:
            for output in request.outputs:
                self._produce(producer, output)
        producer.poll(0)
        offsets = [request.offset for request in requests]
        self._repeat(lambda: producer.send_offsets_to_transaction(offsets, snapshot.metadata, CALL))

    def _produce(self, producer: Producer, output: Output) -> None:
        def reported(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failed_outputs.append((output, error))

        headers: list[tuple[str, str | bytes | None]] = [*output.headers, *output.trace]
        while True:
            try:
                producer.produce(
                    output.target, value=output.value, key=output.key, headers=headers, on_delivery=reported
                )
            except BufferError:
                self._check_closing()
                producer.poll(0.1)
            except KafkaException as failure:
                self._failed_outputs.append((output, failure.args[0]))
                raise
            else:
                return

    def _repeat(self, call: Callable[[], object]) -> None:
        """Repeat a call of the client until it ends, without a limit."""
        while True:
            try:
                call()
            except KafkaException as failure:
                if not failure.args[0].retriable():
                    raise
                self._check_closing()
                self._client_log.due()
                sleep(0.0 if failure.args[0].code() == KafkaError._TIMED_OUT else _PAUSE)
            else:
                return

    def _abort(self, producer: Producer) -> None:
        """Abort the transaction, whose outcome is then known."""
        self.counts.aborted += 1
        self._unsent = True
        try:
            self._repeat(lambda: producer.abort_transaction(CALL))
            self._unsent = False
        except KafkaException:
            self._restart_producer()

    def _abort_soon(self, producer: Producer) -> None:
        """Abort the transaction within about ``CALL`` seconds, or leave it to its timeout."""
        self.counts.aborted += 1
        self._unsent = False
        until = monotonic() + CALL
        while (left := until - monotonic()) > 0:
            try:
                producer.abort_transaction(left)
            except KafkaException as failure:
                if not failure.args[0].retriable():
                    return
                sleep(_PAUSE)
            else:
                return

    def _committed(self, requests: list[Request]) -> None:
        self.counts.committed += 1
        for request in requests:
            self.counts.outputs += len(request.outputs)
            request.committed = True
            self._tell(request, request.outputs)
            request.answer.give(None)

    def _tell(self, request: Request, arrived: Sequence[Output]) -> None:
        if request.arrived is not None:
            return  # The first outcome counts.
        request.arrived = arrived
        self._bridge.post(lambda: self.ended(request))

    def _fail(self, request: Request, why: str, *, retryable: bool = True) -> None:
        """Report that no output of a request is committed."""
        self._tell(request, ())
        request.answer.fail(SourceError(f"{self.name}: not committed: {why}", retryable=retryable))

    def _fail_all(self, requests: Sequence[Request], error: KafkaError) -> None:
        topics = sorted({request.partition.id.source for request in requests})
        text = str(refusal(self.name, error, self.settings, self.group, topics))
        for request in requests:
            self._fail(request, text, retryable=False)

    # --- a failed transaction

    def _failed(
        self,
        requests: list[Request],
        error: KafkaError,
        snapshot: GroupSnapshot,
        *,
        sending: bool,
        committing: bool,
    ) -> None:
        """Bring the producer back, learn what has become of the transaction, and give the requests their outcome."""
        producer = self._producer
        failed_outputs = self._failed_outputs
        if error.code() in _NEVER_ALLOWED and not is_of_an_output(error, failed_outputs):
            if producer is not None and sending and not error.fatal():
                self._abort_soon(producer)
            raise _Refused(KafkaException(error))
        if error.fatal() or producer is None or not sending:
            log.warning(
                "%s: the producer of transactions is started again (%s); if this repeats, another process may use "
                "transactional.id=%r, so give each process its own name or group.instance.id",
                self.name,
                client_text(error, self.settings),
                self.transactional_id,
            )
            self._restart_producer()
        else:
            self._abort(producer)
        if committing:
            self._look_up(requests, error, failed_outputs)
            return
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self.too_large = True
        if error.code() in _MOVED:
            self._await_callback(requests, snapshot, error)
            return
        self._fail_each(requests, error, failed_outputs)

    def _await_callback(self, requests: list[Request], snapshot: GroupSnapshot, error: KafkaError) -> None:
        """Give the requests another turn after the next callback of the group."""
        until = monotonic() + SNAPSHOT_WAIT
        while self.snapshot() is snapshot and monotonic() < until:
            self._pause(_PAUSE)
        if self.snapshot() is snapshot:
            self._fail_each(requests, error, ())
        else:
            self._again = requests

    def _fail_each(self, requests: Sequence[Request], error: KafkaError, failed: Failed) -> None:
        sent = [output for request in requests for output in request.outputs]
        refused = refused_output(error, failed, sent, self.settings)
        why = refused or self._why(error, failed)
        for request in requests:
            self._fail(request, why, retryable=not refused)

    def _why(self, error: KafkaError, failed: Failed) -> str:
        """Return why the outputs of a transaction did not arrive this time, and log a topic that does not exist."""
        found = next(((output, each) for output, each in failed if each.code() in _NO_TOPIC), None)
        if found is None and failed:
            # The client may wait for a missing topic until the outputs have timed out.
            found = next(((output, each) for output, each in failed if self._is_missing(output, each)), None)
        if found is not None:
            output, cause = found
            why = missing_topic(output, client_text(cause, self.settings))
            self._missing.on_message(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, why))
            return why
        where = f"{failed[0][0].target}: " if failed else ""
        return f"{where}{client_text(failed[0][1] if failed else error, self.settings)}"

    def _is_missing(self, output: Output, error: KafkaError) -> bool:
        if error.code() != KafkaError._MSG_TIMED_OUT:
            return False
        assert self._admin is not None, "the admin client lives as long as the thread"
        try:
            known = self._admin.list_topics(output.target, timeout=CALL).topics.get(output.target)
        except KafkaException:
            return False
        return known is not None and known.error is not None and known.error.code() in _NO_TOPIC

    def _look_up(self, requests: list[Request], error: KafkaError, failed: Failed) -> None:
        """Ask for the stored positions, which tell the outcome of a commit. Repeats the request without a limit."""
        self.counts.unknown += 1
        stored = self._stored([request.partition for request in requests])
        for request in requests:
            coverage = stored[request.partition]
            arrived = [output for output in request.outputs if coverage.covers(output.position)]
            self.counts.outputs += len(arrived)
            # A later position cannot be stored, because only this request commits the partition.
            request.committed = coverage.floor == request.coverage.floor and coverage.runs == request.coverage.runs
            if request.committed or arrived:
                self._tell(request, arrived)
            if request.committed:
                request.answer.give(None)
            else:
                self._fail_each([request], error, failed)

    def _stored(self, partitions: Sequence[Partition]) -> dict[Partition, Coverage]:
        assert self._admin is not None, "the admin client lives as long as the thread"
        warned = False
        while True:
            self._check_closing()
            wanted = [TopicPartition(*partition.id) for partition in partitions]
            future = self._admin.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(self.group, wanted)], require_stable=True, request_timeout=5.0
            )[self.group]
            try:
                found = {(each.topic, each.partition): each for each in future.result().topic_partitions or ()}
                error = next((each.error for each in found.values() if each.error is not None), None)
            except KafkaException as failure:
                found, error = {}, failure.args[0]
            if error is None:
                return {
                    partition: Coverage.stored(found[partition.id].offset, found[partition.id].metadata)
                    for partition in partitions
                }
            if error.code() in _NEVER_ALLOWED:
                raise _Refused(KafkaException(error))
            if not warned:
                warned = True
                log.warning(
                    "%s: the outcome of a transaction is unknown, and the stored positions are not read yet (%s); "
                    "retrying",
                    self.name,
                    client_text(error, self.settings),
                )
            self._pause(_PAUSES[0])


def _drop(producer: Producer) -> None:
    """End a producer without its unsent records."""
    # A client that has failed for good raises its error from every call.
    with contextlib.suppress(KafkaException):
        producer.purge()
    with contextlib.suppress(KafkaException):
        producer.flush(0.1)
