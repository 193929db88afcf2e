"""Parts of the demo on Spark, without Spark: its settings, its report, its command, and its kills of workers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from demo import DemoError
from demo.__main__ import main
from demo.history import Verdict
from demo.places import places
from demo.progress import Progress
from demo.spark import SparkConfig, SparkReport, checkpoint
from demo.spark.config import VARIABLE, ReplayConfig
from demo.spark.drivers import Drivers
from demo.spark.judge import Judgement
from demo.spark.tables import Tables
from demo.workers.service import Service
from tests.components import PostgresServer

KAFKA, POSTGRES = "127.0.0.1:9092", "postgresql://me:secret@127.0.0.1:5432/test"
JUDGED: dict[str, Any] = {
    "lost": [],
    "doubled": [],
    "violations": [],
    "foreign": [],
    "states": [],
    "dead_letters": [("p", 1)],
    "repeats": 7,
}


def config(**changes: Any) -> SparkConfig:
    return SparkConfig(**{"kafka": KAFKA, "postgres": POSTGRES, **changes})


def report(judged: dict[str, Any] | None = None, **changes: Any) -> SparkReport:
    usual: dict[str, Any] = {
        "events": 1_000,
        "keys": 90,
        "seconds": 20.0,
        "judged": Judgement(**{**JUDGED, **(judged or {})}),
        "poison": [("p", 1)],
        "drivers": 2,
        "workers_killed": 1,
        "drivers_killed": 1,
        "missed": [],
        "tried_again": 1,
        "batches": 6,
        "interrupted": 1,
        "resumed": 1,
        "rss_mb": 120.0,
        "audit": "pass",
        "verdicts": [Verdict("PerKeyOrder", "held", "")],
        "duplicates": {"restart": 40, "held": 0},
    }
    return SparkReport(**{**usual, **changes})


def test_the_last_line_of_the_spark_demo_has_exactly_its_figures() -> None:
    assert json.loads(report().json()) == {
        "rows": 1_000,
        "seconds": 20.0,
        "rows_per_s": 50.0,
        "order_violations": 0,
        "lost": 0,
        "double_effects": 0,
        "resumed_batches": 1,
        "audit": "pass",
    }
    assert report().ok
    assert all(good for _, _, good in report().rows())


def test_files_that_were_not_written_to_the_end_are_named_and_break_nothing() -> None:
    from demo.spark.driver import told as said
    from lanes_spark import Audit

    audit = Audit(verdicts=(), rows=9, processes=2, duplicates={}, unfinished=1_200, findings=cast(Any, None))
    unfinished = json.loads(json.dumps(said(audit)))["unfinished"]
    for found, shown in ((report(unfinished=unfinished), "1,200, not judged"), (report(), "0")):
        assert [row for row in found.rows() if row[0] == "unfinished files"] == [("unfinished files", shown, True)]
        assert found.ok
    assert report(unfinished=unfinished).json() == report().json()


@pytest.mark.parametrize(
    ("judged", "changes", "words"),
    [
        ({"lost": [("a", 1)]}, {}, "lost: 1 (neither stored nor dead-lettered): a step 1"),
        ({"doubled": [("a", 1, 2)]}, {}, "double effects: 1 (stored more than once): a step 1"),
        ({"violations": [("a", 1)]}, {}, "order violations: 1 (after a later step of its case): a step 1"),
        ({"foreign": [("x", 1)]}, {}, "foreign: 1"),
        ({"states": [("a", 1)]}, {}, "states: 1"),
        ({"dead_letters": []}, {}, "dead letters missing: 1"),
        ({"dead_letters": [("p", 1), ("q", 1)]}, {}, "dead letters unexpected: 1"),
        ({}, {"missed": ["a worker was not killed"]}, "kills: a worker was not killed"),
        ({}, {"tried_again": 0}, "kills: a worker was killed in a task, and no task was tried again"),
        ({}, {"resumed": 0}, "resumed batches: 0 of 1"),
        ({}, {"audit": "unproven"}, "audit: unproven"),
        ({}, {"audit": "none"}, "audit: none"),
        ({}, {"verdicts": [Verdict("NoOverlap", "violated", "2 violations")]}, "audit NoOverlap: violated: 2"),
        ({}, {"failure": "no luck"}, "ended early: no luck"),
    ],
)
def test_broken_promises_are_named(judged: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    broken = report(judged, **changes)
    assert not broken.ok
    [line] = broken.broken
    assert line.startswith(words)


def test_the_last_line_counts_lost_and_doubled_effects_and_violations() -> None:
    judged = {"lost": [("a", 1), ("a", 2)], "doubled": [("b", 1, 2)], "violations": [("c", 1)]}
    found = json.loads(report(judged, resumed=0, audit="violated").json())
    assert (found["rows"], found["lost"], found["double_effects"], found["order_violations"]) == (998, 2, 2, 1)
    assert (found["resumed_batches"], found["audit"]) == (0, "violated")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kafka": "nonsense"}, "--kafka: must be the address"),
        ({"postgres": "me:secret"}, "--postgres: must be the URL"),
        ({"postgres": "postgresql://me:secret%zz@127.0.0.1/test"}, "write @, / and % in a password as %40, %2F and"),
        ({"postgres": "postgresql://me:se@secret@127.0.0.1/test"}, "--postgres: must be the URL"),
        ({"postgres": "postgresql://me:secret/@127.0.0.1/test"}, "--postgres: must be the URL"),
        ({"postgres": "postgresql://me:secret%00@127.0.0.1/test"}, "--postgres: must be the URL"),
        ({"jars": ["/no/such.jar"]}, "--jars: /no/such.jar: no such file"),
        ({"events": 0}, "events=0"),
        ({"partitions": 0}, "partitions=0: must be 1 to 100"),
        ({"batches": 0}, "batches=0"),
        ({"cores": 0}, "cores=0"),
        ({"connections": 0}, "connections=0"),
        ({"kill_driver_at": 1.0}, "kill_driver_at=1.0"),
        ({"kill_worker_at": 0.0}, "kill_worker_at=0.0"),
        ({"latency": -1.0}, "latency=-1.0"),
        ({"stall_timeout": float("inf")}, "stall_timeout=inf"),
        ({"driver_command": "python"}, "driver_command='python'"),
        ({"name": "a b"}, "name='a b'"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DemoError) as refused:
        config(**changes)
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


def test_any_password_can_be_written_in_the_url_of_the_server() -> None:
    url = "postgresql://me:%40%2F%25%3A?&#[]@[::1]:5432/test?sslmode=disable&application_name=a%20b"
    assert config(postgres=url).postgres == url
    assert config(postgres="postgres://127.0.0.1").postgres
    assert config(postgres="postgresql:///test?host=/run/postgresql").postgres


def test_no_repr_shows_where_the_servers_are() -> None:
    assert "secret" not in repr(config()) + repr(Tables(POSTGRES, "x")) + repr(told("t", Path("p"), POSTGRES))


def test_a_driver_without_its_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(DemoError, match="run `python -m demo spark`"):
        ReplayConfig.load()


def test_the_checkpoint_tells_begun_batches_from_finished_ones(tmp_path: Path) -> None:
    assert checkpoint.begun(tmp_path) == checkpoint.done(tmp_path) == set()
    for name in ("offsets/0", "offsets/1", "offsets/.1.crc", "offsets/.2.tmp", "commits/0", "commits/.0.crc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert checkpoint.begun(tmp_path) - checkpoint.done(tmp_path) == {1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the demo on Spark needs --kafka HOST:PORT"),
        (["--kafka", KAFKA], "the demo on Spark needs --postgres URL"),
        (["--kafka", KAFKA, "--postgres", "x"], "--postgres: must be the URL"),
        (["--kafka", KAFKA, "--postgres", POSTGRES, "--jars", "/no.jar"], "--jars: /no.jar: no such file"),
        (["--kafka", KAFKA, "--postgres", POSTGRES, "--data", "/no"], "/no: no such file"),
        (["--kafka", KAFKA, "--postgres", POSTGRES, "--latency", "10"], "--latency '10': must be a number"),
    ],
)
def test_the_spark_demo_names_its_missing_options(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("POSTGRES_URL", raising=False)
    monkeypatch.setattr("sys.argv", ["demo", "spark", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (3, "")
    assert said.err.startswith("lanes: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert "secret" not in said.err


@pytest.mark.parametrize(
    ("module", "install"),
    [
        ("confluent_kafka", "'.[cli,kafka,postgres,spark]' in the checkout of lanes"),
        ("psycopg", "'.[cli,kafka,postgres,spark]' in the checkout of lanes"),
        ("psycopg_pool", "psycopg-pool"),
    ],
)
def test_a_missing_package_is_one_clear_line(
    module: str, install: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    for asks in ("lanes.cli.kit", "demo.__main__"):
        monkeypatch.setattr(f"{asks}.find_spec", lambda name: None if name == module else find(name))
    monkeypatch.setattr("sys.argv", ["demo", "spark"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 3
    assert f"needs {module}: pip install {install}" in said.err and said.err.count("\n") == 1


# --- drivers that are no Spark

_DRIVER = """
import asyncio, json, os, sys
from pathlib import Path
from lanes.clock import monotonic
from demo.__main__ import main
from demo.child import end_with_parent
from demo.workers.client import Client
from demo.spark.config import ReplayConfig
end_with_parent()
config = ReplayConfig.load()
checkpoint = Path(config.checkpoint)
for name in ("offsets", "commits"):
    (checkpoint / name).mkdir(parents=True, exist_ok=True)

