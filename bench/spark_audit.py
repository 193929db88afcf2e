"""The audit of a journal on Spark: events a second, compared with a hand-written SQL query of the same checks.

The journal is from 16 processes, each with a partition of 625 keys, 100 messages in flight and a commit after every 100
messages. The journal has no violations. The query counts the violations of each promise by the journal's columns. The
query trusts the clocks and the row numbers, and names neither witnesses nor unproven promises. The audit and the query
read the same files in the same session of two cores.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from bench.figures import Effort, Figure, interleaved, rate
from bench.spark_session import session
from lanes.history.columns import row_tables
from lanes_spark import audit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOAL: Final = 0.8
EVENTS, PROCESSES, KEYS = 3_000_000, 16, 625
IN_FLIGHT: Final = 100
ROUND: Final = 3 * IN_FLIGHT + 1
"""Number of rows of one round: the rows of the messages in flight at once, and the row of the commit."""

CONF: Final = {"spark.driver.memory": "2g", "spark.sql.shuffle.partitions": "4"}
BEGIN: Final = '{"boot":"boot","order":"key","incomplete":1}'

QUERY: Final = """
WITH rows AS (SELECT * FROM journal),
finals AS (
  SELECT *, event = 'dlq_confirmed' OR (event = 'ended' AND result = 'ok') AS final FROM rows
  WHERE event IN ('delivered', 'started', 'ended', 'dlq_confirmed')
),
starts AS (
  SELECT *,
    max(IF(event = 'started', position, NULL)) OVER before AS highest,
    count_if(event = 'started') OVER before - count_if(event = 'ended') OVER before AS running
  FROM finals WHERE key IS NOT NULL WINDOW before AS (
    PARTITION BY partition, key ORDER BY mono, run, n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  )
),
messages AS (
  SELECT partition, key, position, run, assignment,
    min(IF(event = 'started', mono, NULL)) AS started, max(IF(final, mono, NULL)) AS finished,
    max(IF(final, n, NULL)) AS finished_n
  FROM finals GROUP BY partition, key, position, run, assignment
),
finished AS (
  SELECT *, max(coalesce(finished, double('inf'))) OVER (
    PARTITION BY partition, key ORDER BY position ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS before FROM messages
),
committed AS (
  SELECT *, min(commit_n) OVER (
    PARTITION BY run, partition, assignment ORDER BY position DESC RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS by FROM (
    SELECT run, partition, assignment, position, finished_n, CAST(NULL AS bigint) AS commit_n FROM messages
    UNION ALL
    SELECT run, partition, assignment, floor, NULL, n FROM rows WHERE event = 'commit_sent'
  )
),
letters AS (
  SELECT *, last(IF(event = 'ack', NULL, event), true) OVER (
    PARTITION BY run, partition, assignment, position ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS before FROM rows WHERE event IN ('dlq_sent', 'dlq_confirmed', 'archived', 'ack')
),
owners AS (
  SELECT *, max(until) OVER (
    PARTITION BY partition ORDER BY since ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS held FROM (
    SELECT run, partition, assignment, min(IF(event = 'assigned', mono, NULL)) AS since, max(mono) AS until
    FROM rows WHERE partition IS NOT NULL GROUP BY run, partition, assignment
  )
)
SELECT 'order', count(*) FROM starts WHERE event = 'started' AND position < highest
UNION ALL SELECT 'early', count(*) FROM finished WHERE started < before
UNION ALL SELECT 'overlap', count(*) FROM starts WHERE event = 'started' AND running > 0
UNION ALL SELECT 'lost', count(*) FROM (
  SELECT 1 FROM messages GROUP BY partition, position HAVING count(finished) = 0
)
UNION ALL SELECT 'commit', count(*) FROM committed
  WHERE commit_n IS NULL AND by IS NOT NULL AND coalesce(finished_n >= by, true)
UNION ALL SELECT 'letter', count(*) FROM letters WHERE event = 'ack' AND before = 'dlq_sent'
UNION ALL SELECT 'owner', count(*) FROM owners WHERE held > since
UNION ALL SELECT 'repeat', count(*) FROM (
  SELECT 1 FROM rows WHERE event = 'started' GROUP BY partition, position HAVING count(DISTINCT run, assignment) > 1
)
UNION ALL SELECT 'again', count(*) FROM rows WHERE event = 'redelivered'
UNION ALL SELECT 'missing', count(*) FROM (
  SELECT 1 FROM rows GROUP BY run HAVING max(n) > count(*) OR count_if(event = 'end') = 0
)
"""


def figures(effort: Effort) -> list[Figure]:
    """Measure the case."""
    events = effort.messages(EVENTS)
    with TemporaryDirectory() as folder, session(CONF) as spark:
        path = str(Path(folder) / "journal")
        count = write_journal(spark, path, events)
        ours, query = interleaved(
            [partial(_audited, spark, path, count), partial(_queried, spark, path, count)], effort.repeats
        )
    return [rate(f"spark-audit, {count:,} events", "events/s", ours, query, GOAL)]


def _audited(spark: SparkSession, path: str, count: int) -> float:
    begin = time.perf_counter()
    found = audit(spark, path)
    seconds = time.perf_counter() - begin
    assert (found.status, found.rows) == (0, count)
    return count / seconds


def _queried(spark: SparkSession, path: str, count: int) -> float:
    begin = time.perf_counter()
    spark.read.parquet(path).createOrReplaceTempView("journal")
    counted = spark.sql(QUERY).collect()
    seconds = time.perf_counter() - begin
    assert not any(number for _, number in counted), counted
    return count / seconds


def write_journal(spark: SparkSession, path: str, events: int) -> int:
    """Write a journal of about ``events`` events, and return the exact number.

    The journal has the columns that ``lanes.run(journal=…)`` writes.
    """
    from pyspark.sql import functions as F  # noqa: N812

    rounds = max(1, events // PROCESSES // ROUND)
    each = rounds * ROUND + 3
    made = spark.range(PROCESSES * each, numPartitions=PROCESSES).select(
        F.expr(f"id div {each}").alias("process"), F.expr(f"id % {each} + 1").alias("n")
    )
    place = F.expr(f"(n - 3) % {ROUND}")
    base = F.expr(f"((n - 3) div {ROUND}) * {IN_FLIGHT}")
    event = (
        F.when(F.col("n") == 1, "begin")
        .when(F.col("n") == 2, "assigned")
        .when(F.col("n") == each, "end")
        .when(place == ROUND - 1, "commit_sent")
        .when(place < IN_FLIGHT, "delivered")
        .when((place - IN_FLIGHT) % 2 == 0, "started")
        .otherwise("ended")
    )
    within = F.when(F.col("event") == "delivered", place).otherwise(F.floor((place - IN_FLIGHT) / 2))
    of_message = F.col("event").isin("delivered", "started", "ended")
    owned = ~F.col("event").isin("begin", "end")
    position = F.when(of_message, base + within)
    named = made.withColumn("event", event).withColumns(
        {
            "run": F.format_string("%032x", "process"),
            "member": F.format_string("member-%d", "process"),
            "mono": F.col("n") * 1e-4,
            "wall": 1e9 + F.col("n") * 1e-4,
            "partition": F.when(owned, F.format_string("orders/%d", "process")),
            "assignment": F.when(owned, 1).cast("bigint"),
            "epoch": F.when(F.col("event") == "assigned", 1).cast("bigint"),
            "position": position.cast("bigint"),
            "key": F.when(of_message, F.lower(F.hex(F.xxhash64("process", position * 7_919 % KEYS)))),
            "attempt": F.when(of_message, 1).cast("bigint"),
            "result": F.when(F.col("event") == "ended", "ok"),
            "incarnation": F.when(F.col("event") == "assigned", ""),
            "floor": F.when(F.col("event") == "assigned", 0)
            .when(F.col("event") == "commit_sent", base + IN_FLIGHT)
            .cast("bigint"),
            "reason": F.when(F.col("event") == "end", "drained"),
            "detail": F.when(F.col("event") == "begin", BEGIN),
        }
    )
    _columns(named).write.parquet(path)
    return PROCESSES * each


def _columns(named: DataFrame) -> DataFrame:
    """Return the rows with all columns of a journal, in the order of the journal. A missing column has null values."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.pandas.types import from_arrow_schema

    kinds = {field.name: field.dataType for field in from_arrow_schema(row_tables().schema(""))}
    return named.select(
        *(
            (F.col(name) if name in named.columns else F.lit(None)).cast(kind).alias(name)
            for name, kind in kinds.items()
        )
    )
