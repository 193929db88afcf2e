"""Defines the command ``lanes doctor spark``, which checks this machine before a replay begins.

The command starts no session and leaves no file. It runs Java only to print its version, and the workers' Python only
to print versions and missing modules.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import typer

from lanes.cli.doctor import Check, conclude
from lanes.cli.kit import choice
from lanes.errors import ConfigError
from lanes_spark.cli import machine
from lanes_spark.cli.options import Effect, Spark, pairs
from lanes_spark.plan import CHECKED, Effects, check_conf

JAVA: Final = 17
"""Oldest version of Java that Spark 4 supports."""

PACKAGES: Final[Mapping[str, tuple[int, int]]] = {"pyspark": (4, 2), "pyarrow": (18, 0), "pandas": (2, 2)}
"""Oldest versions of the packages of the extra ``spark``."""

WORKER: Final = 200 * machine.MIB
"""Approximate memory of a Python worker with two Arrow batches, in bytes, without the handler's memory."""

_BESIDE: Final = 384 * machine.MIB
"""Minimum memory of a JVM outside its heap, in bytes, by the rule of Spark."""

_INCUBATING: Final = "--add-modules=jdk.incubator.vector"
"""Option of every JVM that Spark 4.3 starts. A reduced Java installation lacks the module of this option."""

_PROBE: Final = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print("lanes:" + json.dumps({
    "python": list(sys.version_info[:3]),
    "missing": [name for name in ("lanes", "lanes_spark", "pyarrow") if importlib.util.find_spec(name) is None],
    "lanes": version("lanes-runtime"),
}))
"""


def doctor(
    on: Spark,
    kafka: bool = typer.Option(False, "--kafka", help="Require the Kafka connector."),
    effects: Effect = "unfenced",
    checkpoint: str = typer.Option("", help="Folder that a replay will use.", metavar="PATH"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check this machine for Spark. Exit status: 0 = usable, 3 = not usable.

    The command starts no session and leaves no file behind. Java and the workers' Python must each answer within 20
    seconds.
    """
    found = examine(
        master=on.master,
        conf=pairs("--conf", on.conf),
        effects=choice("--effects", effects, Effects),
        kafka=kafka,
        checkpoint=checkpoint,
    )
    conclude(found, as_json=as_json)


def examine(
    *,
    master: str = "",
    conf: Mapping[str, str] | None = None,
    effects: Effects = "unfenced",
    kafka: bool = False,
    checkpoint: str = "",
    env: Mapping[str, str] | None = None,
) -> list[Check]:
    """Check this machine before a replay on Spark. Blocks for some seconds, 60 at most.

    Args:
        master: Spark master; "" = the setting of Spark, or else a local master.
        conf: Settings of the session.
        effects: Effects of the replay's handler, see ``lanes_spark.plan.Effects``.
        kafka: Whether the replay needs the Kafka connector.
        checkpoint: Folder of the replay; "" without a checkpoint.
        env: Environment of the session. Default: the environment of this process.

    Returns:
        One result for each check. A check fails if its program does not answer.
    """
    env = dict(os.environ if env is None else env)
    home = machine.spark_home(env)
    unread = ""
    try:
        settings = machine.spark_conf(home, env, conf or {})
    except (OSError, ValueError) as error:
        settings, unread = dict(conf or {}), str(error)
    master = master or settings.get("spark.master", "")
    checks = [
        *_packages(home),
        java_check(env),
        _connector(home, settings, wanted=kafka),
        _python(master, settings, env),
        _memory(master, settings),
        _settings(settings, effects, unread),
    ]
    if checkpoint:
        checks.append(_checkpoint(checkpoint))
    return checks


# --- Python's packages, and Spark's own files


def _packages(home: Path) -> list[Check]:
    checks = []
    for name, least in PACKAGES.items():
        version, needed = _version(name), ".".join(map(str, least))
        if version is None:
            check = Check(name, False, "not installed", "pip install '.[spark]' in the checkout of lanes")
        elif _numbers(version) < least:
            check = Check(name, False, f"{version}, but {needed} is needed", f"pip install '{name}>={needed}'")
        else:
            check = Check(name, True, version)
        checks.append(check)
    return [*checks, _home(home)]


def _home(home: Path) -> Check:
    jar = machine.spark_jar(home)
    if jar is None:
        remedy = "unset SPARK_HOME, or set it to a folder of Spark"
        return Check("Spark", False, f"{home}/jars has no spark-core", remedy)
    scala, version = jar
    ours = _version("pyspark") or version
    detail = f"{version}, Scala {scala}, in {home}"
    if _numbers(version) != _numbers(ours):
        remedy = f"unset SPARK_HOME, or pip install 'pyspark=={version}'"
        return Check("Spark", False, f"{detail}, and pyspark is {ours}", remedy)
    return Check("Spark", True, detail)


