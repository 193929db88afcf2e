"""The whole demo on a real Spark, Kafka and PostgreSQL, by its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from memsource import check_files
from tests.components import KafkaServer, MissingComponent, PostgresServer
from tests.components.spark_connector import connector_jars
from tests.conftest import skip_or_fail
from tests.spark.conftest import need_java

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = 2_400


@pytest.fixture
def jars() -> str:
    need_java()
    try:
        return ",".join(map(str, connector_jars()))
    except MissingComponent as missing:
        skip_or_fail(missing)


def topics(server: KafkaServer) -> set[str]:
    return set(AdminClient({"bootstrap.servers": server.url}).list_topics(timeout=10.0).topics)


def schemas(server: PostgresServer) -> list[str]:
    with psycopg.connect(server.url) as connection:
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'lanes_demo_%'").fetchall()
    return [name for (name,) in found]


def test_kills_of_a_worker_and_the_driver_lose_and_double_nothing(
    kafka: KafkaServer, postgres: PostgresServer, jars: str, tmp_path: Path
) -> None:
    kept, temporary = tmp_path / "kept", tmp_path / "temporary"
    temporary.mkdir()
    before = topics(kafka)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "demo", "spark", "--kafka", kafka.url),
            *("--jars", jars, "--events", str(EVENTS), "--keep", str(kept), "--patience", "10m"),
        ],
        env={**os.environ, "POSTGRES_URL": postgres.url, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("seconds") > 0
    assert found.pop("rows_per_s") > 0
    assert found == {
        "rows": EVENTS,
        "order_violations": 0,
        "lost": 0,
        "double_effects": 0,
        "resumed_batches": 1,
        "audit": "pass",
    }
    # A killed worker leaves at most one incomplete file; the report has the number of incomplete files.
    assert re.search(r"unfinished files\W+\d", done.stdout)
    # `lanes check` on the same journal has the same verdicts.
    assert check_files([kept / "journal"]).status == 0
    # Only the files of `--keep` remain.
    assert topics(kafka) - {"__consumer_offsets"} == before - {"__consumer_offsets"}
    assert schemas(postgres) == []
    assert list(temporary.iterdir()) == []
    assert {path.name for path in kept.iterdir()} == {"journal", "worker.log"}
