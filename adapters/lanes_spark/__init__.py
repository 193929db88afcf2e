"""Runs a handler of ``lanes`` over stored messages on a Spark cluster, in order within a key.

Reading order: ``plan``, ``positions``, ``checkpoint``, ``failures``; then the folders ``task``, ``tables``, ``driver``,
``audits``, ``cli``.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pyspark") is None:
    raise ImportError(
        "lanes_spark needs pyspark: pip install '.[spark]' in the checkout of lanes",
        name="pyspark",
    ) from ModuleNotFoundError("No module named 'pyspark'", name="pyspark")

from lanes_spark.audits.audit import Audit, audit
from lanes_spark.audits.verdicts import AuditVerdict
from lanes_spark.driver.progress import OldestMessage, Progress
from lanes_spark.driver.replay import replay
from lanes_spark.driver.run import Report, RunOptions
from lanes_spark.driver.stream import Stream, stream
from lanes_spark.plan import Effects, Eras, Plan, make_plan
from lanes_spark.tables.journal_selection import JournalFacts, JournalSelection
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable
from lanes_spark.task.job import TaskJob
from lanes_spark.task.task import run_task

__all__ = [
    "Audit",
    "AuditVerdict",
    "Effects",
    "Eras",
    "JournalFacts",
    "JournalSelection",
    "KafkaTopic",
    "OldestMessage",
    "ParquetTable",
    "Plan",
    "Progress",
    "Report",
    "RunOptions",
    "Stream",
    "TaskJob",
    "audit",
    "make_plan",
    "replay",
    "run_task",
    "stream",
]