def note(name, batch):
    (checkpoint / name / str(batch)).touch()

async def task(batch, attempt, ends):
    # The worker is a separate process.
    code = "import sys; from tests.demo.test_spark_parts import work; work(*sys.argv[1:])"
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(attempt), str(int(ends)))
    return await worker.wait()

async def main():
    first = not (checkpoint / "offsets" / "0").exists()
    note("offsets", 0)
    if first:
        # The parent kills the worker in its first task, and Spark runs the task again.
        assert await task(0, 0, False) == -9
        await task(0, 1, True)
        note("commits", 0)
        note("offsets", 1)
        await task(1, 0, False)
        raise AssertionError("nobody killed this driver")
    await task(1, 0, True)
    note("commits", 1)
    print("a word of somebody else", flush=True)
    print(json.dumps({"replayed": monotonic(), "batches": 1}), flush=True)
    print(json.dumps({"audit": {"status": 0, "verdicts": [], "duplicates": {}}}), flush=True)

asyncio.run(main())
"""


def work(attempt: str, ends: str) -> None:
    """Run a worker of the drivers above: a task that stores one effect, and ends or waits."""
    asyncio.run(_work(int(attempt), bool(int(ends))))


async def _work(attempt: int, ends: bool) -> None:
    import os
    import uuid

    from demo.workers.client import Client

    config = ReplayConfig.load()
    client = Client(config.service, config.token)
    await client.connect()
    status = {"task": uuid.uuid4().hex, "pid": os.getpid(), "attempt": attempt, "rss_mb": 1.0}
    client.say({**status, "ended": False})
    tables = Tables(config.postgres, config.schema)
    with tables.connected() as connection:
        connection.execute(tables.put_query, ("a", 0, 0, 0))
    if not ends:
        await asyncio.Event().wait()
    client.say({**status, "ended": True})
    await client.close()


def told(service: str, folder: Path, postgres: str) -> ReplayConfig:
    return ReplayConfig(
        kafka=KAFKA,
        postgres=postgres,
        jars=[],
        topic="t",
        dead_topic="d",
        schema=f"drivers{folder.name}"[:60].lower(),
        service=service,
        token="token",
        journal=str(folder / "journal"),
        checkpoint=str(folder / "checkpoint"),
        scratch=str(folder),
        cores=1,
        connections=1,
        rows_per_batch=1,
        concurrency=1,
        max_in_flight=1,
        fail_every=0,
        poison_every=0,
    )


async def driven(code: str, folder: Path, server: PostgresServer, **changes: Any) -> Drivers:
    command = (sys.executable, "-c", code)
    settings = config(postgres=server.url, driver_command=command, kill_worker_at=0.1, kill_driver_at=0.2, **changes)
    tables = Tables(server.url, told("", folder, server.url).schema)
    tables.make([("a", 0)])
    progress = Progress(events=10, cases=1)

    def describe(service: Service) -> ReplayConfig:
        return told(service.address, folder, server.url)

    try:
        with places(None) as where:
            drivers = Drivers(settings, tables, where, progress, describe, "token")
            await drivers.run()
            return drivers
    finally:
        assert tables.drop()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_and_a_driver_are_killed_in_their_work(tmp_path: Path, postgres: PostgresServer) -> None:
    drivers = await driven(_DRIVER, tmp_path, postgres)
    assert (drivers.failure, drivers.missed) == (None, [])
    assert (drivers.workers_killed, drivers.drivers_killed, drivers.tried_again) == (1, 1, 1)
    assert [(kill.who, kill.by) for kill in drivers._progress.kills] == [
        ("a worker", "another worker"),
        ("the driver", "driver 2"),
    ]
    assert all(kill.after > 0 for kill in drivers._progress.kills)
    assert drivers.interrupted == {1}
    assert drivers.done == {0, 1}
    assert drivers.told["audit"]["status"] == 0
    assert drivers.seconds > 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_output_of_a_crashed_driver_is_quoted(tmp_path: Path, postgres: PostgresServer) -> None:
    drivers = await driven("import sys; sys.exit('no luck today')", tmp_path, postgres)
    assert drivers.failure == "driver 1 ended unexpectedly with status 1: no luck today"
    assert len(drivers.missed) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_idle_driver_ends_the_demo(tmp_path: Path, postgres: PostgresServer) -> None:
    drivers = await driven("import sys; sys.stdin.read()", tmp_path, postgres, stall_timeout=1.0)
    assert drivers.failure == "no progress for 1 s: 10 of 10 events are missing"
