"""Spans and metrics through the OpenTelemetry API alone: nothing is sent unless the process configures an SDK.

Names follow the messaging conventions of OpenTelemetry; what they have no name for begins with ``lanes.``. One
span a handler call, a child of the context in the message's headers; one span a batch, linked to them.

Neither a key, a payload, a header, a subject (keys are often part of it) nor the text of an exception is in any name,
label or attribute. Of a key a span has the hash that the history has; metrics have nothing of it.

Whatever the SDK, an exporter or a propagator raises stays here: the first failure is logged, and the handler runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import Token
from importlib.metadata import version
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
)
from lanes.observe.status import Status

__all__ = ["Handling", "Result", "Telemetry"]

log = logging.getLogger("lanes")

Result = Literal["ack", "retry", "dead_letter", "error", "cancelled", "abandoned"]
"""How a handler call ended: ``ack``; it failed and is tried again (``retry``), is given up (``dead_letter``), or stops
the consumer (``error``); ``lanes`` cancelled it (``cancelled``); its result does not count (``abandoned``)."""

_VERSION: Final = version("lanes-runtime")

HEADER_VALUE_LIMIT: Final = 8_192
"""Bytes of a header's value above which it carries no context: what W3C allows the longest of them."""

HEADER_REPEAT_LIMIT: Final = 32
"""Headers of one name that are looked at: a ``tracestate`` has at most 32 entries."""

ERROR_TYPE_LIMIT: Final = 200
"""Characters of an exception's type name that a span or a label keeps."""

_FAILED: Final = frozenset({"retry", "dead_letter", "error"})
_POSITION_NAMES: Final = {"kafka": "messaging.kafka.offset"}
_CACHED_PARTITIONS: Final = 1_024

_Attributes = dict[str, AttributeValue]
_Headers = Sequence[tuple[str, bytes]]


