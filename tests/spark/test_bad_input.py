"""A replay refuses wrong settings, checkpoints, jars and handlers with a clear error, before any JVM starts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any, cast

import pytest
from py4j.java_gateway import JavaClass, JavaPackage  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

import lanes
from lanes_spark import run_task
from lanes_spark.checkpoint import LOCK, CheckpointLock, lock_checkpoint, without_takeover
from lanes_spark.driver.batch import _loaded
from lanes_spark.driver.query import BatchRanges, RangeOptions
from lanes_spark.failures import as_ours, mapped_errors
from lanes_spark.plan import CHECKED, check_conf, settings_of
from lanes_spark.tables.kafka_topic import read_offset_ranges
from lanes_spark.task import task as spark_task
from tests.spark.rows import Seen, batches, expected, job, rows

ROOT = Path(__file__).resolve().parents[2]


# --- a checkpoint


class Uri:
    def __init__(self, path: str) -> None:
        self._scheme, _, self._path = path.rpartition("://")

    def getScheme(self) -> str:  # noqa: N802 (as Java calls it)
        return self._scheme or "file"

    def getAuthority(self) -> str | None:  # noqa: N802
        return self._path.partition("/")[0] if self._scheme else None

    def getPath(self) -> str:  # noqa: N802
        return self._path


class FakeSpark:
    """A fake session, which tells the lock the file system of a path."""

    def __init__(self, *, jvm: bool = True, conf: dict[str, str] | None = None, context: Any = None) -> None:
        self.conf = Conf(conf or {})
        self._jvm = self if jvm else None
        self._jsc = self
        self.org = self.apache = self.hadoop = self.fs = self
        if context is not None:
            self.sparkContext = self
            self._context = context

    def getConf(self) -> Any:  # noqa: N802
        return self._context

    def Path(self, path: str) -> FakeSpark:  # noqa: N802
        if path.startswith("strange"):
            raise ValueError("No FileSystem for scheme")
        self.path = path
        return self

    def hadoopConfiguration(self) -> None:  # noqa: N802
        pass

    def getFileSystem(self, conf: None) -> FakeSpark:  # noqa: N802
        return self

    def makeQualified(self, path: FakeSpark) -> FakeSpark:  # noqa: N802
        return self

    def toUri(self) -> Uri:  # noqa: N802
        return Uri(self.path)


class Conf(dict[str, str]):
    def set(self, name: str, value: str) -> None:
        self[name] = value

    def unset(self, name: str) -> None:
        del self[name]


def take(path: Path | str, **more: Any) -> CheckpointLock | None:
    return lock_checkpoint(FakeSpark(**more), "orders", str(path))  # type: ignore[arg-type]


def test_a_checkpoint_has_one_replay_at_a_time(tmp_path: Path) -> None:
    checkpoint = tmp_path / "deep" / "checkpoint"
    first = take(checkpoint)
    assert first is not None
    with pytest.raises(lanes.SourceError, match=r"orders: another replay uses the checkpoint .*/deep/checkpoint") as no:
        take(f"file://{checkpoint}")
    assert f"(process {os.getpid()} on " in str(no.value)
    assert (
        "and two replays would handle the same messages twice; wait until the other replay has ended, or stop it"
        in str(no.value)
    )
    other = take(tmp_path / "other")
    first.release()
    first.release()
    second = take(checkpoint)
    for held in (second, other):
        assert held is not None
        held.release()
    (checkpoint / LOCK).write_text("nonsense")
    third = take(checkpoint)
    assert third is not None
    assert json.loads((checkpoint / LOCK).read_text())["process"] == os.getpid()
    third.release()


def test_after_a_killed_replay_the_next_one_may_use_its_checkpoint(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from lanes_spark.checkpoint import _locked\n"
        f"lock = _locked('orders', Path({str(tmp_path)!r})); print('has it', flush=True); sys.stdin.read()"
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(lanes.SourceError, match=rf"\(process {other.pid} on "):
            take(tmp_path)
        other.kill()
    held = take(tmp_path)
    assert held is not None
    held.release()


def test_a_checkpoint_on_a_store_without_locks_is_not_locked(tmp_path: Path) -> None:
    assert take("s3a://lake/checkpoint") is None
    assert take("strange://lake/checkpoint") is None
    assert take(tmp_path / "none", jvm=False) is None
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "checkpoint"):
        with pytest.raises(lanes.ConfigError, match=r"checkpoint='.*file.*': the folder is not writable \(") as no:
            take(path)
        assert "name a folder that this user may write to" in str(no.value)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device): free some space, or name a folder on another disk"),
        (errno.EROFS, "Read-only file system): name a folder that this user may write to"),
    ],
)
def test_a_full_disk_is_reported_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(lanes.ConfigError) as no:
            take(tmp_path)
        assert str(no.value) == f"checkpoint={str(tmp_path)!r}: the folder is not writable ({remedy}"
    # The lock was released at once, although the error object still exists.
    held = take(tmp_path)
    assert held is not None
    held.release()


def test_a_lock_is_released_with_its_last_reference(tmp_path: Path) -> None:
    take(tmp_path)
    held = take(tmp_path)
    assert held is not None
    held.release()


@pytest.mark.parametrize("before", [{}, {"spark.sql.streaming.stopActiveRunOnRestart": "true"}])
def test_a_query_does_not_stop_another_one_and_the_setting_is_restored(before: dict[str, str]) -> None:
    spark: Any = FakeSpark(conf=dict(before))
    with contextlib.suppress(KeyError), without_takeover(spark):
        assert spark.conf == {"spark.sql.streaming.stopActiveRunOnRestart": "false"}
        raise KeyError
    assert spark.conf == before


@pytest.mark.parametrize("offset", [5, None, {"logOffset": 3}, {"orders": {"0": 4}}, "x", {"replay": "one"}])
def test_a_checkpoint_of_any_other_query_is_refused(offset: Any) -> None:
    options = RangeOptions(topic="orders", replay="one", spans={0: (0, 9)}, starts={}, cap=5, eras=()).encoded()
    reader = BatchRanges(options).streamReader(StructType([]))
    with pytest.raises(
        lanes.SourceError,
        match=r"orders: the checkpoint (belongs to another replay|belongs to a query that is not a replay)",
    ) as no:
        reader.latestOffset(offset, ReadMaxRows(5))
    assert "its own checkpoint" in str(no.value)


# --- settings


@pytest.mark.parametrize("rows", ["0", "-1", " -5"])
def test_batches_without_a_limit_of_rows_are_refused(rows: str) -> None:
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    assert name in CHECKED
    with pytest.raises(lanes.ConfigError, match=rf"{name}={rows.strip()}: without a limit .*; set {name} to 1 or more"):
        check_conf({name: rows}, "none")
    check_conf({name: "1"}, "none")
    check_conf({name: "10000"}, "none")


@pytest.mark.parametrize("name", CHECKED[2:])
def test_a_refused_setting_is_named_with_reason_and_remedy(name: str) -> None:
    with pytest.raises(lanes.ConfigError, match=rf"{name}=true: .+; set {name} to false"):
        check_conf({name: "true"}, "fenced")


@pytest.mark.parametrize(
    ("session", "context", "found"),
    [({}, {}, None), ({"spark.speculation": "false"}, {"spark.speculation": "true"}, "true"), ({}, None, None)],
)
def test_the_settings_of_the_context_decide_about_its_scheduling(session: Any, context: Any, found: str | None) -> None:
    spark: Any = FakeSpark(conf=session, context=context)
    assert settings_of(spark)["spark.speculation"] == found
    assert settings_of(spark).keys() == set(CHECKED)


# --- jars


@pytest.mark.parametrize("lacks", ["commons-pool2", "spark-token-provider-kafka-0-10", "kafka-clients"])
def test_a_jar_of_the_connector_that_is_missing_is_named(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lanes_spark.tables import kafka_topic

    class Name:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, part: str) -> Any:
            name = f"{self._name}.{part}".lstrip(".")
            if name in kafka_topic._CLASSES.values():
                missing = kafka_topic._CLASSES[lacks] == name
                return object.__new__(JavaPackage if missing else JavaClass)
            return Name(name)

    spark: Any = FakeSpark()
    spark._jvm = Name("")
    with pytest.raises(
        lanes.ConfigError, match=f"connector to Kafka: {lacks}; begin the session with spark.jars.packages=org."
    ):
        read_offset_ranges(spark, "orders", {})


# --- the handler


def test_a_handler_that_the_workers_cannot_load_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "shop_of_driver.py").write_text("def charge(message): pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        from shop_of_driver import charge  # type: ignore[import-not-found]

        payload = cast(Any, cloudpickle).dumps(job(charge))
        assert _loaded(payload).topic == "orders"
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["shop_of_driver"]
    with pytest.raises(lanes.ConfigError, match=r"loaded by the workers.*No module named 'shop_of_driver'") as no:
        _loaded(payload)
    assert sys.executable in str(no.value)
    assert "Send the modules by spark.submit.pyFiles, or install them for that Python" in str(no.value)


def test_a_handler_that_blocks_the_event_loop_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spark_task, "STANDS_AFTER", 0.02)
    seen = Seen()

    def told() -> list[str]:
        # On a busy machine, another process may delay the loop.
        said = [one.getMessage() for one in caplog.records]
        return [one for one in said if "has been blocked" in one and " in blocking" in one]

    async def blocking(message: lanes.Message) -> None:
        seen.note(message)
        if message.position == 4 and message.partition.id.number == 0:
            while not told():
                time.sleep(0.001)  # noqa: ASYNC251 (that is the mistake)

    out = list(run_task(batches(rows(60)), job(blocking)))
    assert out[-1].to_pylist()[0]["finished"] == 60
    assert seen.by_key == expected(rows(60))
    (said,) = told()
    assert said.startswith("orders on Spark: the event loop of a task has been blocked for 0 s or more. A handler")
    assert f"{__file__}:" in said
    assert said.endswith("Await there, or write a plain function, which runs in a thread")


class Inbox:
    """An inbox that is empty for the first ``looks`` calls."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def get(self, *, timeout: float) -> str:
        self._looks -= 1
        if self._looks < 0:
            return "event"
        raise Empty