def java_check(env: Mapping[str, str]) -> Check:
    """Check that the Java of Spark exists, is new enough, and has the modules that Spark needs."""
    java, where = machine.find_java(env)
    remedy = f"install Java {JAVA} or newer, such as default-jre-headless, and set JAVA_HOME to its folder"
    if java is None:
        what = f"{where} has no working bin/java" if where != "PATH" else "PATH has no java"
        return Check("Java", False, what, remedy if where == "PATH" else f"unset JAVA_HOME, or {remedy}")
    said = machine.java_says(java, env)
    detail = f"{said.text}, {java} by {where}"
    if said.version is None:
        return Check("Java", False, f"{java} by {where}: {said.text}", remedy)
    if said.version < JAVA:
        return Check("Java", False, f"{detail}: Spark needs {JAVA} or newer", remedy)
    full = machine.java_says(java, env, [_INCUBATING])
    if full.version is None:
        found = f"{detail}: this Java lacks a module that Spark needs ({full.text})"
        return Check("Java", False, found, "install a full Java, such as that of the system's packages")
    return Check("Java", True, detail)


def _connector(home: Path, conf: Mapping[str, str], *, wanted: bool) -> Check:
    what = "Kafka connector"
    scala, version = machine.spark_jar(home) or ("2.13", importlib.metadata.version("pyspark"))
    jars = machine.find_jars(home, conf)
    get = (
        f"--conf spark.jars.packages=org.apache.spark:{machine.CONNECTOR}_{scala}:{version} lets Spark fetch it from "
        "Maven Central; without Internet, name the jars by --conf spark.jars=PATH,…"
    )
    if machine.CONNECTOR in jars.found:
        of, found, path = jars.found[machine.CONNECTOR]
        if jars.missing:
            return Check(what, False, f"found {path}, but not {', '.join(jars.missing)}", get)
        return _fits(what, f"{path}", (of, found), (scala, version), get)
    if jars.package is not None:
        detail = f"spark.jars.packages: Spark fetches {':'.join(jars.package)} when a session begins"
        return _fits(what, detail, jars.package, (scala, version), get)
    if jars.unseen:
        return Check(what, None, f"spark.jars names {', '.join(jars.unseen)}, which this machine does not see", get)
    where = f"{home}/jars, spark.jars and spark.jars.packages have no connector"
    if wanted:
        return Check(what, False, where, get)
    return Check(what, None, f"{where}: lanes spark can replay tables, but no Kafka topic", get)


def _fits(what: str, detail: str, found: tuple[str, str], spark: tuple[str, str], get: str) -> Check:
    if found[0] != spark[0]:
        return Check(what, False, f"{detail}: the jar is for Scala {found[0]}, and Spark has Scala {spark[0]}", get)
    if _numbers(found[1]) != _numbers(spark[1]):
        return Check(what, None, f"{detail}: the jar is for Spark {found[1]}, and this is Spark {spark[1]}", get)
    return Check(what, True, detail)


# --- workers


def _python(master: str, conf: Mapping[str, str], env: Mapping[str, str]) -> Check:
    what = "Python of the workers"
    if "spark.pyspark.python" in conf and "PYSPARK_PYTHON" not in env:
        why = f"spark.pyspark.python={conf['spark.pyspark.python']}: only spark-submit reads this setting"
        return Check(what, False, why, "set PYSPARK_PYTHON in the environment")
    if not machine.is_local(master):
        named = env.get("PYSPARK_PYTHON", "")
        detail = f"PYSPARK_PYTHON={named}" if named else "PYSPARK_PYTHON is not set: workers use python3 of their PATH"
        here = ".".join(map(str, sys.version_info[:2]))
        remedy = f"install Python {here} with lanes-runtime[spark] {_lanes()} and the handler's modules there"
        return Check(what, None, f"{detail}; the workers of {master} cannot be checked from here", remedy)
    added = machine.worker_environment(master, env, os.getcwd())
    python = added["PYSPARK_PYTHON"]
    found = _asked(python, {**env, **added})
    if isinstance(found, str):
        return Check(what, False, f"PYSPARK_PYTHON={python}: {found}", f"PYSPARK_PYTHON={sys.executable}")
    return _worker(what, python, found)


def _worker(what: str, python: str, found: Mapping[str, Any]) -> Check:
    version = ".".join(map(str, found["python"]))
    detail = f"{version}, {python}"
    if tuple(found["python"][:2]) != sys.version_info[:2]:
        ours = ".".join(map(str, sys.version_info[:3]))
        why = f"{detail}: this process has {ours}, and both must be of one minor version"
        return Check(what, False, why, f"PYSPARK_PYTHON={sys.executable}")
    if found["missing"]:
        why = f"{detail} has no {', '.join(found['missing'])}"
        return Check(what, False, why, f"{python} -m pip install '.[spark]' in the checkout of lanes {_lanes()}")
    if found["lanes"] != _lanes():
        why = f"{detail} has lanes-runtime {found['lanes']}, and this process {_lanes()}"
        return Check(what, None, why, f"{python} -m pip install '.[spark]' in the checkout of lanes {_lanes()}")
    return Check(what, True, f"{detail}, lanes-runtime {found['lanes']}")


