"""A Kafka topic, as a replay reads it: by the connector of Spark's JVM.

Which positions there are is asked of the brokers before the first batch, and again before each: what the topic has
lost meanwhile stops the replay. Consumer groups have no part in it: nothing is joined and nothing is committed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from lanes.errors import ConfigError
from lanes_spark.plan import Eras, check_eras
from lanes_spark.positions import Span, check_incarnation, check_start
from lanes_spark.tables.table import Spans, known_rows
from lanes_spark.tables.watermarks import first_since, read_watermarks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["KafkaTopic"]

_OURS: Final = frozenset(
    name.lower()
    for name in (
        "subscribe",
        "subscribePattern",
        "assign",
        "startingOffsets",
        "startingOffsetsByTimestamp",
        "startingTimestamp",
        "endingOffsets",
        "endingOffsetsByTimestamp",
        "endingTimestamp",
        "includeHeaders",
        "kafka.bootstrap.servers",
    )
)
"""Options that follow from the arguments of a replay."""

_SPLITTING: Final = ("minpartitions", "maxrecordsperpartition")
"""Options under which several tasks read one partition."""

_ISOLATION: Final = "kafka.isolation.level"


@dataclass(frozen=True, kw_only=True)
class KafkaTopic:
    """The messages of a Kafka topic.

    ``servers``: host:port, several separated by commas. ``options``: of Spark's connector, by its names; those of the
    client begin with ``kafka.``, as ``kafka.security.protocol``, and are the Java client's. Messages of transactions
    that are open or were aborted are left out, as live, unless ``kafka.isolation.level`` says otherwise.

    ``aligned``: one task reads a whole partition, without a shuffle, so as many tasks as partitions have something to
    do. False = a shuffle by key spreads a few partitions over many cores; ``minPartitions`` and
    ``maxRecordsPerPartition`` need it, and so do ``eras``, see ``lanes_spark.Eras``.

    Raises ``ConfigError`` for options under which order or messages could be lost.
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
            raise ConfigError("topic is empty: lanes and positions are told apart by it")
        check_eras(self.eras)
        for name, value in self.options.items():
            self._check(name, value)

    def _check(self, name: str, value: object) -> None:
        # Spark looks none of them up by their case.
        lower = name.lower()
        if not isinstance(value, str):
            raise ConfigError(f"options[{name!r}] is a {type(value).__name__}: options of Spark are strings")
        if lower in _OURS:
            raise ConfigError(
                f"options has {name}, which follows from servers, topic and what is selected: leave it out"
            )
        if lower == "failondataloss" and value.strip().lower() != "true":
            raise ConfigError(
                f"failOnDataLoss={value}: what the topic has lost would then be left out without a word; leave it out"
            )
        if lower in _SPLITTING and self.aligned:
            raise ConfigError(
                f"{name}={value}: several tasks would read one partition, which keep no order among them; say "
                "aligned=False for a shuffle and a sort behind it, or leave it out"
            )

    def spans(self, spark: SparkSession) -> Spans:
        """What the topic has now, asked of its brokers. ``rows`` counts positions, of which not all need be messages.
        Blocks, about a minute at most.

        Raises ``ConfigError`` when the connector's jars are missing, ``SourceError`` for what the brokers say.
        """
        spans, incarnation = read_watermarks(spark, self.topic, self._client())
        return Spans(
            by_partition=spans,
            rows=sum(end - first for first, end in spans.values()),
            timed=True,
            cut=True,
            incarnation=incarnation,
        )

    def rows(self, spark: SparkSession, ranges: Mapping[int, Span], incarnation: str = "") -> DataFrame:
        """The messages of these positions. Reads nothing yet. Raises as ``spans``, and ``SourceError`` for positions
        that are gone by now, naming them, and for another topic than that ``incarnation``."""
        spans, now = read_watermarks(spark, self.topic, self._client())
        # First: what positions mean, is of one topic alone.
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
        """By partition the first position of these spans with a timestamp of ``time`` or later, or else the end: what
        is in front of it is earlier, in whatever order the times are. Blocks, and raises as ``spans``."""
        # Whole milliseconds, rounded down: Kafka has no others.
        milliseconds = (time - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
        found = first_since(
            spark, self.topic, self._client(), max(0, milliseconds), {number: end for number, (_, end) in spans.items()}
        )
        return {number: max(spans[number][0], at) for number, at in found.items()}

    def check_aligned(self, rows: DataFrame) -> None:
        """Nothing: without the options that are refused, a task of the connector reads one partition, in order."""

    def _client(self) -> dict[str, str]:
        return {name[6:]: value for name, value in self._all_options().items() if name.lower().startswith("kafka.")}

    def _all_options(self) -> dict[str, str]:
        return {_ISOLATION: "read_committed", **self.options, "kafka.bootstrap.servers": self.servers}

    def _offsets(self, positions: Mapping[int, int]) -> str:
        return json.dumps({self.topic: {str(number): position for number, position in sorted(positions.items())}})
