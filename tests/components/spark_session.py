"""Spark sessions of this process, which can have one session at a time."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.components.environment import ROOT
from tests.components.spark_standalone import spark_home
from tests.components.supervised import MissingComponent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def find_java() -> None:
    """Check that JAVA_HOME is set or PATH has a java, as Spark expects. Raises `MissingComponent` otherwise."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise MissingComponent("Spark needs Java 17 or newer: install default-jre-headless, or set JAVA_HOME")


@contextmanager
def spark_session(master: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Run a session in a separate JVM during the block; the workers import the modules of this project.

    Starting and ending the session blocks for seconds. Raises `MissingComponent` without Java.
    """
    find_java()
    from pyspark.sql import SparkSession

    settings = {
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The session of a test is too short for the second compiler to help.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **conf,
    }
    needed = {
        # Otherwise the workers would run the first python3 on PATH.
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]),
        # The executors of a cluster need the variable; the session does not.
        "SPARK_HOME": str(spark_home()),
    }
    with patch.dict(os.environ, needed):
        builder = SparkSession.builder
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()
            gateway: Any = type(spark.sparkContext)._gateway
            if gateway is not None:
                # The next session has other settings of the JVM, so it starts a new JVM.
                gateway.shutdown()
                gateway.proc.stdin.close()
                gateway.proc.wait()
                type(spark.sparkContext)._gateway = None
                type(spark.sparkContext)._jvm = None
