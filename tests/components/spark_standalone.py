"""A Spark cluster on this machine, each of whose workers has a separate address.

For Spark, each address is a host. Spark never runs two attempts of a task concurrently on one host.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.components.server import Started
from tests.components.supervised import ComponentError, Supervised
from tests.components.waiting import wait_until

_HOST = "127.0.0.1"
_CLASSES = "org.apache.spark.deploy"
_MASTER = re.compile(r"Starting Spark master at (spark://[\d.]+:\d+)")


def spark_home() -> Path:
    """Return the folder of Spark in this Python's environment."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ComponentError("Spark is missing: pip install '.[spark]' in the checkout")
    return Path(found.origin).parent


class SparkStandalone(Started):
    """A master, and a worker with one core on each of `hosts`, which must be loopback addresses. Not thread-safe.

    On Linux, all addresses of 127.0.0.0/8 are loopback. The cluster needs a Java in JAVA_HOME or on PATH.

    `pythonpath` is the PYTHONPATH of the tasks. `seconds` bounds the start of the master, and that of the workers.
    """

    def __init__(
        self, *, hosts: Sequence[str] = ("127.0.0.2", "127.0.0.3"), pythonpath: str = "", seconds: float = 90.0
    ) -> None:
        self._master = Supervised("spark-master")
        self._workers = {host: Supervised("spark-worker") for host in hosts}
        self._pythonpath = pythonpath
        self._seconds = seconds
        self._url: str | None = None

    def __repr__(self) -> str:
        return f"<SparkStandalone {self._url or 'not started'}, workers on {', '.join(self._workers)}>"

    @property
    def url(self) -> str:
        """The address of the master, for `spark.master`. Known after `start`."""
        if self._url is None:
            raise ComponentError("the Spark cluster has no address yet: call start()")
        return self._url

    def start(self) -> None:
        """Start the cluster, and block until every worker has registered at the master. Idempotent."""
        if self._url is not None:
            return
        try:
            self._launch(self._master, _HOST, "master.Master", "--host", _HOST, "--port", "0")
            wait_until(lambda: _MASTER.search(self._said()) is not None, "the Spark master", seconds=self._seconds)
            found = _MASTER.search(self._said())
            assert found is not None
            for host, worker in self._workers.items():
                place = str(worker.folder / "data")
                arguments = ("--host", host, "--cores", "1", "--memory", "1g", "--work-dir", place, found[1])
                self._launch(worker, host, "worker.Worker", *arguments)
            wait_until(self._all_registered, f"workers on {', '.join(self._workers)}", seconds=self._seconds)
        except BaseException:
            self.stop()
            raise
        self._url = found[1]

    def stop(self) -> None:
        """End the cluster and remove its folders. Idempotent; blocks until done."""
        for process in (*self._workers.values(), self._master):
            process.stop()
        self._url = None

    def _launch(self, process: Supervised, host: str, name: str, *arguments: str) -> None:
        program = str(spark_home() / "bin" / "spark-class")
        process.launch([program, f"{_CLASSES}.{name}", "--webui-port", "0", *arguments], env=self._env(host))

    def _env(self, host: str) -> Mapping[str, str]:
        return {
            **os.environ,
            "SPARK_HOME": str(spark_home()),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": "256m",
            # A worker passes these variables to its executors, and an executor to its Python.
            "PYTHONPATH": self._pythonpath,
            "PYSPARK_PYTHON": sys.executable,
        }

    def _said(self) -> str:
        if not self._master.alive:
            raise ComponentError(f"the Spark master ended while starting: {self._master.last_words()}")
        return (self._master.folder / "log").read_text(errors="replace")

    def _all_registered(self) -> bool:
        for host, worker in self._workers.items():
            if not worker.alive:
                raise ComponentError(f"the Spark worker on {host} ended while starting: {worker.last_words()}")
        said = self._said()
        return all(f"Registering worker {host}:" in said for host in self._workers)
