"""``lanes spark replay`` parses its options, and refuses contradictions; one test runs a real Spark."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lanes
from lanes.cli import app as cli
from lanes.cli import kit
from lanes.cli.misuse import Misuse
from lanes.process import EXIT_HALTED
from lanes_spark import KafkaTopic, ParquetTable
from lanes_spark.cli.commands import source_of, spark_session
from lanes_spark.cli.options import bound, load, numbers, pairs, settings_of
from lanes_spark.driver.selection import Bound
from memsource import check_files
from tests.spark.conftest import need_java
from tests.spark.rows import rows
from tests.spark.tables import write_table

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("spark", "replay", "--topic", "orders")

MODULE = """
import lanes

SETTINGS = lanes.Settings(concurrency=8, retry=lanes.Retry(attempts=1))

async def charge(message):
    if message.value == b"value-250":
        raise ValueError("no such customer")

async def look(message):
    with open("seen", "a") as file:
        file.write(f"{message.partition.id.number} {message.position}\\n")
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [("", None), ("7", [7]), ("0-3,9", [0, 1, 2, 3, 9]), ("5-5", [5])],
)
def test_options_take_numbers_and_ranges(text: str, found: list[int] | None) -> None:
    assert numbers("--slots", text) == found


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-99999999", "1,,2", "1-2-3", "٣"])
def test_a_text_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(lanes.ConfigError, match="--slots"):
        numbers("--slots", text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("120", 120),
        ("0=120,1=80", {0: 120, 1: 80}),
        ("2024-05-01T00:00:00+00:00", datetime(2024, 5, 1, tzinfo=UTC)),
    ],
)
def test_a_bound_of_a_replay_is_one_position_several_positions_or_a_time(text: str, found: Bound | None) -> None:
    assert bound("--from", text) == found


@pytest.mark.parametrize("text", ["x", "0=", "0=1,1", "=3", "-5", "0=a"])
def test_a_bound_that_is_no_position_and_no_time_is_refused(text: str) -> None:
    with pytest.raises(lanes.ConfigError, match=r"--from .*write a position"):
        bound("--from", text)


def test_a_function_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert load("--handler", "shop_of_test:look").__name__ == "look"
    found = settings_of("shop_of_test:SETTINGS")
    assert found is not None
    assert found.concurrency == 8
    assert settings_of("") is None
    for text, named in (
        ("shop_of_test", "write MODULE:NAME"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("shop_of_test:nothing", "has no 'nothing'"),
        ("shop_of_test:SETTINGS", "is a Settings; name a function"),
    ):
        with pytest.raises(lanes.ConfigError, match=named):
            load("--handler", text)
    with pytest.raises(lanes.ConfigError, match=r"is a function; name a lanes\.Settings"):
        settings_of("shop_of_test:look")


def source(**more: Any) -> Any:
    return source_of(
        **{"topic": "t", "tables": [], "servers": "", "options": {}, "columns": {}, "aligned": None, **more}
    )


def test_the_source_is_a_table_or_a_topic() -> None:
    table = source(tables=["a", "b"], columns={"key": "customer"})
    assert table == ParquetTable(path=["a", "b"], topic="t", columns={"key": "customer"})
    options = {"kafka.security.protocol": "SSL"}
    assert source(servers="h:1", options=options) == KafkaTopic(servers="h:1", topic="t", options=options)
    assert not source(servers="h:1", aligned=False).aligned
    for wrong in ({}, {"tables": ["a"], "servers": "h:1"}):
        with pytest.raises(Misuse, match="needs either --table PATH or --server HOST:PORT"):
            source(**wrong)
    with pytest.raises(Misuse, match="takes no -X with --table"):
        source(tables=["a"], options=options)
    with pytest.raises(Misuse, match="takes no --column with --server"):
        source(servers="h:1", columns={"key": "customer"})


def test_the_error_for_a_value_without_a_name_hides_the_value() -> None:
    assert pairs("-X", ["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    with pytest.raises(lanes.ConfigError, match="-X '': write NAME=VALUE") as refused:
        pairs("-X", ["=canary5e1f"])
    assert "canary5e1f" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"failOnDataLoss": "false"}, "failOnDataLoss=false: Spark would skip messages that the topic has lost"),
        ({"FAILONDATALOSS": " False"}, "without an error; remove FAILONDATALOSS"),
        ({"minPartitions": "9"}, "minPartitions=9: several tasks would read one partition"),
        ({"maxRecordsPerPartition": "9"}, "aligned=False for a shuffle"),
        ({"startingOffsets": "latest"}, "startingOffsets, but the arguments of the replay determine"),
        ({"kafka.bootstrap.servers": "h:2"}, "kafka.bootstrap.servers, but the arguments of the replay determine"),
        ({"kafka.client.id": 5}, "is a int: write the value as a string"),
    ],
)
def test_options_of_the_connector_that_break_promises_are_refused(options: Any, named: str) -> None:
    with pytest.raises(lanes.ConfigError, match=named):
        KafkaTopic(servers="h:1", topic="orders", options=options)


