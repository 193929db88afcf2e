"""Reads a Kafka topic as a source of a replay, by the connector in Spark's JVM.

The connector's Java client asks the brokers for offset ranges before each batch. A replay stops if the topic has lost
positions. A replay joins no consumer group, and commits no offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from lanes.errors import ConfigError, SourceError
from lanes_spark.plan import Eras, check_eras
from lanes_spark.positions import Span, check_incarnation, check_start
from lanes_spark.tables.table import Spans, known_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OURS: Final = (
    *("subscribe", "subscribepattern", "assign", "includeheaders", "kafka.bootstrap.servers"),
    *(f"{end}{what}" for end in ("starting", "ending") for what in ("offsets", "offsetsbytimestamp", "timestamp")),
)
"""Options of the connector, in lower case, that the arguments of a replay decide."""

_SPLITTING: Final = ("minpartitions", "maxrecordsperpartition")
"""Options that let several tasks read one partition."""

_ISOLATION: Final = "kafka.isolation.level"

_TIMEOUT: Final = 30
"""Seconds allowed for each answer of the brokers."""

_LIMIT: Final = 300
"""Maximum number of characters of the client's error text."""

_CLASSES: Final[Mapping[str, str]] = {
    "spark-sql-kafka-0-10": "org.apache.spark.sql.kafka010.KafkaSourceProvider",
    "spark-token-provider-kafka-0-10": "org.apache.spark.kafka010.KafkaConfigUpdater",
    "kafka-clients": "org.apache.kafka.clients.admin.AdminClient",
    "commons-pool2": "org.apache.commons.pool2.PooledObject",
}
"""A class of each jar of the connector, by name of the jar. Without one of these jars, the tasks of a batch fail."""

_UNKNOWN: Final = "UnknownTopicOrPartitionException"

_REMEDIES: Final[Mapping[str, str]] = {
    "TimeoutException": "; check that the brokers run, and that this machine reaches their advertised addresses",
    _UNKNOWN: "; check the topic's name, and that this user may describe the topic",
}
"""Remedies for some errors of the client, by the class of the error."""

