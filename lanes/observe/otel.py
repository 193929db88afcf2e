"""Spans and metrics through the OpenTelemetry API. A process without an SDK sends neither spans nor metrics.

Names follow the messaging conventions of OpenTelemetry; all other names begin with ``lanes.``. A handler call has one
span, which is a child of the context in the message's headers. A batch has one span with a link to the context of
each message.

Names, labels and attributes contain no keys, payloads, headers, subjects or texts of exceptions. A subject, for
example, may contain a key. A span of one message contains the hash of the key, like a row of the history. A metric
contains no hash.

An error of the SDK, an exporter or a propagator never reaches the handler. The log shows the first error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import Token
from types import TracebackType
from typing import Final, Literal

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, NoOpMeter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from lanes.clock import Clock, monotonic
from lanes.core.types import Message, Partition, PartitionId
from lanes.history.writer import key_hash
from lanes.observe.instruments import (
    CONSUMER,
    DESTINATION,
    OPERATION_NAME,
    PARTITION,
    SYSTEM,
    Instruments,
    Labels,
    Reading,
    instruments_of,
    partition_labels,
    queue_labels,
)
from lanes.observe.status import Status
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.registered import queue_partitions

log = logging.getLogger("lanes")

Result = Literal["ack", "retry", "dead_letter", "error", "cancelled", "abandoned"]
"""The end of a handler call.

``ack``: the call succeeded. ``retry``: the call failed, and the engine retries the message. ``dead_letter``: the call
failed, and the message becomes a dead letter. ``error``: the call failed and blocks its key, drains its partition, or
stops the consumer. ``cancelled``: ``lanes`` cancelled the call, or made no call because the lease had expired.
``abandoned``: the result of the call does not count.
"""


HEADER_VALUE_LIMIT: Final = 8_192
"""Maximum number of bytes of a header with a trace context, as the W3C recommendation allows."""

HEADER_REPEAT_LIMIT: Final = 32
"""Maximum number of headers of one name that the telemetry reads, because a ``tracestate`` has at most 32 entries."""

ERROR_TYPE_LIMIT: Final = 200
"""Maximum number of characters of an exception's type name in a span or a label."""

_FAILED: Final = frozenset({"retry", "dead_letter", "error"})
_POSITION_NAMES: Final = {"kafka": "messaging.kafka.offset"}
_CACHED_PARTITIONS: Final = 1_024

_Attributes = dict[str, AttributeValue]
_Headers = Sequence[tuple[str, bytes]]