@pytest.mark.parametrize(("answers", "told"), [(True, 0), (False, 1)])
def test_a_blocked_loop_is_reported_once(answers: bool, told: int, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Callable[[], None]] = []

    def call(answer: Callable[[], None]) -> None:
        asked.append(answer)
        if answers:
            answer()

    watch = spark_task.LoopWatch("orders", threading.current_thread(), call)
    for standstill in (1, 2):
        inbox: Any = Inbox(5)
        assert watch.get(inbox) == "event"
        assert len(caplog.records) == told * standstill
        for answer in asked:
            answer()


# --- what Spark says

JAVA = "An error occurred while calling o5.save.\n: org.apache.spark.SparkException: {}\n\tat org.X.x(X.scala:1)\n"
READING = (
    "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///lake/orders/b.parquet.  SQLSTATE: KD001\n"
    "Caused by: java.io.IOException: can not read class org.apache.parquet.format.PageHeader"
)


class FromJava(Py4JJavaError):  # type: ignore[misc]
    """An exception of py4j, without a JVM."""

    def __init__(self) -> None:
        Exception.__init__(self)

    def __str__(self) -> str:
        return JAVA.format(READING)


def reading() -> None:
    with mapped_errors("orders"):
        raise FromJava


def test_an_error_of_the_jvm_that_pyspark_does_not_know_is_one_line() -> None:
    with pytest.raises(lanes.SourceError, match=r"orders: Spark failed: FromJava: .*reading file") as said:
        reading()
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("text", "told", "remedy"),
    [
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11",
            "Python in worker has different version: 3.9",
            "PYSPARK_PYTHON",
        ),
        ("ModuleNotFoundError: No module named 'lanes_spark'", "No module named 'lanes_spark'", "PYSPARK_PYTHON"),
        ("Caused by: a.SparkException: Python worker exited unexpectedly (crashed)", "crashed", "memory"),
        (JAVA.format("Python worker failed to connect back."), "connect back", "PYSPARK_PYTHON"),
        (JAVA.format(READING), "file:///lake/orders/b.parquet. java.io.IOException: can not read", "restore the file"),
        (JAVA.format("[PATH_ALREADY_EXISTS] Path file:/r already exists."), "file:/r already exists", "results_to="),
        (JAVA.format("Cannot start query as another query with same id is already active."), "same id", "stop it"),
        (JAVA.format("Query [id = 9] terminated with exception: assertion failed"), "assertion failed", "from_="),
        (JAVA.format('No FileSystem for scheme "s3a"'), '"s3a"', "spark.jars.packages"),
    ],
)
def test_an_error_of_spark_has_a_remedy(text: str, told: str, remedy: str) -> None:
    said = str(as_ours("orders", "X", text))
    assert told in said
    assert remedy in said.partition(told)[2]
