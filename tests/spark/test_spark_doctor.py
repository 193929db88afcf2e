"""`lanes doctor spark` in environments that are made up: no JVM, and no Java either."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from lanes.cli import app as cli
from lanes.cli.doctor import Check
from lanes_spark.cli import machine
from lanes_spark.cli.doctor import PACKAGES, examine
from lanes_spark.cli.machine import find_java, spark_conf

ROOT = Path(__file__).resolve().parents[2]
VERSION = "4.3.0"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def java(folder: Path, says: str = 'openjdk version "17.0.9" 2023-10-17', more: str = "") -> dict[str, str]:
    """An environment with a script as its Java."""
    program(folder / "jdk" / "bin" / "java", f"{more}\necho '{says}' >&2")
    return {"JAVA_HOME": str(folder / "jdk"), "PATH": os.defpath}


def spark(folder: Path, *jars: str, version: str = VERSION) -> dict[str, str]:
    """An environment whose Spark consists of empty jar files."""
    (folder / "spark" / "jars").mkdir(parents=True)
    for jar in (f"spark-core_2.13-{version}.jar", *jars):
        (folder / "spark" / "jars" / jar).touch()
    return {"SPARK_HOME": str(folder / "spark")}


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which nothing is missing."""
    monkeypatch.setattr(importlib.metadata, "version", versions({"pyspark": VERSION}))
    return {**java(tmp_path), **spark(tmp_path, *CONNECTOR), "PYTHONPATH": os.pathsep.join(sys.path)}


def versions(given: Mapping[str, str | None]) -> Any:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = given.get(name, "")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found or real(name)

    return version


CONNECTOR = (
    f"spark-sql-kafka-0-10_2.13-{VERSION}.jar",
    f"spark-token-provider-kafka-0-10_2.13-{VERSION}.jar",
    "kafka-clients-3.9.2.jar",
    "commons-pool2-2.13.1.jar",
)


def look(env: Mapping[str, str], **more: Any) -> dict[str, Check]:
    return {check.name: check for check in examine(env=env, **more)}


def test_a_complete_environment_passes_all_checks(env: dict[str, str], tmp_path: Path) -> None:
    found = look(env, checkpoint=str(tmp_path / "new" / "checkpoint"), kafka=True)
    assert {name: check for name, check in found.items() if check.ok is not True} == {}
    assert all(check.detail and not check.remedy for check in found.values())
    assert [*found] == [
        *PACKAGES,
        "Spark",
        "Java",
        "Kafka connector",
        "Python of the workers",
        "memory",
        "settings of Spark",
        "checkpoint",
    ]
    assert not (tmp_path / "new").exists()


# --- Java


@pytest.mark.parametrize(
    ("says", "ok", "words"),
    [
        ('openjdk version "17.0.9" 2023-10-17', True, "17.0.9"),
        ('java version "21" 2023-09-19 LTS', True, '"21"'),
        ('openjdk version "25-ea" 2025-09-16', True, "25-ea"),
        ('openjdk version "11.0.22" 2024-01-16', False, "11.0.22.*Spark needs 17 or newer"),
        ('java version "1.8.0_391"', False, "1.8.0_391.*Spark needs 17 or newer"),
        ("Error: could not open jvm.cfg", False, "could not open jvm.cfg"),
    ],
)
def test_the_version_of_java_is_reported(env: dict[str, str], tmp_path: Path, says: str, ok: bool, words: str) -> None:
    found = look(env | java(tmp_path, says, "echo Picked up JAVA_TOOL_OPTIONS: -Dversion=9 >&2"))["Java"]
    assert found.ok is ok
    assert re.search(words, found.detail)
    assert str(tmp_path / "jdk") in found.detail
    assert bool(re.search("install Java 17 or newer.*JAVA_HOME", found.remedy)) is not ok


def test_a_java_without_the_modules_that_spark_needs_is_reported(env: dict[str, str], tmp_path: Path) -> None:
    lacks = 'case "$*" in *jdk.incubator.vector*) echo "java.lang.module.FindException: Module jdk.incubator.vector'
    found = look(env | java(tmp_path, more=f'{lacks} not found, Error" >&2; exit 1;; esac'))["Java"]
    assert found.ok is False
    assert "lacks a module that Spark needs (java.lang.module.FindException" in found.detail


