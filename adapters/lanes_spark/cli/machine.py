"""Reads facts about this machine: Spark's files, jars, settings, Java and memory.

Runs Java only to print its version.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

SECONDS: Final = 20.0
"""Maximum seconds for a program to print its version. A busy machine starts a JVM in two seconds."""

MIB: Final = 1024**2

_PROPERTY: Final = re.compile(r"\s*([^\s=:#!][^\s=:]*)(?:\s*[=:]\s*|\s+)(.*?)\s*")
_FLAGS: Final = {
    "--master": "spark.master",
    "--packages": "spark.jars.packages",
    "--jars": "spark.jars",
    "--driver-memory": "spark.driver.memory",
    "--executor-memory": "spark.executor.memory",
    "--driver-class-path": "spark.driver.extraClassPath",
}
_LOCAL: Final = re.compile(r"local(?:\[(?P<cores>\*|\d{1,9})(?:\s*,\s*\d+)?\])?")
_CLUSTER: Final = re.compile(r"local-cluster\[\s*(\d{1,9})\s*,\s*(\d{1,9})\s*,\s*\d+\s*\]")
_SIZE: Final = re.compile(r"(\d{1,18})\s*([kmgtp]?)i?b?", re.IGNORECASE)
_UNITS: Final = {"k": 1024, "m": MIB, "g": 1024**3, "t": 1024**4, "p": 1024**5}
_VERSION: Final = re.compile(r'version "(\d+)')

CONNECTOR: Final = "spark-sql-kafka-0-10"

_NEEDED: Final = (CONNECTOR, "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
_NAME: Final = re.compile(rf"({'|'.join(_NEEDED)})(?:_(\d+\.\d+))?-(\d[\w.\-]*?)\.jar")
_CORE: Final = re.compile(r"spark-core_(\d+\.\d+)-(\d[\w.\-]*?)\.jar")


class Java(NamedTuple):
    """The output of ``java -version``.

    Attributes:
        version: Major version. 1 = any version before Java 9; None = unknown.
        text: Line with the version or with the error.
    """

    version: int | None
    text: str


def spark_home(env: Mapping[str, str]) -> Path:
    """Return the folder of Spark's own files. The function selects the same folder as pyspark."""
    if named := env.get("SPARK_HOME"):
        return Path(named)
    found = importlib.util.find_spec("pyspark")
    return Path(found.origin).parent if found is not None and found.origin is not None else Path()


