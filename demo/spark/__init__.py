"""The demo on Spark: a replay of a Kafka topic, with fenced effects in PostgreSQL and two kills.

A parent process owns all parts that must survive a kill: the tables, the approval service, the topics. A driver is the
process that starts Spark, with its JVM. Spark's Python workers run the handler of the demo. The parent kills a worker
and a driver with -9. Then SQL compares the effects with the log, and an audit judges the journal.

Reading order: ``run``, ``config``, ``drivers``, ``driver``, ``tasks``, ``tables``, ``checkpoint``, ``judge``,
``report``.
"""

from __future__ import annotations

from demo.spark.config import SparkConfig
from demo.spark.report import SparkReport
from demo.spark.run import run

__all__ = ["SparkConfig", "SparkReport", "run"]
