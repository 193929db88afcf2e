"""Spark for ``lanes``: the handler a team already has, run over history on all executors, in order within a key."""

from __future__ import annotations

from lanes_spark.kafka_topic import KafkaTopic
from lanes_spark.plan import Effects, Eras, Plan
from lanes_spark.replay import Progress, Report, replay
from lanes_spark.table import ParquetTable
from lanes_spark.task import run_task
from lanes_spark.task_job import TaskJob

__all__ = [
    "Effects",
    "Eras",
    "KafkaTopic",
    "ParquetTable",
    "Plan",
    "Progress",
    "Report",
    "TaskJob",
    "replay",
    "run_task",
]