def spark_conf(home: Path, env: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session: ``spark-defaults.conf``, ``PYSPARK_SUBMIT_ARGS`` and ``given``.

    Args:
        home: Folder of Spark's own files.
        env: Environment of the session.
        given: Settings of the session's code, which override all others.

    Returns:
        The settings by name.

    Raises:
        OSError: ``spark-defaults.conf`` is unreadable.
        ValueError: ``spark-defaults.conf`` is not UTF-8, or ``PYSPARK_SUBMIT_ARGS`` is malformed.
    """
    found: dict[str, str] = {}
    defaults = Path(env.get("SPARK_CONF_DIR") or home / "conf") / "spark-defaults.conf"
    if defaults.is_file():
        for line in defaults.read_text(encoding="utf-8").splitlines():
            if pair := _PROPERTY.fullmatch(line):
                found[pair[1]] = pair[2]
    words = shlex.split(env.get("PYSPARK_SUBMIT_ARGS", ""))
    for flag, word in itertools.pairwise(words):
        if flag == "--conf" and "=" in word:
            name, _, value = word.partition("=")
            found[name] = value
        elif flag in _FLAGS:
            found[_FLAGS[flag]] = word
    return {**found, **given}


def is_local(master: str) -> bool:
    """Return whether the workers are processes of this machine."""
    return not master or master.startswith("local")


def cores_of(master: str) -> int:
    """Return the number of cores of a local master."""
    if cluster := _CLUSTER.fullmatch(master):
        return int(cluster[1]) * int(cluster[2])
    local = _LOCAL.fullmatch(master or "local[*]")
    cores = local["cores"] if local is not None else None
    if cores == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(cores or 1)


def worker_environment(master: str, env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return environment variables for a session; empty if the workers run in a cluster.

    Args:
        master: Spark master.
        env: Environment of this process.
        folder: Folder from which local workers import modules.

    Returns:
        The Python and the module path of local workers. The function keeps an existing ``PYSPARK_PYTHON``.
    """
    if not is_local(master):
        return {}
    # Without these variables, Spark starts the first python3 of PATH, which may not find the handler's module.
    paths = [path for path in (folder, env.get("PYTHONPATH", "")) if path]
    return {"PYSPARK_PYTHON": env.get("PYSPARK_PYTHON") or sys.executable, "PYTHONPATH": os.pathsep.join(paths)}


def find_java(env: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the path of the Java that Spark starts, or None, and the environment variable that selects it."""
    if home := env.get("JAVA_HOME"):
        path = Path(home) / "bin" / "java"
        return (path if os.access(path, os.X_OK) and path.is_file() else None), f"JAVA_HOME={home}"
    found = shutil.which("java", path=env.get("PATH", os.defpath))
    return (None if found is None else Path(found)), "PATH"


def java_says(java: Path, env: Mapping[str, str], more: Sequence[str] = ()) -> Java:
    """Run ``java -version`` with more options. Blocks for ``SECONDS`` at most."""
    done = ask([str(java), *more, "-version"], env)
    if isinstance(done, str):
        return Java(None, done)
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    for line in lines:
        # JAVA_TOOL_OPTIONS and incubating modules may print lines before the version.
        if found := _VERSION.search(line):
            return Java(int(found[1]), line)
    # The last line of a failure contains advice, and an earlier line the cause.
    return Java(None, next((line for line in lines if "rror" in line), lines[0] if lines else "no output"))


def ask(words: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str] | str:
    """Run a program without input. Blocks for ``SECONDS`` at most.

    Args:
        words: Program and arguments.
        env: Environment of the program.

    Returns:
        The finished program, or a text with the cause of a failure.
    """
    try:
        return subprocess.run(
            words,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:.0f} s"
    except OSError as error:
        return f"cannot run: {error.strerror}"


def size(text: str, unit: int = MIB) -> int | None:
    """Return the number of bytes of a text such as ``2g`` or ``512m``; None for a text of another form.

    Args:
        text: The size.
        unit: Unit of a number without a suffix, in bytes.

    Returns:
        The number of bytes, or None.
    """
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else int(found[1]) * _UNITS.get(found[2].lower(), unit)


def memory_limit(root: Path = Path("/")) -> tuple[int | None, str]:
    """Return the memory that all processes may use together.

    Args:
        root: Root folder of the system's files.

    Returns:
        The number of bytes (None = unknown), and a text that names the limit.
    """
    machine = _machine_memory(root)
    limits = [limit for limit in _container_limits(root) if machine is None or limit < machine]
    if limits:
        return min(limits), "the limit of this container"
    return machine, "this machine"


def _machine_memory(root: Path) -> int | None:
    try:
        found = re.search(r"^MemTotal:\s*(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _container_limits(root: Path) -> list[int]:
    groups = root / "sys/fs/cgroup"
    files = [groups / "memory.max", groups / "memory/memory.limit_in_bytes"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        # In version 2 of cgroups the group and its parents bound memory, and in version 1 the group of the memory
        # controller.
        place = Path(path.lstrip("/"))
        if not kinds:
            files += [groups / step / "memory.max" for step in (place, *place.parents)]
        elif "memory" in kinds.split(","):
            files.append(groups / "memory" / place / "memory.limit_in_bytes")
    found = []
    for file in files:
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):
            # The file is missing, or its text is "max".
            continue
    return found


class Jars(NamedTuple):
    """Jars of the Kafka connector.

    Attributes:
        found: Scala version, version and path of each jar, by name.
        missing: Names of the jars that the search did not find.
        package: Scala version and version of the connector that Spark downloads at the start of a session; None = the
            settings name no package.
        unseen: Jars that this process cannot read, including the jars of other machines.
    """

    found: Mapping[str, tuple[str, str, Path]]
    missing: tuple[str, ...]
    package: tuple[str, str] | None
    unseen: tuple[str, ...]


def spark_jar(home: Path) -> tuple[str, str] | None:
    """Return the versions of Scala and Spark in this folder; None if the folder has no Spark."""
    for path in sorted((home / "jars").glob("spark-core_*.jar")):
        if found := _CORE.fullmatch(path.name):
            return found[1], found[2]
    return None


def find_jars(home: Path, conf: Mapping[str, str]) -> Jars:
    """Find the connector's jars that a session with these settings would load. The function downloads no jar.

    The function searches Spark's own folder, ``spark.jars``, the driver's class path and ``spark.jars.packages``.
    """
    found: dict[str, tuple[str, str, Path]] = {}
    unseen: list[str] = []
    for path in _jars(home, conf, unseen):
        if (name := _NAME.fullmatch(path.name)) and path.is_file():
            found.setdefault(name[1], (name[2] or "", name[3], path))
    package = None
    for one in conf.get("spark.jars.packages", "").split(","):
        parts = one.strip().split(":")
        if len(parts) == 3 and parts[1].startswith(f"{CONNECTOR}_"):
            package = parts[1].removeprefix(f"{CONNECTOR}_"), parts[2]
    return Jars(found, tuple(name for name in _NEEDED if name not in found), package, tuple(unseen))


def _jars(home: Path, conf: Mapping[str, str], unseen: list[str]) -> Iterator[Path]:
    yield from sorted((home / "jars").glob("*.jar"))
    for named in filter(None, (word.strip() for word in conf.get("spark.jars", "").split(","))):
        place = urlsplit(named)
        path = Path(unquote(place.path) if place.scheme == "file" else named)
        if place.scheme not in ("", "file", "local") or not path.exists():
            unseen.append(named)
        else:
            yield path
    for word in filter(None, conf.get("spark.driver.extraClassPath", "").split(":")):
        path = Path(word)
        yield from sorted(path.parent.glob("*.jar")) if path.name == "*" else [path]
