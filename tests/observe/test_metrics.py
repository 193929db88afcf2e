"""Metrics equal the status, metrics and spans export no user data, and docs/reference/telemetry.md lists all."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from pathlib import Path

import pytest

from lanes import Status
from lanes.errors import LanesError
from lanes.observe.instruments import GAUGES
from lanes.observe.otel import Telemetry
from tests.fakes.telemetry import (
    CANARY,
    CONSUMER_LABELS,
    LABELS,
    TRACEPARENT,
    Sdk,
    count_everything,
    handle,
    message,
    status,
)

# --- metrics

WHOLE = {
    "lanes.in_flight.messages": "in_flight",
    "lanes.in_flight.max_messages": "max_in_flight",
    "lanes.in_flight.bytes": "in_flight_bytes",
    "lanes.in_flight.max_bytes": "max_in_flight_bytes",
    "lanes.running": "running",
    "lanes.concurrency": "concurrency",
    "lanes.ready": "ready",
    "lanes.held": "held",
    "lanes.blocked": "blocked",
    "lanes.parking": "parking",
    "lanes.publishing": "publishing",
    "lanes.publish_held": "publish_held",
    "lanes.publishing.bytes": "publishing_bytes",
    "lanes.taking": "taking",
    "lanes.paused": "paused",
    "lanes.under_provisioned": "under_provisioned",
    "lanes.outage": "outage",
}


def in_partition(number: int) -> dict[str, str]:
    return LABELS | {"messaging.destination.partition.id": str(number)}


@pytest.mark.parametrize(("gauge", "field"), WHOLE.items())
def test_a_gauge_equals_the_status(sdk: Sdk, gauge: str, field: str) -> None:
    now = [status()]
    telemetry = sdk.telemetry(lambda: now[0])
    assert sdk.numbers(gauge) == [(getattr(now[0], field), CONSUMER_LABELS)]
    now[0] = status(**{field: 0})
    assert sdk.numbers(gauge) == [(0, CONSUMER_LABELS)]
    telemetry.close()


def test_a_source_that_reports_no_outage_has_no_gauge_for_it(sdk: Sdk) -> None:
    sdk.telemetry(lambda: status(outage=None))
    assert sdk.numbers("lanes.outage") == []
    assert sdk.numbers("lanes.running")


BY_PARTITION = {
    "lanes.floor": [(903, in_partition(3)), (905, in_partition(5))],
    "lanes.holes": [(913, in_partition(3)), (915, in_partition(5))],
    # The other source settles each message.
    "lanes.confirmed": [(890, in_partition(3))],
    "lanes.ahead": [(17, in_partition(3))],
    # The other source does not know its lag, and every message here is finished.
    "lanes.lag": [(23, in_partition(3))],
    "lanes.oldest.age": [(12.5, in_partition(5))],
    "lanes.oldest.attempt": [(7, in_partition(5))],
    "lanes.oldest.position": [(950, in_partition(5))],
    "lanes.expiring.left": [(13.5, in_partition(5))],
}


@pytest.mark.parametrize(("gauge", "values"), BY_PARTITION.items())
def test_a_gauge_has_a_value_for_each_partition(
    sdk: Sdk, gauge: str, values: list[tuple[float, dict[str, str]]]
) -> None:
    sdk.telemetry()
    assert sdk.numbers(gauge) == values


@pytest.mark.parametrize("gauge", ["age", "attempt", "position"])
def test_without_an_unfinished_message_the_oldest_has_no_value(sdk: Sdk, gauge: str) -> None:
    now = [status()]
    sdk.telemetry(lambda: now[0])
    assert len(sdk.numbers(f"lanes.oldest.{gauge}")) == 1
    now[0] = status(partitions={})
    assert sdk.numbers(f"lanes.oldest.{gauge}") == []
    assert sdk.numbers("lanes.expiring.left") == []


def test_stranded_messages_are_counted_by_physical_queue(sdk: Sdk) -> None:
    sdk.telemetry()
    labels = CONSUMER_LABELS | {"lanes.queue.name": "orders"}
    assert sdk.numbers("lanes.stranded") == [
        (970, labels | {"messaging.destination.name": "orders__p2"}),
        (971, labels | {"messaging.destination.name": "orders__p3"}),
    ]


def test_kept_messages_are_counted_by_log_and_slowest_subscription(sdk: Sdk) -> None:
    now = [status(kept=None)]
    sdk.telemetry(lambda: now[0])
    assert sdk.numbers("lanes.kept.bytes") == []
    now[0] = status()
    labels = CONSUMER_LABELS | {"messaging.destination.name": "orders", "lanes.subscription": "mail"}
    assert sdk.numbers("lanes.kept.bytes") == [(980, labels)]


def test_messages_without_an_owner_are_counted_for_a_source_with_ranges(sdk: Sdk) -> None:
    now = [status(unowned=None)]
    sdk.telemetry(lambda: now[0])
    assert sdk.numbers("lanes.unowned") == []
    now[0] = status(unowned=7)
    assert sdk.numbers("lanes.unowned") == [(7, CONSUMER_LABELS)]


def test_every_gauge_is_tested_here() -> None:
    others = {"lanes.stranded", "lanes.kept.bytes", "lanes.unowned"}
    assert {gauge.name for gauge in GAUGES} == {*WHOLE, *BY_PARTITION, *others}


def test_each_counter_counts_its_events(sdk: Sdk) -> None:
    telemetry, one = sdk.telemetry(), message()
    telemetry.consumed(one.partition, 500)
    telemetry.consumed(one.partition, 11)
    telemetry.settled(one.partition, 300)
    telemetry.retried(one)
    telemetry.dead_lettered(one)
    telemetry.outputs(one.partition, 3)
    telemetry.publish_failed(one)
    telemetry.zombie(one)
    for cause in ("held", "held", "late"):
        telemetry.redelivered(one, cause)
    telemetry.close()
    telemetry.settled(one.partition, 7)
    received = LABELS | {"messaging.operation.name": "receive"}
    assert sdk.numbers("messaging.client.consumed.messages") == [(511, received)]
    assert sdk.numbers("lanes.settled") == [(307, LABELS)]
    once = ("retries", "dead_letters", "output_failures", "zombies")
    assert [sdk.numbers(f"lanes.{name}") for name in once] == [[(1, LABELS)]] * 4
    assert sdk.numbers("lanes.outputs") == [(3, LABELS)]
    assert sdk.numbers("lanes.redelivered") == [
        (2, LABELS | {"lanes.cause": "held"}),
        (1, LABELS | {"lanes.cause": "late"}),
    ]


def test_one_collection_takes_one_snapshot(sdk: Sdk) -> None:
    taken = []
    sdk.telemetry(lambda: taken.append(1) or status())  # type: ignore[func-returns-value]
    sdk.metrics()
    assert len(taken) == 1
    sdk.metrics()
    assert len(taken) == 2


def test_an_old_snapshot_is_not_shown_later(sdk: Sdk) -> None:
    now, taken = [0.0], [status(ready=1)]
    telemetry = Telemetry.create("billing", "kafka", lambda: taken[0], clock=lambda: now[0])
    assert telemetry is not None
    # An exporter may read a single gauge.
    (reading,) = [one for one in telemetry._instruments._open if one is telemetry._reading]
    gauges = {gauge.name: gauge for gauge in GAUGES}
    reading.observations(gauges["lanes.held"])
    taken[0], now[0] = status(ready=2), 60.0
    assert [one.value for one in reading.observations(gauges["lanes.ready"])] == [2]
    taken[0] = status(ready=3)
    reading.observations(gauges["lanes.held"])
    assert [one.value for one in reading.observations(gauges["lanes.ready"])] == [3]
    reading.observations(gauges["lanes.held"])
    taken[0] = status(held=4)
    assert [one.value for one in reading.observations(gauges["lanes.held"])] == [4]


def test_consumers_of_one_process_share_the_instruments(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    first = sdk.telemetry(lambda: status(ready=1), "first")
    second = sdk.telemetry(lambda: status(ready=2), "second")

    def shown() -> dict[object, float]:
        return {labels["lanes.consumer"]: value for value, labels in sdk.numbers("lanes.ready")}

    assert shown() == {"first": 1, "second": 2}
    first.close()
    first.close()
    assert shown() == {"second": 2}
    second.close()
    assert shown() == {}
    sdk.telemetry(lambda: status(ready=3), "third")
    assert shown() == {"third": 3}
    assert caplog.records == []


def test_a_closed_telemetry_releases_the_consumer(sdk: Sdk) -> None:
    class Consumer:
        def status(self) -> Status:
            return status()

    consumer = Consumer()
    gone = weakref.ref(consumer)
    telemetry = sdk.telemetry(consumer.status)
    assert sdk.numbers("lanes.ready")
    del consumer
    assert gone() is not None
    telemetry.close()
    gc.collect()
    assert gone() is None
    assert sdk.numbers("lanes.ready") == []


def test_a_consumer_that_closes_during_a_reading_is_released(sdk: Sdk) -> None:
    holder: list[Telemetry] = []

    def closing() -> Status:
        holder[0].close()
        return status()

    holder.append(sdk.telemetry(closing))
    sdk.metrics()
    assert holder[0]._reading._snapshot is None


@pytest.mark.parametrize("error", [LanesError("not started"), RuntimeError("changed size"), MemoryError()])
def test_a_failing_status_shows_nothing_and_raises_nothing(
    sdk: Sdk, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Status:
        raise error

    sdk.telemetry(failing, "failing")
    sdk.telemetry(name="well")
    assert sdk.numbers("lanes.ready") == [(status().ready, CONSUMER_LABELS | {"lanes.consumer": "well"})]
    # The SDK logs the errors of callbacks.
    assert caplog.records == []


def test_a_disturbed_status_is_taken_again(sdk: Sdk) -> None:
    failures = [RuntimeError("dictionary changed size during iteration")] * 2

    def disturbed() -> Status:
        if failures:
            raise failures.pop()
        return status()

    sdk.telemetry(disturbed)
    assert sdk.metrics().keys() == {gauge.name for gauge in GAUGES}


def test_a_counter_that_raises_is_survived(
    sdk: Sdk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = sdk.telemetry()

    def fail(*_: object) -> None:
        raise ValueError(CANARY)

    monkeypatch.setattr(telemetry._instruments.settled, "add", fail)
    monkeypatch.setattr(telemetry._instruments.duration, "record", fail)
    telemetry.settled(message().partition, 1)
    handle(telemetry, message())
    assert caplog.text.count("telemetry failed (ValueError)") == 1
    assert CANARY not in caplog.text
    assert sdk.span().end_time is not None


# --- nothing of the user's


def test_no_key_payload_header_subject_or_error_text_is_exported(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    telemetry = sdk.telemetry()
    key = CANARY.encode()
    headers = [TRACEPARENT, ("who", key), (CANARY, b"1"), ("traceparent", key)]
    handling = telemetry.handling(message(headers, key=key))
    with pytest.raises(ValueError, match=CANARY) as raised, handling:
        raise ValueError(CANARY)
    handling.end("dead_letter", raised.value)
    handle(telemetry, message(headers, key=key), message(headers, key=key), result="retry", error=KeyError(CANARY))
    one = message(headers, key=key)
    count_everything(telemetry, one)
    data = sdk.reader.get_metrics_data()
    assert data is not None
    spans = [span.to_json() for span in sdk.spans()]
    everything = "".join([*spans, data.to_json(), repr(telemetry), repr(handling), caplog.text])
    assert len(spans) == 2 and "lanes.oldest.age" in everything and "lanes.key.hash" in everything
    assert CANARY not in everything
    # Metrics have no hash of a key, and a position only as a value.
    labels = {
        name
        for metric in sdk.metrics().values()
        for point in metric.data.data_points
        for name in point.attributes or {}
    }
    assert labels == {
        *LABELS,
        "messaging.operation.name",
        "lanes.outcome",
        "lanes.cause",
        "lanes.queue.name",
        "lanes.subscription",
        "error.type",
    }


# --- the page


def test_the_page_lists_what_is_exported(sdk: Sdk) -> None:
    telemetry, one = sdk.telemetry(), message()
    count_everything(telemetry, one)
    handle(telemetry, one)
    kinds = {"Sum": "counter", "Gauge": "gauge", "Histogram": "histogram"}
    exported = {
        (name, kinds[type(metric.data).__name__], metric.unit, frozenset(metric.data.data_points[0].attributes or {}))
        for name, metric in sdk.metrics().items()
    }
    page = (Path(__file__).parents[2] / "docs" / "reference" / "telemetry.md").read_text()
    short = {"consumer": CONSUMER_LABELS.keys(), "partition": LABELS.keys()}
    listed = set()
    for name, kind, unit, labels in re.findall(
        r"^\| `([a-z._]+)` \| (\w+) \| `([^`]+)` \| ([^|]+) \|", page, re.MULTILINE
    ):
        where, *more = labels.split(", ")
        listed.add(
            (name, kind, unit, frozenset(short[where] | {label.strip("`") for label in more if "error" not in label}))
        )
    assert listed == exported
    attributes = set((sdk.span().attributes or {}).keys()) | {"error.type", "messaging.batch.message_count"}
    attributes |= {"lanes.queue.name", "lanes.queue.partition"}  # tests/observe/test_queue_labels.py
    spans = page.partition("## Spans")[2].partition("\n## ")[0]
    assert attributes == set(re.findall(r"^\| `([a-z._]+)` \|", spans, re.MULTILINE))


def test_the_help_of_lanes_ready_says_that_it_counts_lanes() -> None:
    (ready,) = [gauge for gauge in GAUGES if gauge.name == "lanes.ready"]
    assert ready.description == "Lanes that wait for a worker; not the readiness of the consumer."