def test_a_missing_java_is_reported(env: dict[str, str], tmp_path: Path) -> None:
    found = look(env | {"JAVA_HOME": str(tmp_path)})["Java"]
    assert (found.ok, found.detail) == (False, f"JAVA_HOME={tmp_path} has no working bin/java")
    assert found.remedy.startswith("unset JAVA_HOME, or install Java 17")
    found = look(env | {"JAVA_HOME": "", "PATH": str(tmp_path)})["Java"]
    assert (found.ok, found.detail) == (False, "PATH has no java")
    home = env["JAVA_HOME"]
    assert find_java({"PATH": f"{home}/bin"}) == (Path(home) / "bin" / "java", "PATH")


def test_a_java_that_never_answers_is_given_up(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SECONDS", 0.2)
    found = look(env | java(tmp_path, more="exec sleep 100"))["Java"]
    assert (found.ok, "no answer within" in found.detail) == (False, True)


# --- packages


def test_the_oldest_accepted_versions_equal_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["spark"]
    asked = {one.name: next(iter(one.specifier)).version for one in map(Requirement, extra)}
    assert asked == {name: ".".join(map(str, least)) for name, least in PACKAGES.items()}


def test_old_and_missing_packages_are_reported(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", versions({"pyspark": "3.5.8", "pandas": None}))
    found = look(env)
    assert found["pyspark"] == Check("pyspark", False, "3.5.8, but 4.2 is needed", "pip install 'pyspark>=4.2'")
    assert found["pandas"] == Check("pandas", False, "not installed", "pip install '.[spark]' in the checkout of lanes")
    assert found["Spark"].ok is False
    assert found["Spark"].detail.endswith(", and pyspark is 3.5.8")
    assert "pip install 'pyspark==4.3.0'" in found["Spark"].remedy


def test_a_spark_home_without_spark_is_reported(env: dict[str, str], tmp_path: Path) -> None:
    found = look(env | {"SPARK_HOME": str(tmp_path / "nowhere")})
    assert found["Spark"].ok is False
    assert found["Spark"].remedy.startswith("unset SPARK_HOME")


# --- the connector


@pytest.mark.parametrize(
    ("jars", "conf", "ok", "words"),
    [
        ((), {}, False, "spark.jars and spark.jars.packages have no connector"),
        (CONNECTOR, {}, True, CONNECTOR[0]),
        (CONNECTOR[:1] + CONNECTOR[2:], {}, False, "but not spark-token-provider-kafka-0-10"),
        (CONNECTOR[:2], {}, False, "but not kafka-clients, commons-pool2"),
        (
            (CONNECTOR[0].replace("2.13", "2.12"), *CONNECTOR[1:]),
            {},
            False,
            "the jar is for Scala 2.12, and Spark has Scala 2.13",
        ),
        (
            (CONNECTOR[0].replace("4.3", "4.2"), *CONNECTOR[1:]),
            {},
            None,
            "the jar is for Spark 4.2.0, and this is Spark 4.3.0",
        ),
        ((), {"spark.jars.packages": f"a:b:1,org.apache.spark:spark-sql-kafka-0-10_2.13:{VERSION}"}, True, "fetches"),
        ((), {"spark.jars.packages": "org.apache.spark:spark-sql-kafka-0-10_2.12:4.3.0"}, False, "Scala 2.12"),
        (
            (),
            {"spark.jars": "s3a://lake/connector.jar"},
            None,
            "s3a://lake/connector.jar, which this machine does not see",
        ),
        ((), {"spark.jars": "/nowhere/connector.jar"}, None, "/nowhere/connector.jar, which this machine does not see"),
    ],
)
def test_the_connector_is_searched_where_spark_searches(
    tmp_path: Path, env: dict[str, str], jars: Sequence[str], conf: dict[str, str], ok: bool | None, words: str
) -> None:
    (tmp_path / "b").mkdir()
    found = look(env | spark(tmp_path / "b", *jars), conf=conf, kafka=True)["Kafka connector"]
    assert found.ok is ok
    assert words in found.detail
    wanted = "" if ok else "spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:4.3.0"
    assert wanted in found.remedy
    assert bool(found.remedy) is not ok


def test_a_connector_elsewhere_is_found_and_none_is_needed_for_tables(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "b").mkdir()
    env = env | spark(tmp_path / "b")
    there = [tmp_path / "with space" / jar for jar in CONNECTOR]
    there[0].parent.mkdir()
    for jar in there:
        jar.touch()
    assert look(env)["Kafka connector"].ok is None
    assert look(env, kafka=True)["Kafka connector"].ok is False
    for conf in (
        {"spark.jars": ",".join(map(str, there))},
        {"spark.jars": ",".join(jar.as_uri() for jar in there)},
        {"spark.driver.extraClassPath": f"{there[0].parent}/*"},
    ):
        assert look(env, conf=conf, kafka=True)["Kafka connector"].ok is True


# --- workers


@pytest.mark.parametrize(
    ("script", "words", "remedy"),
    [
        ('lanes:{"python": [3, 9, 1], "missing": [], "lanes": "0.1.0"}', "3.9.1.*of one minor version", sys.executable),
        (
            'lanes:{"python": HERE, "missing": ["lanes"], "lanes": null}',
            "has no lanes",
            "pip install '.[spark]' in the",
        ),
        ('lanes:{"python": HERE, "missing": [], "lanes": "0.0.1"}', "lanes-runtime 0.0.1, and this", "pip install"),
        ("nonsense", "this Python ended with status 0: no output", sys.executable),
    ],
)
def test_the_python_of_the_workers_is_compared_with_this_one(
    env: dict[str, str], tmp_path: Path, script: str, words: str, remedy: str
) -> None:
    here = json.dumps(list(sys.version_info[:3]))
    path = program(tmp_path / "python", f"echo welcome\necho '{script.replace('HERE', here)}'")
    found = look(env | {"PYSPARK_PYTHON": str(path)})["Python of the workers"]
    assert found.ok is (None if "0.0.1" in script else False)
    assert re.search(words, found.detail)
    assert str(path) in found.detail
    assert remedy in found.remedy


def test_a_python_that_does_not_run_is_reported(env: dict[str, str], tmp_path: Path) -> None:
    found = look(env | {"PYSPARK_PYTHON": "python-of-tomorrow"})["Python of the workers"]
    assert (found.ok, found.detail) == (False, "PYSPARK_PYTHON=python-of-tomorrow: no such program")
    broken = program(tmp_path / "python", "echo 'Fatal Python error: no encodings' >&2; exit 1")
    found = look(env | {"PYSPARK_PYTHON": str(broken)})["Python of the workers"]
    assert (found.ok, found.detail.partition(": ")[2]) == (
        False,
        "this Python ended with status 1: Fatal Python error: no encodings",
    )


def test_the_workers_of_a_cluster_count_as_not_checked(env: dict[str, str]) -> None:
    found = look(env, master="spark://h:7077")["Python of the workers"]
    assert found.ok is None
    assert "the workers of spark://h:7077 cannot be checked from here" in found.detail
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]} with lanes-runtime[spark]" in found.remedy
    found = look(env, conf={"spark.pyspark.python": "/opt/python"})["Python of the workers"]
    assert (found.ok, found.remedy) == (False, "set PYSPARK_PYTHON in the environment")