class Telemetry:
    """What OpenTelemetry is told about one consumer; made by ``create``.

    No method blocks or raises, and all may be called from any thread. The calls that count are plain additions;
    everything else that can be counted is read from the consumer's status when metrics are collected.
    """

    def __init__(
        self,
        name: str,
        system: str,
        status: Callable[[], Status],
        tracer: Tracer | None,
        instruments: Instruments,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.tracer = tracer
        self._name = name
        self._instruments = instruments
        self._labels: Labels = {SYSTEM: system, CONSUMER: name}
        self._position_name = _POSITION_NAMES.get(system)
        self._partition_labels: dict[PartitionId, dict[str, str]] = {}
        self._reported = False
        self._reading = Reading(self._labels, status, clock)
        instruments.open(self._reading)

    @classmethod
    def create(
        cls, name: str, system: str, status: Callable[[], Status], *, clock: Clock = monotonic
    ) -> Telemetry | None:
        """Telemetry of the consumer ``name``; None when this process has configured no SDK.

        ``system``: the conventions' name of the broker's kind (``messaging.system``). ``status`` makes a snapshot;
        it is called on the thread that collects metrics. ``clock``: seconds, monotonic. Consumers that share a name
        share their series. What the process configures later is not noticed.
        """
        release = _VERSION
        tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
        tracer = None if _idle(tracers) else tracers.get_tracer("lanes", release)
        if tracer is not None and _idle(tracer):
            tracer = None
        metered = not _idle(meters) and not _idle(meters.get_meter("lanes", release))
        if tracer is None and not metered:
            return None
        instruments = instruments_of(meters, release) if metered else Instruments(NoOpMeter("lanes"))
        return cls(name, system, status, tracer, instruments, clock)

    def __repr__(self) -> str:
        return f"<Telemetry of {self._name}>"

    def close(self) -> None:
        """Let the gauges show nothing more, and let go of the consumer. Idempotent. Counting goes on working."""
        self._instruments.close(self._reading)

    # What is counted

    def consumed(self, partition: Partition, count: int) -> None:
        """``count`` messages of a partition were delivered, redelivered ones included; to be called once a run."""
        self._add(self._instruments.consumed, count, {**self.labels(partition), OPERATION_NAME: "receive"})

    def settled(self, partition: Partition, count: int) -> None:
        """The settlement of ``count`` messages of a partition was sent; to be called once a settlement."""
        self._add(self._instruments.settled, count, self.labels(partition))

    def retried(self, message: Message) -> None:
        """It failed and is held for another attempt."""
        self._add(self._instruments.retries, 1, self.labels(message.partition))

    def dead_lettered(self, message: Message) -> None:
        """Its dead letter was confirmed."""
        self._add(self._instruments.dead_letters, 1, self.labels(message.partition))

    def zombie(self, message: Message) -> None:
        """Its result came after its assignment was fenced, and changed nothing."""
        self._add(self._instruments.zombies, 1, self.labels(message.partition))

    def redelivered(self, message: Message, cause: str) -> None:
        """Its position came again; ``cause`` is one of ``lanes.core.effects.Redelivered``."""
        self._add(self._instruments.redelivered, 1, {**self.labels(message.partition), "lanes.cause": cause})

    # Handlers

    def handling(self, message: Message) -> Handling:
        """A context manager for one call of the handler with one message; see ``Handling``."""
        return Handling(self, (message,), batch=False)

    def handling_batch(self, messages: Sequence[Message]) -> Handling:
        """A context manager for one call of the handler with a batch: one span with a link to each message."""
        return Handling(self, messages, batch=True)

    # What a Handling needs

    def labels(self, partition: Partition) -> dict[str, str]:
        """The labels of all that concerns one partition. Not to be changed."""
        found = self._partition_labels.get(partition.id)
        if found is None:
            if len(self._partition_labels) >= _CACHED_PARTITIONS:
                self._partition_labels.clear()
            found = self._partition_labels[partition.id] = {**self._labels, **partition_labels(partition.id)}
        return found

    def common_labels(self, messages: Sequence[Message]) -> dict[str, str]:
        """The labels that all messages share."""
        partitions = {message.partition.id: message.partition for message in messages}
        if len(partitions) == 1:
            return self.labels(next(iter(partitions.values())))
        sources = {partition.source for partition in partitions}
        return {**self._labels, DESTINATION: sources.pop()} if len(sources) == 1 else {**self._labels}

    def place(self, message: Message) -> _Attributes:
        """Where a message stands: position, under the system's own name too, attempt and epoch."""
        place: _Attributes = {
            "lanes.position": message.position,
            "lanes.attempt": message.attempt,
            "lanes.epoch": message.epoch,
        }
        if self._position_name is not None:
            place[self._position_name] = message.position
        return place

    def record(self, seconds: float, labels: Labels, context: Context | None) -> None:
        """A handler took so long, in the span that ``context`` holds."""
        try:
            self._instruments.duration.record(seconds, {**labels, OPERATION_NAME: "process"}, context)
        except Exception as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Log the first failure of the SDK or of what is plugged into it."""
        if not self._reported:
            self._reported = True
            # Its type alone: its text may quote what it was given.
            log.warning(
                "%s: telemetry failed (%s), here and perhaps again; messages are handled all the same",
                self._name,
                _error_type(error),
            )

    def _add(self, counter: Counter, count: int, labels: Labels) -> None:
        try:
            counter.add(count, labels)
        except Exception as error:
            self.report(error)


class Handling:
    """One call of the handler: enter it around the call, then say by ``end`` how it went.

        with telemetry.handling(message) as handling:
            await handler(message)
        handling.end("ack")

    Inside the block the span is the current one. Enter and leave it in one task, or one thread. The duration is that
    of the block; the outcome may be known later, so leaving the block ends nothing: call ``end`` however it was left.
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
        # Both clocks here: a span that begins before its time would end before what happens in it.
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
        """The outcome is known; ``error`` is what the handler raised, of which the type is kept.

        Of a batch it is ``ack`` when every message was acknowledged, else the outcome of the first that was not.
        Idempotent; does nothing when the block was never entered.
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
            # Not the wall clock: the span and the measurement are then equal, whatever somebody does to that clock.
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
            # A span around the whole run is no parent of each message, but not to be lost.
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
        """The context in a message's headers, by the process's propagators; empty when there is none to be had."""
        try:
            # Not into the current context, which is that of whoever called run().
            return propagate.extract(message.headers, Context(), _HEADERS)
        except Exception as error:
            self._telemetry.report(error)
            return Context()


class _HeaderGetter(Getter[_Headers]):
    """Looks into the headers of a message, which anybody may have written."""

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


def _idle(part: object) -> bool:
    """Whether it comes with the API itself, which has nothing but proxies and no-ops."""
    return type(part).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))


def _error_type(error: BaseException) -> str:
    """The exception's type with its module, bounded."""
    try:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return name[:ERROR_TYPE_LIMIT].encode(errors="backslashreplace").decode()
    except Exception:
        # A metaclass may answer for its names with anything.
        return "_OTHER"