class Telemetry:
    """The spans and metrics of one consumer, made by ``create``.

    No method blocks or raises an exception, and any thread may call every method. The methods increase the counters. At
    each collection of metrics, the gauges read the consumer's status.
    """

    def __init__(
        self,
        name: str,
        system: str,
        status: Callable[[], Status],
        tracer: Tracer | None,
        instruments: Instruments,
        clock: Clock,
        queues: Sequence[PartitionedQueue] = (),
    ) -> None:
        self.clock = clock
        self.tracer = tracer
        self._name = name
        self._instruments = instruments
        self._labels: Labels = {SYSTEM: system, CONSUMER: name}
        self._position_name = _POSITION_NAMES.get(system)
        self._partition_labels: dict[PartitionId, dict[str, str]] = {}
        self._queue_partitions = queue_partitions(queues)
        self._reported = False
        self._reading = Reading(self._labels, status, clock)
        instruments.open(self._reading)

    @classmethod
    def create(
        cls,
        name: str,
        system: str,
        status: Callable[[], Status],
        *,
        queues: Sequence[PartitionedQueue] = (),
        clock: Clock = monotonic,
    ) -> Telemetry | None:
        """Create the telemetry of a consumer; None = the process has no SDK.

        Consumers with the same name share their time series. The telemetry ignores an SDK that the program configures
        after this call.

        Args:
            name: Name of the consumer.
            system: Value of ``messaging.system``.
            status: Function that makes a snapshot. The thread that collects the metrics calls ``status``.
            queues: Partitioned queues that the source reads.
            clock: Clock of the durations, in seconds.

        Returns:
            The telemetry, or None.
        """
        tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
        if is_idle(tracers) and is_idle(meters):
            return None
        # Import here, because only telemetry needs the module, and its import takes long.
        from importlib.metadata import version

        installed = version("lanes-runtime")
        tracer = None if is_idle(tracers) else tracers.get_tracer("lanes", installed)
        if tracer is not None and is_idle(tracer):
            tracer = None
        metered = not is_idle(meters) and not is_idle(meters.get_meter("lanes", installed))
        if tracer is None and not metered:
            return None
        instruments = instruments_of(meters, installed) if metered else Instruments(NoOpMeter("lanes"))
        return cls(name, system, status, tracer, instruments, clock, queues)

    def close(self) -> None:
        """Remove the consumer, and the reference to it, from the gauges.

        The counters also work after this call. Idempotent.
        """
        self._instruments.close(self._reading)

    # Counters

    def consumed(self, partition: Partition, count: int) -> None:
        """Count the messages of one delivered run, redelivered messages included."""
        self._add(self._instruments.consumed, count, {**self.labels(partition), OPERATION_NAME: "receive"})

    def settled(self, partition: Partition, count: int) -> None:
        """Count settled messages; if the source commits, count finished messages."""
        self._add(self._instruments.settled, count, self.labels(partition))

    def retried(self, message: Message) -> None:
        """Count a message that failed and waits for a retry."""
        self._add(self._instruments.retries, 1, self.labels(message.partition))

    def dead_lettered(self, message: Message) -> None:
        """Count a dead letter that the broker confirmed."""
        self._add(self._instruments.dead_letters, 1, self.labels(message.partition))

    def outputs(self, partition: Partition, count: int) -> None:
        """Count outputs that the broker confirmed."""
        self._add(self._instruments.outputs, count, self.labels(partition))

    def publish_failed(self, message: Message) -> None:
        """Count a message with outputs that the broker has not confirmed."""
        self._add(self._instruments.output_failures, 1, self.labels(message.partition))

    def zombie(self, message: Message) -> None:
        """Count an ignored result, which arrived after the fence of its assignment."""
        self._add(self._instruments.zombies, 1, self.labels(message.partition))

    def loop_held(self, seconds: float) -> None:
        """Count the seconds for which a call blocked the event loop."""
        self._add(self._instruments.loop_held, seconds, self._labels)

    def redelivered(self, message: Message, cause: str) -> None:
        """Count a redelivered position; ``cause`` has the values of ``lanes.core.effects.Redelivered``."""
        self._add(self._instruments.redelivered, 1, {**self.labels(message.partition), "lanes.cause": cause})

    # Handlers

    def handling(self, message: Message) -> Handling:
        """Make the context manager of a handler call with one message; see ``Handling``."""
        return Handling(self, (message,), batch=False)

    def handling_batch(self, messages: Sequence[Message]) -> Handling:
        """Make the context manager of a batch handler's call. The span has a link to the context of each message."""
        return Handling(self, messages, batch=True)

    # For Handling

    def labels(self, partition: Partition) -> dict[str, str]:
        """Return the labels of one partition, which the caller must not change."""
        found = self._partition_labels.get(partition.id)
        if found is None:
            if len(self._partition_labels) >= _CACHED_PARTITIONS:
                self._partition_labels.clear()
            labels = partition_labels(partition.id, self._queue_partitions.get(partition.id.source))
            found = self._partition_labels[partition.id] = {**self._labels, **labels}
        return found

    def common_labels(self, messages: Sequence[Message]) -> dict[str, str]:
        """Return the labels that all messages share."""
        partitions = {message.partition.id: message.partition for message in messages}
        if len(partitions) == 1:
            return self.labels(next(iter(partitions.values())))
        sources = {partition.source for partition in partitions}
        if len(sources) > 1:
            return {**self._labels}
        place = self._queue_partitions.get(source := sources.pop())
        return {**self._labels, DESTINATION: source, **({} if place is None else queue_labels(place))}

    def place(self, message: Message) -> _Attributes:
        """Return the position, attempt and epoch of a message as attributes."""
        place: _Attributes = {
            "lanes.position": message.position,
            "lanes.attempt": message.attempt,
            "lanes.epoch": message.epoch,
        }
        if self._position_name is not None:
            place[self._position_name] = message.position
        return place

    def record(self, seconds: float, labels: Labels, context: Context | None) -> None:
        """Record the duration of a handler call, in the span of ``context``."""
        try:
            self._instruments.duration.record(seconds, {**labels, OPERATION_NAME: "process"}, context)
        except Exception as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Log the first error of the SDK or of its plug-ins."""
        if not self._reported:
            self._reported = True
            # Log the type alone, because the text may quote an attribute.
            log.warning(
                "%s: telemetry failed (%s); check the OpenTelemetry setup. Later errors are not logged, and "
                "messages are handled as before",
                self._name,
                _error_type(error),
            )

    def _add(self, counter: Counter, count: float, labels: Labels) -> None:
        try:
            counter.add(count, labels)
        except Exception as error:
            self.report(error)


class Handling:
    """One call of the handler. Make the call in a ``with`` block of this object, and then report the result by ``end``.

        with telemetry.handling(message) as handling:
            await handler(message)
        handling.end("ack")

    Inside the block the span is the current span. The same task or thread must enter and leave the block. The measured
    duration is the duration of the block. Call ``end`` after every block, also after an exception.
    """

    __slots__ = (
        "_batch",
        "_began",
        "_context",
        "_ended",
        "_left",
        "_messages",
        "_span",
        "_telemetry",
        "_token",
        "_wall",
    )

    def __init__(self, telemetry: Telemetry, messages: Sequence[Message], *, batch: bool) -> None:
        self._telemetry = telemetry
        self._messages = messages
        self._batch = batch
        self._began: float | None = None
        self._left: float | None = None
        self._ended = False
        self._wall = 0
        self._span: Span = INVALID_SPAN
        self._context: Context | None = None
        self._token: Token[Context] | None = None

    def __enter__(self) -> Handling:
        telemetry = self._telemetry
        # Read both clocks at one moment. Otherwise a span could end before the events inside the span.
        self._began = telemetry.clock()
        if telemetry.tracer is not None:
            self._wall = time.time_ns()
            try:
                self._start(telemetry.tracer)
            except Exception as error:
                telemetry.report(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left = self._telemetry.clock()
        if self._token is not None:
            otel_context.detach(self._token)
            self._token = None

    def end(self, result: Result, error: BaseException | None = None) -> None:
        """End the span with the result, and with the type of the handler's ``error``.

        The result of a batch is the first result other than ``ack``, or ``ack`` if every message has this result.
        Idempotent. The call has no effect if the program has not entered the block.
        """
        if self._ended or self._began is None:
            return
        self._ended = True
        telemetry = self._telemetry
        seconds = (telemetry.clock() if self._left is None else self._left) - self._began
        how: dict[str, str] = {"lanes.outcome": result}
        if result in _FAILED:
            how["error.type"] = "_OTHER" if error is None else _error_type(error)
        telemetry.record(seconds, {**telemetry.common_labels(self._messages), **how}, self._context)
        try:
            if result in _FAILED:
                self._span.set_status(StatusCode.ERROR)
            for name, value in how.items():
                self._span.set_attribute(name, value)
            # The wall clock may be set meanwhile, so add the measured duration to the start.
            self._span.end(self._wall + round(seconds * 1e9))
        except Exception as failure:
            telemetry.report(failure)

    def _start(self, tracer: Tracer) -> None:
        telemetry, messages = self._telemetry, self._messages
        attributes: _Attributes = {
            **telemetry.common_labels(messages),
            OPERATION_NAME: "process",
            "messaging.operation.type": "process",
        }
        links = []
        if self._batch:
            parent = Context()
            attributes["messaging.batch.message_count"] = len(messages)
            for message in messages:
                origin = trace.get_current_span(self._extract(message)).get_span_context()
                if origin.is_valid:
                    links.append(
                        Link(origin, {PARTITION: str(message.partition.id.number), **telemetry.place(message)})
                    )
        else:
            parent = self._extract(messages[0])
            attributes |= telemetry.place(messages[0])
        ambient = trace.get_current_span().get_span_context()
        if ambient.is_valid:
            # A span around the whole run gets a link, because it is not the parent of each message.
            links.append(Link(ambient))
        destination = attributes.get(DESTINATION)
        span = tracer.start_span(
            "process" if destination is None else f"process {destination}",
            parent,
            SpanKind.CONSUMER,
            attributes,
            links,
            self._wall,
        )
        self._span = span
        if not self._batch and messages[0].key is not None and span.is_recording():
            span.set_attribute("lanes.key.hash", key_hash(messages[0].key))
        self._context = trace.set_span_in_context(span, parent)
        self._token = otel_context.attach(self._context)

    def _extract(self, message: Message) -> Context:
        """Return the context in a message's headers, read by the process's propagators; empty = no context."""
        try:
            # The current context belongs to the caller of run(), so extract into an empty context.
            return propagate.extract(message.headers, Context(), _HEADERS)
        except Exception as error:
            self._telemetry.report(error)
            return Context()


def carrier() -> dict[str, str]:
    """Return the current trace context and baggage as text, for ``carried`` in another process; empty = no context."""
    found: dict[str, str] = {}
    # An error of a propagator must not reach the handler.
    with suppress(Exception):
        propagate.inject(found)
    return found


@contextmanager
def carried(carrier: Mapping[str, str]) -> Iterator[None]:
    """Make the context of ``carrier`` current in a block, so that spans of a handler continue the context's trace."""
    if not carrier:
        yield
        return
    token = otel_context.attach(propagate.extract(carrier, Context()))
    try:
        yield
    finally:
        otel_context.detach(token)


class _HeaderGetter(Getter[_Headers]):
    """Reads the headers of a message, which any producer may have written."""

    def get(self, carrier: _Headers, key: str) -> list[str] | None:
        wanted = key.lower()
        values: list[str] = []
        for name, value in carrier:
            if name.lower() != wanted or len(value) > HEADER_VALUE_LIMIT:
                continue
            try:
                values.append(value.decode("ascii"))
            except UnicodeDecodeError:
                continue
            if len(values) == HEADER_REPEAT_LIMIT:
                break
        return values or None

    def keys(self, carrier: _Headers) -> list[str]:
        return [name for name, _ in carrier]


_HEADERS: Final = _HeaderGetter()


def is_idle(part: object) -> bool:
    """Return whether an object comes from the API package, which contains only proxies and no-ops."""
    return type(part).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))


def _error_type(error: BaseException) -> str:
    """Return the type name of an exception with its module, cut to ``ERROR_TYPE_LIMIT``."""
    try:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return name[:ERROR_TYPE_LIMIT].encode(errors="backslashreplace").decode()
    except Exception:
        # A metaclass may break the names of its classes.
        return "_OTHER"
