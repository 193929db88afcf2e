"""Which positions a Kafka topic has, asked by the Java client that Spark's connector brings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from lanes.errors import ConfigError, SourceError
from lanes_spark.positions import Span, check_incarnation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["first_since", "read_watermarks"]

_TIMEOUT: Final = 30
"""Seconds that the brokers have for each answer."""

_LIMIT: Final = 300
"""Characters of what the client says that are kept."""

_CLASSES: Final[Mapping[str, str]] = {
    "spark-sql-kafka-0-10": "org.apache.spark.sql.kafka010.KafkaSourceProvider",
    "spark-token-provider-kafka-0-10": "org.apache.spark.kafka010.KafkaConfigUpdater",
    "kafka-clients": "org.apache.kafka.clients.admin.AdminClient",
    "commons-pool2": "org.apache.commons.pool2.PooledObject",
}
"""The jars of the connector, and what each of them holds: without one of them a batch would fail, in its tasks."""

_UNKNOWN: Final = "UnknownTopicOrPartitionException"

_REMEDIES: Final[Mapping[str, str]] = {
    "TimeoutException": "; see that the brokers are up, and that this machine reaches them there",
    _UNKNOWN: "; see that the topic is called so, and that this user may describe it",
}
"""What to do about some of what the client says."""

_SECRET: Final = re.compile(r"password|secret|jaas|token|\.key$|credential", re.IGNORECASE)


def read_watermarks(spark: SparkSession, topic: str, client: Mapping[str, str]) -> tuple[dict[int, Span], str]:
    """By partition the first position, and the one behind the last that may be read at this isolation level; and the id
    of the topic, which it has as long as it is not made anew, "" where the brokers know of none. All of one topic.

    ``client``: settings of the Java client. Blocks, about a minute at most unless its timeouts say otherwise.

    Raises ``ConfigError`` where there is no JVM or no connector, ``SourceError`` for what the brokers say, retryable
    where they may answer a moment later, and for a topic that is made anew meanwhile; values of secret settings are
    left out.
    """
    committed = client.get("isolation.level") == "read_committed"
    with _asked(spark, topic, client) as asked:
        specs = asked.specs
        partitions, incarnation = asked.described()
        # The ends last: what came meanwhile is in them.
        first, end = (
            asked.offsets(dict.fromkeys(partitions, spec), committed) for spec in (specs.earliest(), specs.latest())
        )
        # Positions are asked for by name: only between two answers of one id they are of that topic.
        check_incarnation(topic, incarnation, asked.described()[1])
    return {number: (first[number], end[number]) for number in sorted(first)}, incarnation


def first_since(
    spark: SparkSession, topic: str, client: Mapping[str, str], milliseconds: int, ends: Mapping[int, int]
) -> dict[int, int]:
    """By partition the first position with a timestamp of that or later; where there is none, its end of ``ends``,
    which were asked for before. Blocks and raises as ``read_watermarks``."""
    committed = client.get("isolation.level") == "read_committed"
    with _asked(spark, topic, client) as asked:
        spec = asked.specs.forTimestamp(milliseconds)
        found = asked.offsets(dict.fromkeys(ends, spec), committed) if ends else {}
    return {number: ends[number] if at < 0 else min(at, ends[number]) for number, at in found.items()}


class _Asked:
    """A client of the brokers, for one topic."""

    def __init__(self, jvm: Any, admin: Any, topic: str) -> None:
        self._jvm = jvm
        self._admin = admin
        self._topic = topic
        self._seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
        self.specs = jvm.org.apache.kafka.clients.admin.OffsetSpec

    def described(self) -> tuple[list[int], str]:
        names = self._jvm.java.util.ArrayList()
        names.add(self._topic)
        described = self._admin.describeTopics(names).allTopicNames().get(_TIMEOUT, self._seconds).get(self._topic)
        number = described.topicId()
        # Brokers before 2.8 give them none.
        incarnation = "" if number.equals(self._jvm.org.apache.kafka.common.Uuid.ZERO_UUID) else number.toString()
        return [described.partitions().get(at).partition() for at in range(described.partitions().size())], incarnation

    def offsets(self, specs: Mapping[int, Any], committed: bool) -> dict[int, int]:
        kafka = self._jvm.org.apache.kafka
        places = {number: kafka.common.TopicPartition(self._topic, number) for number in specs}
        asked = self._jvm.java.util.HashMap()
        for number, place in places.items():
            asked.put(place, specs[number])
        level = getattr(kafka.common.IsolationLevel, "READ_COMMITTED" if committed else "READ_UNCOMMITTED")
        found = self._admin.listOffsets(asked, kafka.clients.admin.ListOffsetsOptions(level))
        answer = found.all().get(_TIMEOUT, self._seconds)
        return {number: answer.get(place).offset() for number, place in places.items()}


@contextmanager
def _asked(spark: SparkSession, topic: str, client: Mapping[str, str]) -> Iterator[_Asked]:
    jvm = _jvm(spark)
    settings = jvm.java.util.Properties()
    if "request.timeout.ms" not in client:
        # The client refuses a shorter one than that of a request.
        settings.setProperty("default.api.timeout.ms", str(_TIMEOUT * 1_000))
    for name, value in client.items():
        if name != "isolation.level":
            settings.setProperty(name, value)
    with _mapped(topic, client):
        admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
        try:
            yield _Asked(jvm, admin, topic)
        finally:
            admin.close()


def _jvm(spark: SparkSession) -> Any:
    from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]
    from pyspark import __version__

    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        raise ConfigError(
            "KafkaTopic on Spark Connect: positions are asked by the driver's JVM; use a session with one"
        )
    missing = []
    for jar, name in _CLASSES.items():
        found = jvm
        for part in name.split("."):
            found = getattr(found, part)
        if not isinstance(found, JavaClass):
            missing.append(jar)
    if missing:
        raise ConfigError(
            f"Spark has no connector to Kafka, or not all of it: it lacks {', '.join(missing)}; begin the session with "
            f"spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:{__version__}, or with its jars in "
            "spark.jars; `lanes doctor spark --kafka` shows where it looks"
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
        kind = cause.getClass().getSimpleName()
        said = f"{kind}: {cause.getMessage()}"
        for name, value in client.items():
            if value and _SECRET.search(name):
                said = said.replace(value, "…")
        # Not the exception itself: its text is all that the client was made with.
        remedy = _REMEDIES.get(kind, "")
        raise SourceError(
            f"{topic}: Kafka at {client.get('bootstrap.servers')}: {said[:_LIMIT]}{remedy}", retryable=_passes(cause)
        ) from None


def _passes(cause: Any) -> bool:
    """Whether the brokers may answer a moment later, as the client says of its own exceptions. A topic that is not
    there is told at once, though it calls that passing, too."""
    kinds = []
    kind = cause.getClass()
    while kind is not None:
        kinds.append(kind.getSimpleName())
        kind = kind.getSuperclass()
    return kinds[0] != _UNKNOWN and not {"RetriableException", "TimeoutException"}.isdisjoint(kinds)
