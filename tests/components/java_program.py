"""The Java program of examples/java, which the first call compiles into `.cache`.

The compiler is the Eclipse compiler, which runs on any Java. A JRE such as Debian's `default-jre-headless` has no
`javac`. Maven fetches the compiler and the jars of the program.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.components.alone import alone
from tests.components.java import check_java, fetch_jars, find_java
from tests.components.supervised import ComponentError

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
_SOURCE = ROOT / "examples" / "java" / "PartitionedQueue.java"
_POMS = (Path(__file__).parent / "java_compiler" / "pom.xml", _SOURCE.parent / "pom.xml")
_NAME = "the example in Java"
_LEAST_JAVA = 17
_COMPILE_SECONDS = 120.0
_SMALL = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
"""Arguments for a Java that runs for seconds."""


def java_command() -> list[str]:
    """Return the command that runs the program.

    Idempotent; the first call may block for minutes. Raises `MissingComponent` without Java, Maven or access to the
    jars, and `ComponentError` with the compiler's output if the source does not compile.
    """
    java = find_java(_NAME)
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in (_SOURCE, *_POMS)))
    folder = CACHE / "java" / digest.hexdigest()[:16]
    stamp = folder / "ready"
    if not stamp.is_file():
        check_java(java, _LEAST_JAVA, _NAME)
        with alone(CACHE / "java.lock", _NAME):
            if not stamp.is_file():
                _make(java, folder)
                stamp.touch()  # last, so an interrupted set-up is never ready
    return [java, *_SMALL, "-cp", _classpath(folder), _SOURCE.stem]


def _make(java: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = CACHE / "java.log"
    log.write_text("")
    fetch_jars(java, _POMS[0], folder / "jars", repository=CACHE / "m2", log=log, wanted_by=_NAME)
    (compiler,) = (folder / "jars").glob("ecj-*.jar")
    command = [java, *_SMALL, "-jar", str(compiler), f"-{_LEAST_JAVA}", "-encoding", "UTF-8", "-failOnWarning"]
    command += ["-d", str(folder / "classes"), "-cp", _classpath(folder), str(_SOURCE)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_COMPILE_SECONDS, check=False
    )
    if done.returncode:
        raise ComponentError(f"{_SOURCE} does not compile: {done.stdout}")


def _classpath(folder: Path) -> str:
    return os.pathsep.join(map(str, [folder / "classes", *sorted((folder / "jars").glob("*.jar"))]))
