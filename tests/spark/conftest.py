"""Spark sessions on this machine. A process can have one session at a time, so each session serves one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.components import MissingComponent
from tests.components.spark_session import find_java, spark_session
from tests.conftest import skip_or_fail


def need_java() -> None:
    """Skip the test, or fail the test in CI, if neither JAVA_HOME nor PATH has a Java."""
    try:
        find_java()
    except MissingComponent as missing:
        skip_or_fail(missing)


@contextmanager
def session(master: str, more: Mapping[str, str] | None = None) -> Iterator[Any]:
    need_java()
    settings = {
        "spark.driver.memory": "512m",
        "spark.log.level": "FATAL",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        **(more or {}),
    }
    with spark_session(master, settings) as found:
        yield found


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
