"""Spark sessions of this process. Only one is alive at any time."""

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
    """Look for a Java that Spark finds, that of JAVA_HOME or of PATH. MissingComponent when there is none."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise MissingComponent("Spark needs Java 17 or newer: install default-jre-headless, or set JAVA_HOME")


@contextmanager
def spark_session(master: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session in a JVM of its own, whose workers find this folder; both are gone at the end. Blocks, for seconds at
    either end. MissingComponent without Java."""
    find_java()
    from pyspark.sql import SparkSession

    settings = {
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # A session of a test ends before the second compiler pays for itself.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **conf,
    }
    needed = {
        # The workers' Python would be any python3 of the path else.
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]),
        # An executor of a cluster asks for it; the session finds it by itself.
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
                # Another session of this process has other settings of the JVM: it gets one of its own.
                gateway.shutdown()
                gateway.proc.stdin.close()
                gateway.proc.wait()
                type(spark.sparkContext)._gateway = None
                type(spark.sparkContext)._jvm = None