def _asked(python: str, env: Mapping[str, str]) -> Mapping[str, Any] | str:
    """Run a Python interpreter for its version and packages.

    Return the answer, or a text with the cause of a failure.
    """
    if shutil.which(python, path=env.get("PATH", os.defpath)) is None:
        return "no such program"
    done = machine.ask([python, "-c", _PROBE], env)
    if isinstance(done, str):
        return done
    # Start-up code may print lines before the answer.
    answer = re.search(r"^lanes:(\{.*\})$", done.stdout, re.MULTILINE)
    if answer is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"this Python ended with status {done.returncode}: {lines[-1] if lines else 'no output'}"
    found: Mapping[str, Any] = json.loads(answer[1])
    return found


def _memory(master: str, conf: Mapping[str, str]) -> Check:
    what = "memory"
    driver = machine.size(conf.get("spark.driver.memory", "1g"))
    executor = machine.size(conf.get("spark.executor.memory", "1g"))
    if driver is None or executor is None:
        name = "spark.driver.memory" if driver is None else "spark.executor.memory"
        return Check(what, False, f"{name}={conf[name]}", "write a size such as 2g or 512m")
    if not machine.is_local(master):
        return _executor_memory(what, master, conf, executor)
    cores = machine.cores_of(master)
    needed = driver + max(_BESIDE, driver // 10) + cores * WORKER
    limit, bound = machine.memory_limit()
    detail = (
        f"driver {_gib(driver)} of heap, {cores} Python workers of about {_gib(WORKER)} and the handler's memory: "
        f"{_gib(needed)}"
    )
    if limit is None:
        return Check(what, None, detail, "compare this with the memory of this machine, which is unknown")
    detail += f" of the {_gib(limit)} of {bound}"
    if driver > limit:
        return Check(what, False, detail, f"--conf spark.driver.memory=… below {_gib(limit)}")
    if needed > limit:
        remedy = (
            "--master 'local[N]' with fewer cores, or less spark.driver.memory: processes without memory are killed"
        )
        return Check(what, None, detail, remedy)
    return Check(what, True, detail)


def _executor_memory(what: str, master: str, conf: Mapping[str, str], heap: int) -> Check:
    text = conf.get("spark.executor.cores", "1").strip()
    # Do not use int(), which also accepts digits of other scripts, and refuses a very long number.
    cores = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not cores:
        return Check(what, False, f"spark.executor.cores={text}", "write a whole number, 1 or more")
    beside = machine.size(conf.get("spark.executor.memoryOverhead", "")) or max(_BESIDE, heap // 10)
    python = machine.size(conf.get("spark.executor.pyspark.memory", "")) or 0
    detail = (
        f"executor {_gib(heap)} of heap and {_gib(beside + python)} outside the heap, for {cores} Python workers of "
        f"about {_gib(WORKER)} and the handler's memory"
    )
    # Only YARN and Kubernetes bound a container by the sum of heap and overhead.
    if master.startswith(("yarn", "k8s")) and cores * WORKER > beside + python:
        wanted = (cores * WORKER + _BESIDE) // machine.MIB
        remedy = f"--conf spark.executor.memoryOverhead={wanted}m: executors beyond their memory are killed"
        return Check(what, None, detail, remedy)
    return Check(what, True, detail)


# --- settings and the checkpoint


def _settings(conf: Mapping[str, str], effects: Effects, unread: str) -> Check:
    what = "settings of Spark"
    if unread:
        return Check(what, False, unread, "correct spark-defaults.conf or PYSPARK_SUBMIT_ARGS")
    try:
        check_conf({name: conf.get(name) for name in CHECKED}, effects)
    except ConfigError as error:
        return Check(what, False, str(error))
    return Check(what, True, f"Spark keeps the order and skips no row, with effects={effects}")


def _checkpoint(named: str) -> Check:
    what = "checkpoint"
    place = urlsplit(named)
    if place.scheme not in ("", "file"):
        return Check(what, None, f"{named}: only a session can check it", "make sure that the driver may write to it")
    folder = Path(unquote(place.path) if place.scheme == "file" else named)
    remedy = "name a folder that this user may write to"
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return Check(what, False, f"{named}: {there} is no folder", remedy)
    try:
        # The file is deleted when it is closed, and on most systems it never has a name.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Check(what, False, f"{named}: {there} is not writable: {error.strerror}", remedy)
    if there != folder:
        return Check(what, True, f"{named}: the replay will create the folder")
    batches = [path for path in folder.glob("commits/*") if path.name.isdecimal()]
    if (folder / "metadata").exists() or batches:
        return Check(what, True, f"{named}: has a replay with {len(batches)} finished batches")
    return Check(what, True, f"{named}: has no replay")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lanes() -> str:
    return importlib.metadata.version("lanes-runtime")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB"
