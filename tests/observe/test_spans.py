"""A handler runs in a span with the right parent, and no error of telemetry stops it."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

from lanes.errors import LanesError
from lanes.observe.instruments import DURATION_BUCKETS
from lanes.observe.otel import Result, Telemetry
from tests.fakes.telemetry import (
    CANARY,
    KEY_HASH,
    LABELS,
    PARENT,
    TRACE,
    TRACEPARENT,
    Sdk,
    handle,
    message,
    status,
    use,
)

# --- off


def test_without_an_sdk_there_is_no_telemetry() -> None:
    assert Telemetry.create("billing", "kafka", status) is None


def test_no_op_providers_export_no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, trace.NoOpTracerProvider(), metrics.NoOpMeterProvider())
    assert Telemetry.create("billing", "kafka", status) is None


def test_a_disabled_sdk_exports_no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    use(monkeypatch, TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False))
    assert Telemetry.create("billing", "kafka", status) is None


def test_metrics_alone_read_no_headers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = Sdk()
    use(monkeypatch, meters=made.meters)
    before = context.get_current()
    with made.telemetry().handling(message(AssertionError("headers were read"))) as handling:
        assert context.get_current() is before
    handling.end("ack")
    assert caplog.records == []
    assert "messaging.process.duration" in made.metrics()
    made.shutdown()


def test_traces_work_without_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sdk()
    use(monkeypatch, tracers=made.tracers)
    telemetry = made.telemetry()
    handle(telemetry, message())
    telemetry.settled(message().partition, 1)
    assert made.span().name == "process ORDERS/EU"
    assert made.metrics() == {}


# --- spans


def test_a_span_names_the_message(sdk: Sdk) -> None:
    handle(sdk.telemetry(), message())
    span = sdk.span()
    assert (span.name, span.kind, span.status.status_code) == ("process ORDERS/EU", SpanKind.CONSUMER, StatusCode.UNSET)
    assert dict(span.attributes or {}) == LABELS | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.kafka.offset": 77,
        "lanes.position": 77,
        "lanes.attempt": 2,
        "lanes.epoch": 4,
        "lanes.key.hash": KEY_HASH,
        "lanes.outcome": "ack",
    }
    assert span.instrumentation_scope is not None and span.instrumentation_scope.name == "lanes"


def test_a_span_has_the_position_under_the_name_of_its_system_too(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    handle(sdk.telemetry(system="nats"), message(key=None))
    attributes = sdk.span().attributes or {}
    assert attributes["lanes.position"] == 77
    assert not {"messaging.kafka.offset", "lanes.key.hash"} & attributes.keys()
    # The SDK logs invalid attributes.
    assert caplog.records == []


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_the_parent_is_in_the_headers(sdk: Sdk, name: str) -> None:
    handle(sdk.telemetry(), message([("x", b"1"), (name, TRACEPARENT[1]), ("tracestate", b"vendor=1")]))
    span = sdk.span()
    assert span.parent is not None and span.context is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.parent.is_remote
    assert span.context.trace_state.get("vendor") == "1"


def test_the_span_around_run_is_linked_but_no_parent(sdk: Sdk) -> None:
    telemetry = sdk.telemetry()
    with sdk.tracers.get_tracer("the application").start_as_current_span("main") as main:
        handle(telemetry, message())
    handled = sdk.spans()[0]
    assert handled.parent is None
    assert [link.context for link in handled.links] == [main.get_span_context()]


def test_an_unsampled_trace_stays_unsampled(sdk: Sdk) -> None:
    with sdk.telemetry().handling(message([("traceparent", TRACEPARENT[1][:-1] + b"0")])) as handling:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
    handling.end("ack")
    assert sdk.spans() == ()
    assert carrier["traceparent"].startswith(f"00-{TRACE}-")
    assert carrier["traceparent"].endswith("-00")


@pytest.mark.parametrize("hook", ["on_start", "on_end"])
def test_a_span_processor_that_raises_is_survived(
    sdk: Sdk, hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(CANARY)

    processor = SpanProcessor()
    monkeypatch.setattr(processor, hook, fail)
    sdk.tracers.add_span_processor(processor)
    before = context.get_current()
    with sdk.telemetry().handling(message()) as handling:
        pass
    handling.end("ack")
    assert context.get_current() is before
    assert "telemetry failed (ValueError)" in caplog.text
    assert CANARY not in caplog.text
    assert "messaging.process.duration" in sdk.metrics()


# --- how it ended


@pytest.mark.parametrize(
    ("result", "error", "kind"),
    [
        ("ack", None, None),
        ("retry", ValueError(CANARY), "ValueError"),
        ("dead_letter", LanesError(CANARY), "lanes.errors.LanesError"),
        ("error", KeyboardInterrupt(), "KeyboardInterrupt"),
        ("error", None, "_OTHER"),
        ("cancelled", anyio.ClosedResourceError(), None),
        ("abandoned", None, None),
    ],
)
def test_an_outcome_is_in_the_span_and_in_the_duration(
    sdk: Sdk, result: Result, error: BaseException | None, kind: str | None
) -> None:
    handle(sdk.telemetry(), message(), result=result, error=error)
    span = sdk.span()
    attributes = span.attributes or {}
    expected = {"lanes.outcome": result} | ({} if kind is None else {"error.type": kind})
    assert {name: attributes[name] for name in ("lanes.outcome", "error.type") if name in attributes} == expected
    assert (span.status.status_code == StatusCode.ERROR) == (kind is not None)
    assert span.events == ()
    _, point = sdk.duration()
    assert dict(point.attributes or {}) == LABELS | {"messaging.operation.name": "process"} | expected


def test_the_name_of_an_exception_is_bounded_and_can_be_exported(sdk: Sdk) -> None:
    class Hostile(type):
        def __getattribute__(cls, name: str) -> Any:
            if name == "__qualname__":
                raise RuntimeError(CANARY)
            return super().__getattribute__(name)

    hostile = Hostile("Hostile", (Exception,), {})
    long = type("X" * 10_000, (Exception,), {"__module__": "builtins"})
    lone = type("Lone", (Exception,), {"__module__": "\ud800"})
    telemetry = sdk.telemetry()
    for kind in (hostile, long, lone):
        handle(telemetry, message(), result="error", error=kind())
    assert [span.attributes["error.type"] for span in sdk.spans() if span.attributes] == [
        "_OTHER",
        "X" * 200,
        "\\ud800.Lone",
    ]


def test_the_duration_is_that_of_the_block_and_equals_the_span(sdk: Sdk) -> None:
    now = 10.0
    telemetry = Telemetry.create("billing", "kafka", status, clock=lambda: now)
    assert telemetry is not None
    with telemetry.handling(message()) as handling:
        now = 12.25
    now = 99.0
    handling.end("ack")
    span = sdk.span()
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time == 2_250_000_000
    telemetry.close()
    duration, point = sdk.duration()
    assert (point.count, point.sum, duration.unit) == (1, 2.25, "s")
    assert tuple(point.explicit_bounds) == DURATION_BUCKETS
    # The measurement leads to its trace.
    assert span.context is not None
    assert [exemplar.trace_id for exemplar in point.exemplars] == [span.context.trace_id]


def test_events_in_the_block_lie_within_the_span(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    class Slow(SpanProcessor):
        def on_start(self, *_: Any, **__: Any) -> None:
            nonlocal now
            now += 10.0

    sdk.tracers.add_span_processor(Slow())
    monkeypatch.setattr("lanes.observe.otel.time.time_ns", lambda: int(now * 1e9))
    telemetry = Telemetry.create("billing", "kafka", status, clock=lambda: now)
    assert telemetry is not None
    with telemetry.handling(message()) as handling:
        trace.get_current_span().add_event("booked", timestamp=int(now * 1e9))
    handling.end("ack")
    span = sdk.span()
    assert span.start_time is not None and span.end_time is not None
    assert span.start_time <= span.events[0].timestamp <= span.end_time


def test_a_span_ends_at_the_first_end_of_its_handling(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    handling = sdk.telemetry().handling(message())
    with pytest.raises(ValueError, match="no"), handling:
        raise ValueError("no")
    assert sdk.spans() == ()
    handling.end("retry", ValueError("no"))
    handling.end("ack")
    assert (sdk.span().attributes or {})["lanes.outcome"] == "retry"
    assert caplog.records == []


def test_a_handling_that_never_began_ends_nothing(sdk: Sdk) -> None:
    sdk.telemetry().handling(message()).end("cancelled")
    assert sdk.spans() == ()
    assert "messaging.process.duration" not in sdk.metrics()


@pytest.mark.anyio
async def test_a_handler_runs_in_its_own_span_and_baggage(sdk: Sdk) -> None:
    telemetry = sdk.telemetry()
    seen: dict[int, tuple[int, object]] = {}
    inside = [anyio.Event(), anyio.Event()]

    async def run(number: int) -> None:
        before = context.get_current()
        with telemetry.handling(message([("baggage", f"who=w{number}".encode())], position=number)) as handling:
            inside[number].set()
            await inside[1 - number].wait()
            await anyio.lowlevel.checkpoint()
            seen[number] = (trace.get_current_span().get_span_context().span_id, baggage.get_baggage("who"))
        handling.end("ack")
        assert context.get_current() is before

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, 0)
        tasks.start_soon(run, 1)
    exported = {(span.attributes or {})["lanes.position"]: span.context.span_id for span in sdk.spans() if span.context}
    assert seen == {number: (exported[number], f"w{number}") for number in (0, 1)}


@pytest.mark.anyio
async def test_a_cancelled_handler_leaves_its_span(sdk: Sdk) -> None:
    before = context.get_current()
    handling = sdk.telemetry().handling(message())
    with anyio.CancelScope() as scope:
        with handling:
            scope.cancel()
            await anyio.sleep_forever()
    assert context.get_current() is before
    handling.end("cancelled")
    assert sdk.span().status.status_code == StatusCode.UNSET


# --- batches


def test_a_batch_is_one_span_with_a_link_to_each_context(sdk: Sdk) -> None:
    other = f"00-{TRACE}-{PARENT[::-1]}-01".encode()
    first, second = message([TRACEPARENT], position=1), message([("traceparent", other)], position=9)
    handle(sdk.telemetry(), first, message(position=5), second)
    span = sdk.span()
    assert (span.parent, span.kind, span.name) == (None, SpanKind.CONSUMER, "process ORDERS/EU")
    assert [f"{link.context.span_id:016x}" for link in span.links] == [PARENT, PARENT[::-1]]
    assert [(link.attributes or {})["lanes.position"] for link in span.links] == [1, 9]
    attributes = span.attributes or {}
    assert attributes["messaging.batch.message_count"] == 3
    assert attributes["messaging.destination.partition.id"] == "3"
    assert not {"lanes.position", "lanes.key.hash"} & attributes.keys()


def test_a_batch_of_one_message_has_the_span_of_a_batch(sdk: Sdk) -> None:
    with sdk.telemetry().handling_batch([message([TRACEPARENT])]) as handling:
        pass
    handling.end("ack")
    assert sdk.span().parent is None
    assert len(sdk.span().links) == 1


def test_a_batch_has_the_labels_its_messages_share(sdk: Sdk) -> None:
    telemetry = sdk.telemetry()
    handle(telemetry, message(number=1), message(number=2))
    handle(telemetry, message(source="A"), message(source="B"))
    one_topic, two_topics = sdk.spans()
    assert (one_topic.name, two_topics.name) == ("process ORDERS/EU", "process")
    assert (one_topic.attributes or {})["messaging.destination.name"] == "ORDERS/EU"
    assert "messaging.destination.partition.id" not in (one_topic.attributes or {})
    assert "messaging.destination.name" not in (two_topics.attributes or {})
