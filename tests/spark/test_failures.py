"""The user gets the innermost error of a failed Spark job, with the remedy."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from py4j import protocol  # type: ignore[import-untyped]

import lanes
from lanes_spark.failures import as_ours, crossing, mapped_errors
from lanes_spark.tables.kafka_topic import _broker_errors

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "task.py", line 133, in _next
    raise event.error
{raised}
"""
STREAM = """[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach batch sink.
py4j.protocol.Py4JJavaError: An error occurred while calling o3011.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 112.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2935)
Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).
\tat org.apache.spark.api.python.BasePythonRunner.apply(PythonRunner.scala:624)
Caused by: java.io.EOFException
"""


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (WORKER.format(raised="lanes.errors.HandlerHalted: it failed"), lanes.HandlerHalted, "it failed"),
        (WORKER.format(raised="lanes.errors.SourceError: gone"), lanes.SourceError, "gone"),
        (
            STREAM + "lanes.errors.ConfigError: first\n: lanes.errors.ConfigError: set it\n",
            lanes.ConfigError,
            "set it",
        ),
        (WORKER.format(raised="KeyError: 'host'"), lanes.SourceError, "orders: Spark failed: X: KeyError: 'host'"),
        (
            WORKER.format(raised="psycopg.OperationalError: no") + "\nCaused by: a.PythonException: Traceback (most\n",
            lanes.SourceError,
            "orders: Spark failed: X: psycopg.OperationalError: no",
        ),
        (
            STREAM,
            lanes.SourceError,
            "orders: Spark failed: X: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).",
        ),
        ("[PATH_NOT_FOUND] Path does not exist\nmore", lanes.SourceError, "orders: Spark failed: X: [PATH_NOT_FOUND] "),
        ("", lanes.SourceError, "orders: Spark failed: X: no text"),
    ],
    ids=range(8),
)
def test_the_innermost_error_is_reported(text: str, kind: type[lanes.LanesError], told: str) -> None:
    error = as_ours("orders", "X", text)
    assert type(error) is kind
    assert str(error).startswith(told)


@pytest.mark.parametrize(
    "raised",
    [
        lanes.SourceError("no broker", retryable=True),
        lanes.SourceError("no broker"),
        lanes.SourceError('two\nlines, "quoted" \\ é %41 ;', retryable=True),
        lanes.ConfigError("set it\nlanes.errors.SourceError: not this"),
        lanes.HandlerHalted(""),
    ],
    ids=range(5),
)
def test_an_error_of_a_worker_keeps_its_type_and_text(raised: lanes.LanesError) -> None:
    with pytest.raises(lanes.LanesError) as crossed, crossing():
        raise raised
    text = "".join(traceback.format_exception(crossed.value))
    found = as_ours("orders", "X", STREAM + text + "\nDriver stacktrace:\n" + STREAM)
    assert (type(found), str(found)) == (type(raised), str(raised).replace("\n", " "))
    assert getattr(found, "retryable", None) == getattr(raised, "retryable", None)


@pytest.mark.parametrize("carried", [repr, json.dumps, ascii, lambda text: text.replace("\n", "\\n"), "{}…".format])
@pytest.mark.parametrize("told", ["", "no é, 'so' (~50% [at] k=a;b/c+d@e_f-g)"])
def test_an_error_of_a_worker_is_recognized_in_any_escaped_form(carried: Callable[[str], str], told: str) -> None:
    raised = lanes.SourceError(told, retryable=True)
    with pytest.raises(lanes.SourceError) as crossed, crossing():
        raise raised
    text = "".join(traceback.format_exception(crossed.value))
    for escaped in (carried(text), carried(text.rstrip("\n")), carried(carried(text))):
        found = as_ours("orders", "X", f"Job aborted: {escaped} of a task")
        assert (type(found), str(found)) == (lanes.SourceError, told)
        assert getattr(found, "retryable", None)


@pytest.mark.parametrize("gone", ["Py4JError", "Py4JNetworkError", "ConnectionRefusedError"])
def test_a_lost_jvm_is_reported_with_the_remedy(gone: str) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    error = refused if gone == "ConnectionRefusedError" else getattr(protocol, gone)("no answer")
    told = rf"orders: Spark failed: {gone}: .*; the JVM of the driver was killed"
    with pytest.raises(lanes.SourceError, match=told), mapped_errors("orders"):
        raise error


class JavaClassOf:
    """The fake class of a Java exception, and its base classes."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def getSimpleName(self) -> str:  # noqa: N802
        return self._names[0]

    def getSuperclass(self) -> JavaClassOf | None:  # noqa: N802
        return JavaClassOf(*self._names[1:]) if self._names[1:] else None


class FromBroker(protocol.Py4JJavaError):  # type: ignore[misc]
    """An exception of py4j, without a JVM."""

    def __init__(self, *names: str) -> None:
        Exception.__init__(self)
        raised = SimpleNamespace(
            getCause=lambda: None, getMessage=lambda: "s3cret no", getClass=lambda: JavaClassOf(*names)
        )
        self.java_exception = raised


@pytest.mark.parametrize(
    ("names", "passes"),
    [
        (("TimeoutException", "RetriableException", "ApiException"), True),
        (("DisconnectException", "RetriableException", "ApiException"), True),
        (("TimeoutException", "Exception"), True),
        (("UnknownTopicOrPartitionException", "InvalidMetadataException", "RetriableException"), False),
        (("TopicAuthorizationException", "AuthorizationException", "ApiException"), False),
    ],
)
def test_transient_errors_of_brokers_are_retryable(names: tuple[str, ...], passes: bool) -> None:
    client = {"bootstrap.servers": "h:1", "sasl.password": "s3cret"}
    with (
        pytest.raises(lanes.SourceError, match=f"orders: Kafka at h:1: {names[0]}: … no") as said,
        _broker_errors("orders", client),
    ):
        raise FromBroker(*names)
    assert said.value.retryable is passes
