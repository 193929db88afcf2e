"""Every example runs and ends without an error: against a real server, standalone, or as a simulated test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.components import KafkaServer, NatsServer, PostgresServer
from tests.site.hooks import linked

FOLDER = Path(__file__).parents[2] / "examples"
JETSTREAM = sorted((FOLDER / "jetstream").glob("*.py"))
KAFKA = sorted((FOLDER / "kafka").glob("*.py"))
POSTGRES = sorted((FOLDER / "postgres").glob("*.py"))
SOURCES = sorted((FOLDER / "sqlite_source").glob("*.py"))
SIMULATED = sorted(FOLDER.glob("simulate_*"))


@pytest.mark.parametrize("example", JETSTREAM, ids=lambda example: example.stem)
def test_jetstream_example_runs(example: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    run(example, tmp_path, NATS_URL=nats_server.url)


@pytest.mark.parametrize("example", KAFKA, ids=lambda example: example.stem)
def test_kafka_example_runs(example: Path, kafka: KafkaServer, tmp_path: Path) -> None:
    run(example, tmp_path, KAFKA_URL=kafka.url)


@pytest.mark.parametrize("example", POSTGRES, ids=lambda example: example.stem)
def test_postgres_example_runs(example: Path, postgres: PostgresServer, tmp_path: Path) -> None:
    run(example, tmp_path, POSTGRES_URL=postgres.url)


@pytest.mark.parametrize("example", SOURCES, ids=lambda example: example.stem)
def test_source_example_runs(example: Path, tmp_path: Path) -> None:
    run(example, tmp_path)


@pytest.mark.parametrize("example", sorted(FOLDER.rglob("*.py")), ids=lambda example: example.stem)
def test_an_example_drops_only_tables_and_schemas_of_its_own(example: Path) -> None:
    text = example.read_text()
    for dropped in re.findall(r"DROP (?:TABLE|SCHEMA) (?:IF EXISTS )?([^;\"']*)", text):
        names = [name.strip().removesuffix(" CASCADE") for name in dropped.split(",")]
        if names == ["{SCHEMA}"]:
            names = re.findall(r'^SCHEMA = "(\w+)"', text, re.MULTILINE)
        assert names and all(name.startswith("example_") for name in names), names


def run(example: Path, folder: Path, **environment: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(example)],
        env={**os.environ, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            out, err = process.communicate(timeout=50)
        except BaseException as error:
            # Kill the whole group, because a member of a cohort without a server does not end by itself.
            os.killpg(process.pid, signal.SIGKILL)
            error.add_note("".join(process.communicate()))
            raise
    assert process.returncode == 0, out + err
    assert out
    assert list(folder.iterdir()) == [], "an example must not leave files"


@pytest.mark.parametrize("example", SIMULATED, ids=lambda example: example.name)
@pytest.mark.timeout(300)  # seven seconds of computing, which take a minute on a busy machine
def test_simulated_example_passes(example: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(example)]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 runs, " in done.stdout


def test_every_example_is_listed() -> None:
    page = "examples/README.md"
    pages = set(linked(page, (FOLDER / "README.md").read_text()))
    missing = [
        name
        for path in FOLDER.rglob("*.py")
        if pages.isdisjoint({name := f"examples/{path.relative_to(FOLDER)}", f"{name.rpartition('/')[0]}/README.md"})
    ]
    assert missing == []
    assert page in set(linked("README.md", (FOLDER.parent / "README.md").read_text()))


def test_there_are_examples() -> None:
    assert JETSTREAM
    assert KAFKA
    assert POSTGRES
    assert SOURCES
    assert SIMULATED
