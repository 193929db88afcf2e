"""Which positions a Kafka topic has, asked by the Java client that Spark's connector brings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from lanes.errors import ConfigError, SourceError
from lanes_spark.positions import Span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["read_watermarks"]

_TIMEOUT: Final = 30
"""Seconds that the brokers have for each answer."""

_LIMIT: Final = 300
"""Characters of what the client says that are kept."""

_SECRET: Final = re.compile(r"password|secret|jaas|token|\.key$|credential", re.IGNORECASE)


def read_watermarks(spark: SparkSession, topic: str, client: Mapping[str, str]) -> dict[int, Span]:
    """By partition the first position, and the one behind the last that may be read at this isolation level.

    ``client``: settings of the Java client. Blocks, about a minute at most unless its timeouts say otherwise.

    Raises ``ConfigError`` where there is no JVM or no connector, ``SourceError`` for what the brokers say; values of
    secret settings are left out.
    """
    jvm = _jvm(spark)
    kafka = jvm.org.apache.kafka
    settings = jvm.java.util.Properties()
    if "request.timeout.ms" not in client:
        # The client refuses a shorter one than that of a request.
        settings.setProperty("default.api.timeout.ms", str(_TIMEOUT * 1_000))
    for name, value in client.items():
        if name != "isolation.level":
            settings.setProperty(name, value)
    seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
    with _mapped(topic, client):
        admin = kafka.clients.admin.AdminClient.create(settings)
        try:
            names = jvm.java.util.ArrayList()
            names.add(topic)
            described = admin.describeTopics(names).allTopicNames().get(_TIMEOUT, seconds).get(topic)
            partitions = [
                kafka.common.TopicPartition(topic, described.partitions().get(number).partition())
                for number in range(described.partitions().size())
            ]
            committed = client.get("isolation.level") == "read_committed"
            level = getattr(kafka.common.IsolationLevel, "READ_COMMITTED" if committed else "READ_UNCOMMITTED")
            specs = kafka.clients.admin.OffsetSpec
            ends = []
            for spec in (specs.earliest(), specs.latest()):
                asked = jvm.java.util.HashMap()
                for partition in partitions:
                    asked.put(partition, spec)
                found = admin.listOffsets(asked, kafka.clients.admin.ListOffsetsOptions(level))
                answer = found.all().get(_TIMEOUT, seconds)
                ends.append({partition.partition(): answer.get(partition).offset() for partition in partitions})
        finally:
            admin.close()
    first, end = ends
    return {number: (first[number], end[number]) for number in sorted(first)}


def _jvm(spark: SparkSession) -> Any:
    from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]
    from pyspark import __version__

    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        raise ConfigError(
            "KafkaTopic on Spark Connect: positions are asked by the driver's JVM; use a session with one"
        )
    for name in ("org.apache.kafka.clients.admin.AdminClient", "org.apache.spark.sql.kafka010.KafkaSourceProvider"):
        found = jvm
        for part in name.split("."):
            found = getattr(found, part)
        if not isinstance(found, JavaClass):
            raise ConfigError(
                "Spark has no connector to Kafka: begin the session with spark.jars.packages="
                f"org.apache.spark:spark-sql-kafka-0-10_2.13:{__version__}, or with its jars in spark.jars"
            )
    return jvm


@contextmanager
def _mapped(topic: str, client: Mapping[str, str]) -> Iterator[None]:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    try:
        yield
    except Py4JJavaError as error:
        cause = error.java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        said = f"{cause.getClass().getSimpleName()}: {cause.getMessage()}"
        for name, value in client.items():
            if value and _SECRET.search(name):
                said = said.replace(value, "…")
        # Not the exception itself: its text is all that the client was made with.
        raise SourceError(f"{topic}: Kafka at {client.get('bootstrap.servers')}: {said[:_LIMIT]}") from None
