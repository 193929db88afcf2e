"""What a Kafka broker needs to run, made once: its jars, a formatted data folder, an archive of its classes.

All of it is in `.cache`. A folder there is made under a lock, by one process at a time, and is taken for finished
only when its stamp says so; another Kafka, another Java or another place of the project is another folder.
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
_STARTED = "Kafka Server started"  # the log says so; a port is open long before
_START_SECONDS = 60.0
_DUMP_SECONDS = 60.0


class Installation:
    """One finished folder, and the Java that goes with it."""

    def __init__(self, java: str, folder: Path) -> None:
        self._java = java
        self._folder = folder

    @property
    def formatted(self) -> Path:
        """The data folder of a broker that has never run; to be copied."""
        return self._folder / "formatted"

    def command(self, properties: Path, *, temporary: Path, arguments: Sequence[str] = ()) -> list[str]:
        """What runs a broker. `arguments` are for Java, and win; `temporary` is a folder for what it unpacks."""
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
        """Run a broker once, and have Java keep the classes it loaded: the others start in half the time."""
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
            draft.unlink(missing_ok=True)  # half of one
        finally:
            process.stop()
        # A Java that cannot make one has said so and gone on.
        if draft.is_file():
            draft.replace(self._folder / "classes.jsa")

    def _run(self, *arguments: str) -> list[str]:
        # In one order, always: the archive is good for no other. No performance counters: they are a file outside
        # of the broker's folder, which nobody removes after a -9.
        jars = ":".join(map(str, sorted((self._folder / "jars").glob("*.jar"))))
        small = ["-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        return [self._java, *small, "-cp", jars, *arguments]


def install() -> Installation:
    """What a broker runs from, made now if it is not there. Idempotent; blocks, the first time for up to minutes.

    MissingComponent without Java, Maven or a way to the jars.
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
                stamp.touch()  # last: an interrupted one is not taken for a finished one
    return installation


def wait_started(process: Supervised, begin: int, seconds: float) -> None:
    """Block until the broker says in its log, from byte `begin` on, that it has started.

    ComponentError when it ends instead, with what it said; TimeoutError after `seconds`.
    """
    heard = ""
    with (process.folder / "log").open(errors="replace") as log:
        log.seek(begin)

        def started() -> bool:
            nonlocal heard
            alive = process.alive  # asked first: what it said last is then in the log
            heard += log.read()
            if not alive:
                raise ComponentError(f"Kafka ended while starting: {_complaint(heard)}")
            return _STARTED in heard

        wait_until(started, f"Kafka in {process.folder} to start", seconds=seconds)


def _complaint(text: str) -> str:
    """The errors of a log in one line, and not the traces under them."""
    lines = [line for line in text.splitlines() if not line.startswith(("\t", " "))]
    errors = [
        line for line in lines if " ERROR " in line or " FATAL " in line or "Exception" in line or "Error" in line
    ]
    return " | ".join((errors or lines)[-3:]) or "its log is empty"


def _make(installation: Installation, java: str, folder: Path) -> None:
    print("lanes: setting up Apache Kafka, once", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = CACHE / "kafka.log"
    log.write_text("")
    fetch_jars(java, _POM, folder / "jars", repository=CACHE / "m2", log=log, wanted_by=_NAME)
    installation.format(folder)
    installation.archive()


def _identity(java: str) -> str:
    """The name of the folder for this pom, this Java and this place."""
    real = Path(java).resolve()
    state = real.stat()
    digest = hashlib.sha256(_POM.read_bytes())
    digest.update(f"{CACHE}\n{real}\n{state.st_size}\n{state.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
