"""The installation of a Kafka broker, made once: the jars, a formatted data folder, and an archive of the classes.

Each installation is a folder in `.cache`. The folder depends on the Kafka version, on the Java, and on the path of the
project. One process at a time makes a folder, under a lock. A folder without the file `ready` is not finished.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.components.alone import alone
from tests.components.java import check_java, fetch_jars, find_java
from tests.components.kafka_properties import CLUSTER_ID, choose_ports, server_properties, write_properties
from tests.components.supervised import ComponentError, Supervised
from tests.components.waiting import wait_until

CACHE = Path(__file__).resolve().parents[2] / ".cache"
_SOURCES = Path(__file__).parent / "kafka"
_POM = _SOURCES / "pom.xml"
_NAME = "Kafka"
_LEAST_JAVA = 17
_STARTED = "Kafka Server started"  # the log line of a finished start; the port is open long before
_START_SECONDS = 60.0
_DUMP_SECONDS = 60.0


class Installation:
    """One installation folder, and the Java that runs its broker."""

    def __init__(self, java: str, folder: Path) -> None:
        self._java = java
        self._folder = folder

    @property
    def formatted(self) -> Path:
        """The data folder of a broker that has never run; each new broker gets a copy."""
        return self._folder / "formatted"

    def command(self, properties: Path, *, temporary: Path, arguments: Sequence[str] = ()) -> list[str]:
        """Return the command that runs a broker.

        `arguments` are for Java, and override the default ones. Java unpacks native libraries into `temporary`.
        """
        archive = self._folder / "classes.jsa"
        shared = [f"-XX:SharedArchiveFile={archive}"] if archive.is_file() else []
        return self._run(
            *shared,
            f"-Djava.io.tmpdir={temporary}",
            f"-Dlog4j2.configurationFile={_SOURCES / 'log4j2.properties'}",
            *arguments,
            "kafka.Kafka",
            str(properties),
        )

    def format(self, scratch: Path) -> None:
        """Make the formatted data folder."""
        properties = scratch / "format.properties"
        write_properties(properties, server_properties(self.formatted, choose_ports(login=False), {}, {}))
        command = self._run("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(properties))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise ComponentError(f"Kafka's data folder could not be formatted: {_complaint(done.stdout)}")

    def archive(self) -> None:
        """Run a broker once, and let Java archive its classes, which halves the start of later brokers."""
        draft = self._folder / "classes.new"
        process = Supervised("kafka")
        try:
            data, properties = process.folder / "data", process.folder / "server.properties"
            shutil.copytree(self.formatted, data)
            write_properties(properties, server_properties(data, choose_ports(login=False), {}, {}))
            keep = f"-XX:ArchiveClassesAtExit={draft}"
            process.launch(self.command(properties, temporary=process.folder / "run", arguments=[keep]))
            wait_started(process, 0, _START_SECONDS)
            process.signal(signal.SIGTERM)
            process.wait(_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            draft.unlink(missing_ok=True)  # an incomplete archive
        finally:
            process.stop()
        # If Java cannot make the archive, the broker runs without one.
        if draft.is_file():
            draft.replace(self._folder / "classes.jsa")

    def _run(self, *arguments: str) -> list[str]:
        # The jars are sorted, because the archive fits only one order. Performance counters are off, because their file
        # is outside of the broker's folder and would remain after a kill.
        jars = ":".join(map(str, sorted((self._folder / "jars").glob("*.jar"))))
        small = ["-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        return [self._java, *small, "-cp", jars, *arguments]


def install() -> Installation:
    """Return the installation, which the first call makes. Idempotent; the first call may block for minutes.

    Raises `MissingComponent` without Java, Maven or access to the jars.
    """
    java = find_java(_NAME)
    folder = CACHE / "kafka" / _identity(java)
    installation = Installation(java, folder)
    stamp = folder / "ready"
    if not stamp.is_file():
        check_java(java, _LEAST_JAVA, _NAME)
        with alone(CACHE / "kafka.lock", "Apache Kafka"):
            if not stamp.is_file():
                _make(installation, java, folder)
                stamp.touch()  # last, so an interrupted set-up is never ready
    return installation


def wait_started(process: Supervised, begin: int, seconds: float) -> None:
    """Block until a line after byte `begin` of the broker's log reports the start.

    Raises `ComponentError` with the errors of the log if the broker ends, and `TimeoutError` after `seconds`.
    """
    heard = ""
    with (process.folder / "log").open(errors="replace") as log:
        log.seek(begin)

        def started() -> bool:
            nonlocal heard
            alive = process.alive  # read before the log, so the log is then complete
            heard += log.read()
            if not alive:
                raise ComponentError(f"Kafka ended while starting: {_complaint(heard)}")
            return _STARTED in heard

        wait_until(started, f"Kafka in {process.folder} to start", seconds=seconds)


def _complaint(text: str) -> str:
    """The last errors of a log in one line, without their stack traces."""
    lines = [line for line in text.splitlines() if not line.startswith(("\t", " "))]
    errors = [
        line for line in lines if " ERROR " in line or " FATAL " in line or "Exception" in line or "Error" in line
    ]
    return " | ".join((errors or lines)[-3:]) or "its log is empty"


def _make(installation: Installation, java: str, folder: Path) -> None:
    print("lanes: setting up Apache Kafka, once, which takes about a minute", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = CACHE / "kafka.log"
    log.write_text("")
    fetch_jars(java, _POM, folder / "jars", repository=CACHE / "m2", log=log, wanted_by=_NAME)
    installation.format(folder)
    installation.archive()


def _identity(java: str) -> str:
    """The name of the folder for this pom, this Java and this project folder."""
    real = Path(java).resolve()
    state = real.stat()
    digest = hashlib.sha256(_POM.read_bytes())
    digest.update(f"{CACHE}\n{real}\n{state.st_size}\n{state.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