# --- memory


@pytest.mark.parametrize(
    ("conf", "ok", "words"),
    [
        ({}, True, r"driver 1\.0 GiB of heap, 2 Python workers .*: 1\.8 GiB of the 4\.0 GiB of this machine"),
        ({"spark.driver.memory": "3g"}, True, r"3\.8 GiB of the 4\.0 GiB"),
        ({"spark.driver.memory": "3500m"}, None, r"3\.4 GiB of heap.* 4\.2 GiB of the 4\.0"),
        ({"spark.driver.memory": "5g"}, False, r"driver 5\.0 GiB"),
        ({"spark.driver.memory": "a lot"}, False, "spark.driver.memory=a lot"),
    ],
)
def test_the_memory_of_a_session_is_compared_with_the_memory_of_the_machine(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, conf: dict[str, str], ok: bool | None, words: str
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: (4 * 1024**3, "this machine"))
    found = look(env, master="local[2]", conf=conf)["memory"]
    assert (found.ok, bool(found.remedy)) == (ok, not ok)
    assert re.search(words, found.detail)


def test_executors_need_room_for_their_python_beside_the_heap(env: dict[str, str]) -> None:
    conf = {"spark.executor.memory": "2g", "spark.executor.cores": "4"}
    found = look(env, master="yarn", conf=conf)["memory"]
    assert found.ok is None
    assert found.remedy.startswith("--conf spark.executor.memoryOverhead=1184m")
    assert look(env, master="yarn", conf=conf | {"spark.executor.memoryOverhead": "1g"})["memory"].ok is True
    assert look(env, master="spark://h:7077", conf=conf)["memory"].ok is True


