"""The span context in untrusted headers is bounded, and no header stops a handler."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import propagate
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.textmap import TextMapPropagator

from lanes.observe.otel import HEADER_REPEAT_LIMIT, HEADER_VALUE_LIMIT
from tests.fakes.telemetry import (
    CANARY,
    PARENT,
    TRACE,
    TRACEPARENT,
    Headers,
    Sdk,
    handle,
    message,
)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", b"")],
        [("traceparent", b"00-xyz")],
        [("traceparent", TRACEPARENT[1] + b"-more")],
        [("traceparent", f"ff-{TRACE}-{PARENT}-01".encode())],
        [("traceparent", f"00-{'0' * 32}-{PARENT}-01".encode())],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01".encode())],
        [("traceparent", TRACEPARENT[1].decode().encode("utf-16"))],
        [("traceparent", b"\xff\xfe" + TRACEPARENT[1])],
        [("traceparent", TRACEPARENT[1] + b" " * HEADER_VALUE_LIMIT)],
        [("traceparent", None)],
        [(None, b"")],
        [("", b""), ("tracestate", b"\x00")],
        [("baggage", b"=;,=\xff")],
        ["no pair"],
        None,
        UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
    ],
    ids=lambda headers: repr(headers)[:40],
)
def test_headers_without_a_context_start_a_new_trace(sdk: Sdk, headers: object) -> None:
    handle(sdk.telemetry(), message(headers))
    assert sdk.span().parent is None


@pytest.mark.parametrize("name", ["x", "traceparent", "tracestate", "baggage"])
def test_the_context_is_found_among_ten_thousand_headers(sdk: Sdk, name: str) -> None:
    many = [(name, b"k=v")] * 10_000
    handle(sdk.telemetry(), message([TRACEPARENT, *many]))
    handle(sdk.telemetry(), message([*many, TRACEPARENT]))
    first, last = sdk.spans()
    assert first.parent is not None
    # The span context is found after ten thousand headers of other names, but not after as many of the same name.
    assert (last.parent is None) == (name == "traceparent")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    headers=st.lists(
        st.tuples(st.sampled_from(["traceparent", "tracestate", "baggage"]) | st.text(), st.binary(max_size=200))
    )
)
def test_no_headers_stop_a_handler(sdk: Sdk, headers: Headers) -> None:
    sdk.exporter.clear()
    handle(sdk.telemetry(), message(headers))
    assert sdk.span().name == "process ORDERS/EU"


class Asking(TextMapPropagator):
    """A propagator that reads one header under another letter case, and records the results."""

    def __init__(self) -> None:
        self.told: list[str] | None = []
        self.names: list[str] = []

    def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
        self.told = getter.get(carrier, "X-Amzn-Trace-Id")
        self.names = getter.keys(carrier)
        return context

    def inject(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def fields(self) -> set[str]:
        return set()


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ([("x-amzn-trace-id", b"1"), ("X-AMZN-TRACE-ID", b"2"), ("x-amzn-trace", b"3")], ["1", "2"]),
        ([("x-amzn-trace-id", "é".encode()), ("x-amzn-trace-id", b"\xff")], None),
        ([("x-amzn-trace-id", b"1" * HEADER_VALUE_LIMIT)], ["1" * HEADER_VALUE_LIMIT]),
        ([("x-amzn-trace-id", b"1" * (HEADER_VALUE_LIMIT + 1))], None),
        ([("x-amzn-trace-id", b"1")] * 10_000, ["1"] * HEADER_REPEAT_LIMIT),
    ],
    ids=["any case", "not ASCII", "long", "too long", "too often"],
)
def test_any_propagator_gets_the_headers_within_bounds(
    sdk: Sdk, monkeypatch: pytest.MonkeyPatch, headers: Headers, told: list[str] | None
) -> None:
    asking = Asking()
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", asking)
    handle(sdk.telemetry(), message(headers))
    assert asking.told == told
    assert asking.names == [name for name, _ in headers]


def test_a_propagator_starts_from_nothing(sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    # A propagator that extends its context would make the span around run() the parent of every message.
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", W3CBaggagePropagator())
    telemetry = sdk.telemetry()
    with sdk.tracers.get_tracer("the application").start_as_current_span("main"):
        handle(telemetry, message([("baggage", b"k=v")]))
    assert sdk.spans()[0].parent is None


def test_a_propagator_that_raises_is_survived(
    sdk: Sdk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Asking):
        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
            raise ValueError(CANARY)

    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", Broken())
    telemetry = sdk.telemetry()
    handle(telemetry, message([TRACEPARENT]))
    handle(telemetry, message([TRACEPARENT]))
    assert [span.parent for span in sdk.spans()] == [None, None]
    assert [record.message for record in caplog.records] == [
        (
            "billing: telemetry failed (ValueError); check the OpenTelemetry setup. Later errors are not logged, and "
            "messages are handled as before"
        )
    ]