def test_options_that_split_partitions_are_accepted_with_a_shuffle() -> None:
    options = {"minPartitions": "9", "failOnDataLoss": "true", "kafka.sasl.jaas.config": "canary5e1f"}
    topic = KafkaTopic(servers="h:1", topic="orders", options=options, aligned=False)
    assert "canary5e1f" not in repr(topic)
    with pytest.raises(lanes.ConfigError, match="servers='': give host:port"):
        KafkaTopic(servers="", topic="orders")
    with pytest.raises(lanes.ConfigError, match="topic is empty"):
        KafkaTopic(servers="h:1", topic="")


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, str]:
    """Run `lanes …` in this process; return its exit status and its stderr."""
    monkeypatch.setattr(sys, "argv", ["lanes", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


def test_the_spark_command_prints_one_line_about_a_wrong_argument(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = command(capsys, monkeypatch, *NEEDED, "--handler", "nothing", "--table", "t")
    assert (status, said.count("\n")) == (3, 1)
    assert "--handler 'nothing': write MODULE:NAME" in said
    status, said = command(capsys, monkeypatch, *NEEDED, "--table", "t")
    assert status == 64
    assert "--handler" in said


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("replay", ["--table", "t", "--server", "h:1"], "needs either --table PATH or --server HOST:PORT"),
        ("replay", ["--table", "t", "-X", "a=b"], "takes no -X with --table"),
        ("replay", ["--server", "h:1", "--column", "a=b"], "takes no --column with --server"),
        ("replay", ["--table", "t", "--only", "unfinished"], "needs both --only STATE and --from-journal DIR"),
        ("replay", ["--server", "h:1", "--tasks", "4"], "takes no --tasks without --no-aligned"),
        ("replay", ["--table", "t", "--aligned", "--tasks", "4"], "takes no --tasks without --no-aligned"),
        ("stream", ["--server", "h:1", "--checkpoint", "c", "--tasks", "4"], "takes no --tasks without --no-aligned"),
        ("audit", ["--column", "a=b"], "needs --table PATH or --server HOST:PORT with"),
    ],
)
def test_options_that_contradict_each_other_end_as_in_every_command(
    kind: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ["journal"] if kind == "audit" else ["--topic", "t", "--handler", "os.path:join"]
    status, said = command(capsys, monkeypatch, "spark", kind, *needed, *options)
    assert (status, said.count("\n")) == (64, 1)
    assert said.startswith(f"lanes: `lanes spark {kind}` {words}")
    assert said.endswith(f"; run `lanes spark {kind} --help`\n")


def test_a_session_that_cannot_be_stopped_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def stop(self) -> None:
            raise ConnectionRefusedError(111, "Connection refused")

    class Builder:
        def config(self, *named: str) -> Builder:
            return self

        appName = master = config  # noqa: N815 (as Spark calls it)

        def getOrCreate(self) -> Session:  # noqa: N802
            return Session()

    monkeypatch.setattr("pyspark.sql.SparkSession", SimpleNamespace(builder=Builder()))
    # The command sets the environment of the workers.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(lanes.SourceError, match="the JVM is gone"), spark_session("local[1]", {}):
        raise lanes.SourceError("the JVM is gone")


def test_the_command_without_pyspark_names_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == "pyspark" else found(name))
    status, said = command(capsys, monkeypatch, *NEEDED, "--handler", "shop:charge", "--table", "t")
    remedy = "pip install '.[cli,spark]' in the checkout of lanes"
    assert (status, said) == (3, f"lanes: `lanes spark` needs pyspark: {remedy}\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_table_is_replayed_by_the_command(tmp_path: Path) -> None:
    need_java()
    write_table(tmp_path / "table", [rows(300)[start::3] for start in range(3)])
    (tmp_path / "shop.py").write_text(MODULE)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = "import sys; from lanes.cli.app import main; sys.argv[0] = 'lanes'; main()"
        more = ["--table", "table", "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}
        return subprocess.run(
            [sys.executable, "-c", script, *NEEDED, *more, "--settings", "shop:SETTINGS", *arguments],
            cwd=tmp_path,
            env={**os.environ, **paths},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    more = ["--checkpoint", "checkpoint", "--journal", "journal"]
    done = run("--handler", "shop:look", "--partitions", "1-2", "--from", "100", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reshard: repartitionById(8, " in done.stdout
    assert "100 delivered, 100 finished, 0 of them dead-lettered, 200 skipped; 1 batches" in done.stdout
    seen = sorted(tuple(map(int, line.split())) for line in (tmp_path / "seen").read_text().splitlines())
    assert seen == [(partition, offset) for partition in (1, 2) for offset in range(100, 200, 2)]
    journaled = check_files([tmp_path / "journal"])
    assert journaled.status == 0, journaled.text
    assert "messages: 100," in journaled.text
    halted = run("--handler", "shop:charge")
    assert halted.returncode == EXIT_HALTED, halted.stdout + halted.stderr
    assert "ValueError: no such customer" in halted.stderr.splitlines()[-1]
