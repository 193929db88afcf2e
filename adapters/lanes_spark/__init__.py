"""Spark for ``lanes``: the handler a team already has, run over history on all executors, in order within a key."""

from __future__ import annotations

from lanes_spark.audit import Audit, audit
from lanes_spark.audit_verdicts import AuditVerdict
from lanes_spark.journal_selection import JournalFacts, JournalSelection
from lanes_spark.kafka_topic import KafkaTopic
from lanes_spark.plan import Effects, Eras, Plan, make_plan
from lanes_spark.progress import OldestMessage, Progress
from lanes_spark.replay import Report, replay
from lanes_spark.stream import Stream, stream
from lanes_spark.table import ParquetTable
from lanes_spark.task import run_task
from lanes_spark.task_job import TaskJob

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
    "Stream",
    "TaskJob",
    "audit",
    "make_plan",
    "replay",
    "run_task",
    "stream",
]