@pytest.mark.parametrize("cores", ["²", "٣", "0", "-1", "all", "", "9" * 5_000])
def test_a_number_of_cores_that_is_no_number_is_a_finding(env: dict[str, str], cores: str) -> None:
    found = look(env, master="yarn", conf={"spark.executor.cores": cores})["memory"]
    assert (found.ok, found.detail) == (False, f"spark.executor.cores={cores}")
    assert found.remedy == "write a whole number, 1 or more"


def test_a_number_of_thousands_of_digits_does_not_end_the_command(env: dict[str, str]) -> None:
    long = "9" * 5_000
    assert look(env, master=f"local[{long}]", conf={"spark.driver.memory": f"{long}g"})["memory"].ok is False
    look(env, master=f"local-cluster[{long},1,1024]", conf={})


# --- settings


def test_settings_are_read_from_the_places_that_spark_reads(env: dict[str, str], tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(
        "# a comment\nspark.speculation   true\nspark.master=local[7]\n\nspark.a: 1  \nspark.b 2\nspark.c x\n"
    )
    env |= {
        "SPARK_CONF_DIR": str(conf),
        "PYSPARK_SUBMIT_ARGS": "--conf spark.b=3 --packages p:q:1 --conf spark.c=4 pyspark-shell",
    }
    assert spark_conf(tmp_path, env, {"spark.c": "5"}) == {
        "spark.speculation": "true",
        "spark.master": "local[7]",
        "spark.a": "1",
        "spark.b": "3",
        "spark.jars.packages": "p:q:1",
        "spark.c": "5",
    }
    found = look(env)["settings of Spark"]
    assert found.ok is False
    assert 'spark.speculation=true with effects="unfenced"' in found.detail
    assert look(env, effects="fenced")["settings of Spark"].ok is True
    assert look(env, conf={"spark.speculation": "false"})["settings of Spark"].ok is True
    assert "7 Python workers" in look(env)["memory"].detail
    (conf / "spark-defaults.conf").write_bytes(b"\xff")
    assert look(env)["settings of Spark"].ok is False


# --- the checkpoint


def test_the_check_of_a_checkpoint_tries_to_write(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checkpoint(path: object) -> Check:
        return look(env, checkpoint=str(path))["checkpoint"]

    begun = tmp_path / "begun"
    (begun / "commits").mkdir(parents=True)
    (begun / "metadata").touch()
    for name in ("0", "1", ".1.crc"):
        (begun / "commits" / name).touch()
    before = sorted(tmp_path.rglob("*"))
    assert checkpoint(tmp_path / "a" / "b").detail.endswith("/a/b: the replay will create the folder")
    assert checkpoint(tmp_path).detail.endswith(": has no replay")
    assert checkpoint(begun.as_uri()).detail.endswith("has a replay with 2 finished batches")
    found = checkpoint(begun / "metadata" / "x")
    assert (found.ok, found.detail.endswith("metadata is no folder")) == (False, True)
    assert checkpoint("s3a://lake/checkpoint").ok is None
    assert sorted(tmp_path.rglob("*")) == before

    def refuse(**more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = checkpoint(tmp_path)
    assert found.ok is False
    assert found.detail.endswith("Read-only file system")
    assert found.remedy == "name a folder that this user may write to"


# --- the command


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, str]:
    monkeypatch.setattr(sys, "argv", ["lanes", "doctor", "spark", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().out


def test_the_command_prints_its_findings_and_ends_like_other_checks(
    env: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    status, out = command(capsys, monkeypatch)
    assert status == 0
    assert "│ ok │ Java " in out
    monkeypatch.setenv("COLUMNS", "200")
    status, out = command(capsys, monkeypatch, "--conf", "spark.speculation=true")
    assert status == 3
    assert "│ FAILED │ settings of Spark " in out
    status, out = command(capsys, monkeypatch, "--json", "--kafka", "--checkpoint", "s3a://lake/c")
    document = json.loads(out)
    assert (status, document["usable"]) == (0, True)
    assert [check["ok"] for check in document["checks"]] == [True] * 9 + [None]


def test_without_a_usable_java_the_command_says_so(
    env: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (env | java(tmp_path, 'openjdk version "11.0.22"')).items():
        monkeypatch.setenv(name, value)
    status, out = command(capsys, monkeypatch, "--json")
    failed = [check for check in json.loads(out)["checks"] if check["ok"] is False]
    assert status == 3
    assert [check["name"] for check in failed] == ["Java"]
