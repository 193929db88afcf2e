"""Spark sessions of one machine. Only one is alive in a process at any time: those are for a module each."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.components import MissingComponent
from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]


def need_java() -> None:
    """Skip the test, or fail it in CI, where there is no Java that Spark finds: that of JAVA_HOME, or of PATH."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        skip_or_fail(MissingComponent("Spark needs Java 17 or newer: install default-jre-headless, or set JAVA_HOME"))


@contextmanager
def session(master: str, more: Mapping[str, str] | None = None) -> Iterator[Any]:
    need_java()
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        # The workers' Python would be any python3 of the path else.
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "adapters")]))
        # An executor of a cluster asks for it; the session finds it by itself.
        home = importlib.util.find_spec("pyspark")
        assert home is not None
        assert home.origin is not None
        patch.setenv("SPARK_HOME", str(Path(home.origin).parent))
        builder = SparkSession.builder
        settings = {
            "spark.master": master,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "FATAL",
            "spark.sql.shuffle.partitions": "4",
            "spark.sql.session.timeZone": "UTC",
            **(more or {}),
        }
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


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A session of two threads in one process."""
    with session("local[2]") as found:
        yield found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A session with three executors in processes of their own."""
    with session("local-cluster[3,1,1024]") as found:
        yield found
