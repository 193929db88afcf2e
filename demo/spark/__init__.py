"""The demo on Spark: a replay of a Kafka topic with fenced effects in PostgreSQL, which is killed twice.

A parent process owns what must survive: the tables, the approval service, the topics. A driver is the process that
Spark runs in, with its JVM; its workers run the handler of the demo. A worker and a driver are killed with -9, and the
outcome is judged by SQL against the log, and by an audit of the journal.

Reading order: ``run``, ``config``, ``drivers``, ``driver``, ``tasks``, ``tables``, ``checkpoint``, ``judge``,
``report``.
"""

from __future__ import annotations

from demo.spark.config import SparkConfig
from demo.spark.report import SparkReport
from demo.spark.run import run

__all__ = ["SparkConfig", "SparkReport", "run"]
