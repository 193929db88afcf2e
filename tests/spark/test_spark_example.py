"""The examples of a replay run and end without an error, each in a separate Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.components import PostgresServer
from tests.spark.conftest import need_java

EXAMPLES = Path(__file__).parents[2] / "examples" / "spark"
PANDAS = "ignore:PySpark does not yet fully support pandas:FutureWarning"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(example: str, folder: Path, **environment: str) -> str:
    """Run an example, and return its output."""
    need_java()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", PANDAS, str(EXAMPLES / example)],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == [], "an example must not leave files"
    return done.stdout


def test_the_example_of_a_replay_runs(tmp_path: Path) -> None:
    assert "as in a plain loop" in run("replay_table.py", tmp_path)


def test_the_example_of_fenced_effects_runs(tmp_path: Path, postgres: PostgresServer) -> None:
    printed = run("replay_into_postgres.py", tmp_path, POSTGRES_URL=postgres.url)
    assert "2000 payments handled, 1000 in the balances: each counted once" in printed
    with psycopg.connect(postgres.url) as connection:
        left = connection.execute("SELECT to_regclass('balances'), to_regnamespace('spark_example')").fetchone()
    assert left == (None, None)


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"replay_table.py", "replay_into_postgres.py"}
