"""A driver of the demo: one call of ``replay`` on Spark, and the audit of its journal.

The demo's parent runs ``python -m demo.spark.driver`` with a ``ReplayConfig`` in the environment. The driver ends with
its parent. The driver prints the result of the replay and then the result of the audit, each as one line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from demo.child import end_with_parent
from demo.config import settings
from demo.spark import tasks
from demo.spark.config import ATTEMPTS, ReplayConfig
from lanes.clock import monotonic
from lanes.errors import LanesError, SourceError
from lanes.process import EXIT_FAILED
from lanes_spark import Audit, KafkaTopic, Report, audit, replay

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SAID_LIMIT: Final = 3
"""Most witnesses and reasons of a verdict that the driver prints."""


def main() -> int:
    """Run the replay and the audit. Return 0, or ``EXIT_FAILED`` after an error. Blocks."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    try:
        config = ReplayConfig.load()
        with _session(config) as spark:
            topic = KafkaTopic(servers=config.kafka, topic=config.topic)
            report = _replay(spark, topic, config)
            say({"replayed": monotonic(), "batches": report.batches})
            say({"audit": told(audit(spark, config.journal, source=topic))})
    except LanesError as error:
        print(f"lanes: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return 0


def say(what: dict[str, Any]) -> None:
    """Print one line of JSON for the parent."""
    print(json.dumps(what), flush=True)


def told(found: Audit) -> dict[str, Any]:
    """Return the facts of the audit for the parent."""
    return {
        "status": found.status,
        "rows": found.rows,
        "processes": found.processes,
        "duplicates": dict(found.duplicates),
        "unfinished": found.unfinished,
        "verdicts": [
            [each.name, each.status, each.violations, [*each.witnesses, *each.reasons][:_SAID_LIMIT]]
            for each in found.verdicts
        ],
    }


def _replay(spark: SparkSession, topic: KafkaTopic, config: ReplayConfig) -> Report:
    return replay(
        spark,
        topic,
        tasks.handle,
        settings=settings(config.concurrency, config.max_in_flight),
        dead_letters=tasks.letters,
        setup=tasks.begin,
        teardown=tasks.end,
        checkpoint=config.checkpoint,
        rows_per_batch=config.rows_per_batch,
        journal=config.journal,
        effects="fenced",
    )


@contextmanager
def _session(config: ReplayConfig) -> Iterator[SparkSession]:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{config.cores},{ATTEMPTS}]").appName("lanes demo on Spark")
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={config.scratch}",
        "spark.local.dir": config.scratch,
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(2 * config.cores),
        "spark.sql.warehouse.dir": f"{config.scratch}/warehouse",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if config.jars:
        conf["spark.jars"] = ",".join(config.jars)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except PySparkException as error:
        raise SourceError(
            f"Spark does not start: {error}; it needs Java 17 or newer, on PATH or in JAVA_HOME", retryable=False
        ) from error
    try:
        yield spark
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