_SECRET: Final = re.compile(r"password|secret|jaas|token|\.key$|credential", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class KafkaTopic:
    """The messages of a Kafka topic.

    Like a live consumer, a replay omits messages of aborted transactions, and all messages after the start of an open
    transaction. The option ``kafka.isolation.level`` can change this rule.

    Args:
        servers: Brokers as host:port, separated by commas.
        topic: Topic name.
        options: Options of Spark's Kafka connector. An option whose name begins with ``kafka.``, such as
            ``kafka.security.protocol``, is a setting of the Java client.
        aligned: Whether one task reads a whole partition, without a shuffle. False = a shuffle by key distributes the
            rows, so that few partitions use many cores. The options ``minPartitions`` and ``maxRecordsPerPartition``
            require False. ``eras`` require False, except with the order ``"none"``.
        eras: Changes of the number of partitions, see ``lanes_spark.Eras``.

    Raises:
        ConfigError: An argument is invalid, or an option could lose order or messages.
    """

    servers: str
    topic: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    aligned: bool = True
    eras: Eras = ()

    def __post_init__(self) -> None:
        if not self.servers or not isinstance(self.servers, str):
            raise ConfigError(f"servers={self.servers!r}: give host:port, several separated by commas")
        if not self.topic:
            raise ConfigError("topic is empty: give the name of the topic")
        check_eras(self.eras)
        for name, value in self.options.items():
            self._check(name, value)

    def _check(self, name: str, value: object) -> None:
        # Spark ignores the case of option names.
        lower = name.lower()
        if not isinstance(value, str):
            raise ConfigError(f"options[{name!r}] is a {type(value).__name__}: write the value as a string")
        if lower in _OURS:
            raise ConfigError(
                f"options has {name}, but the arguments of the replay determine this option; remove {name}"
            )
        if lower == "failondataloss" and value.strip().lower() != "true":
            raise ConfigError(
                f"failOnDataLoss={value}: Spark would skip messages that the topic has lost, without an error; "
                f"remove {name}"
            )
        if lower in _SPLITTING and self.aligned:
            raise ConfigError(
                f"{name}={value}: several tasks would read one partition, without an order between them; set "
                f"aligned=False for a shuffle and a sort, or remove {name}"
            )

    def spans(self, spark: SparkSession) -> Spans:
        """Ask the brokers for the positions of the topic. Blocks for up to 30 seconds for each of four requests.

        Args:
            spark: Session with the Kafka connector.

        Returns:
            The positions by partition. ``rows`` of the result counts positions, including positions without a message.

        Raises:
            ConfigError: The session has no JVM, or lacks jars of the connector.
            SourceError: The brokers do not answer, or refuse the request; or the topic was recreated during the call.
        """
        spans, incarnation = read_offset_ranges(spark, self.topic, self._client())
        return Spans(
            by_partition=spans,
            rows=sum(end - first for first, end in spans.values()),
            timed=True,
            cut=True,
            incarnation=incarnation,
        )

    def rows(self, spark: SparkSession, ranges: Mapping[int, Span], incarnation: str = "") -> DataFrame:
        """Return the messages of these positions. The call asks the brokers for positions, but reads no message yet.

        Args:
            spark: Session with the Kafka connector.
            ranges: Positions by partition, the end exclusive.
            incarnation: Expected id of the topic; "" = any id.

        Returns:
            The rows.

        Raises:
            ConfigError: The session has no JVM, or lacks jars of the connector.
            SourceError: The topic has lost positions or was recreated, or the brokers do not answer.
        """
        spans, now = read_offset_ranges(spark, self.topic, self._client())
        # Compare the ids before the positions, because positions of different topics are not comparable.
        check_incarnation(self.topic, incarnation, now)
        check_start(self.topic, {partition: first for partition, (first, _) in ranges.items()}, spans)
        reader = spark.read.format("kafka").options(**self._all_options())
        found = (
            reader.option("assign", json.dumps({self.topic: sorted(ranges)}))
            .option("startingOffsets", self._offsets({number: first for number, (first, _) in ranges.items()}))
            .option("endingOffsets", self._offsets({number: end for number, (_, end) in ranges.items()}))
            .option("includeHeaders", "true")
            .option("failOnDataLoss", "true")
            .load()
        )
        return known_rows(found, self.topic, {})

    def since(self, spark: SparkSession, time: datetime, spans: Mapping[int, Span]) -> dict[int, int]:
        """Find the first position of each span with a timestamp of ``time``, in whole milliseconds, or later. Blocks.

        All messages below this position are earlier than ``time``, even if timestamps are out of order.

        Args:
            spark: Session with the Kafka connector.
            time: An aware time.
            spans: Positions by partition, the end exclusive.

        Returns:
            The position by partition; the end of the span if all messages of the span are earlier.

        Raises:
            ConfigError: The session has no JVM, or lacks jars of the connector.
            SourceError: The brokers do not answer, or refuse the request.
        """
        # Round the time down, because Kafka has timestamps in whole milliseconds. Rounding down skips no message.
        milliseconds = (time - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
        if not spans:
            return {}
        with _topic_admin(spark, self.topic, self._client()) as admin:
            found = admin.offsets(spans, admin.specs.forTimestamp(max(0, milliseconds)))
        # -1 means that all messages of a partition are earlier.
        return {
            number: end if found[number] < 0 else max(first, min(found[number], end))
            for number, (first, end) in spans.items()
        }

    def check_aligned(self, rows: DataFrame) -> None:
        """Do nothing, because each task of the connector reads one partition in order.

        With ``aligned``, the constructor refuses options that let several tasks read one partition.

        Args:
            rows: Not used.
        """

    def _client(self) -> dict[str, str]:
        return {name[6:]: value for name, value in self._all_options().items() if name.lower().startswith("kafka.")}

    def _all_options(self) -> dict[str, str]:
        return {_ISOLATION: "read_committed", **self.options, "kafka.bootstrap.servers": self.servers}

    def _offsets(self, positions: Mapping[int, int]) -> str:
        return json.dumps({self.topic: {str(number): position for number, position in sorted(positions.items())}})


def read_offset_ranges(spark: SparkSession, topic: str, client: Mapping[str, str]) -> tuple[dict[int, Span], str]:
    """Read the offset range of each partition, and the id of the topic.

    The call blocks for up to 30 seconds for each of four requests. Error texts contain no values of secret settings.

    Args:
        spark: Session with the Kafka connector.
        topic: Topic name.
        client: Settings of the Java client.

    Returns:
        The ranges by partition, and the id of the topic. A recreated topic has another id. "" = the brokers have no
        topic ids.

    Raises:
        ConfigError: The session has no JVM or no connector.
        SourceError: The brokers failed, or the topic was recreated during the call. The error is retryable if the
            brokers may answer later.
    """
    with _topic_admin(spark, topic, client) as admin:
        partitions, incarnation = admin.described()
        first = admin.offsets(partitions, admin.specs.earliest())
        # Read the ends last, so that they include new messages.
        end = admin.offsets(partitions, admin.specs.latest())
        # Brokers find offsets by the name of the topic. If the id is the same before and after, the offsets belong to
        # the topic with this id.
        check_incarnation(topic, incarnation, admin.described()[1])
    return {number: (first[number], end[number]) for number in sorted(first)}, incarnation


class _TopicAdmin:
    """An admin client of the brokers, for one topic."""

    def __init__(self, jvm: Any, admin: Any, topic: str, isolation: str | None) -> None:
        self._jvm = jvm
        self._admin = admin
        self._topic = topic
        self._level = "READ_COMMITTED" if isolation == "read_committed" else "READ_UNCOMMITTED"
        self._seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
        self.specs = jvm.org.apache.kafka.clients.admin.OffsetSpec

    def described(self) -> tuple[list[int], str]:
        names = self._jvm.java.util.ArrayList()
        names.add(self._topic)
        described = self._admin.describeTopics(names).allTopicNames().get(_TIMEOUT, self._seconds).get(self._topic)
        number = described.topicId()
        # Brokers before 2.8 have no topic ids.
        incarnation = "" if number.equals(self._jvm.org.apache.kafka.common.Uuid.ZERO_UUID) else number.toString()
        return [described.partitions().get(at).partition() for at in range(described.partitions().size())], incarnation

    def offsets(self, partitions: Iterable[int], spec: Any) -> dict[int, int]:
        kafka = self._jvm.org.apache.kafka
        places = {number: kafka.common.TopicPartition(self._topic, number) for number in partitions}
        asked = self._jvm.java.util.HashMap()
        for place in places.values():
            asked.put(place, spec)
        level = getattr(kafka.common.IsolationLevel, self._level)
        found = self._admin.listOffsets(asked, kafka.clients.admin.ListOffsetsOptions(level))
        answer = found.all().get(_TIMEOUT, self._seconds)
        return {number: answer.get(place).offset() for number, place in places.items()}


@contextmanager
def _topic_admin(spark: SparkSession, topic: str, client: Mapping[str, str]) -> Iterator[_TopicAdmin]:
    jvm = _jvm(spark)
    settings = jvm.java.util.Properties()
    if "request.timeout.ms" not in client:
        # The client refuses a value below its request timeout.
        settings.setProperty("default.api.timeout.ms", str(_TIMEOUT * 1_000))
    for name, value in client.items():
        if name != "isolation.level":
            settings.setProperty(name, value)
    with _broker_errors(topic, client):
        admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
        try:
            yield _TopicAdmin(jvm, admin, topic, client.get("isolation.level"))
        finally:
            admin.close()


def _jvm(spark: SparkSession) -> Any:
    from py4j.java_gateway import JavaClass  # type: ignore[import-untyped]
    from pyspark import __version__

    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        raise ConfigError(
            "KafkaTopic on Spark Connect: only the driver's JVM can ask for positions; use a session with a JVM"
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
            f"Spark lacks jars of its connector to Kafka: {', '.join(missing)}; begin the session with "
            f"spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:{__version__}, or with the jars in "
            "spark.jars; `lanes doctor spark --kafka` shows the searched folders"
        )
    return jvm


@contextmanager
def _broker_errors(topic: str, client: Mapping[str, str]) -> Iterator[None]:
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
        # Omit the text of the exception itself, because it contains all settings of the client.
        remedy = _REMEDIES.get(kind, "")
        raise SourceError(
            f"{topic}: Kafka at {client.get('bootstrap.servers')}: {said[:_LIMIT]}{remedy}", retryable=_passes(cause)
        ) from None


def _passes(cause: Any) -> bool:
    """Return whether a later attempt may succeed. The class of the client's error decides.

    A missing topic is never retryable.
    """
    kinds = []
    kind = cause.getClass()
    while kind is not None:
        kinds.append(kind.getSimpleName())
        kind = kind.getSuperclass()
    return kinds[0] != _UNKNOWN and not {"RetriableException", "TimeoutException"}.isdisjoint(kinds)
