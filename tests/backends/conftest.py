"""Fixtures of tests on several backends: places of dead letters, and the commands that read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lanes.cli import app as cli
from tests.backends import dead_letter_handlers as handlers
from tests.backends.dead_letter_places import Command, JetStreamPlace, KafkaPlace, Place, PostgresPlace, Said


@pytest.fixture(autouse=True)
def nothing_handled() -> None:
    handlers.SEEN.clear()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `lanes dead-letters …` in this process. No line says that a server is slow."""
    monkeypatch.setattr("lanes.cli.kit._SILENT_FOR", 3_600.0)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr("sys.argv", ["lanes", "dead-letters", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Said(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture(params=["kafka", "jetstream", "postgres"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A topic, subject or table for dead letters, on each backend."""
    made: KafkaPlace | JetStreamPlace | PostgresPlace
    if request.param == "kafka":
        made = KafkaPlace(request.getfixturevalue("kafka"))
    elif request.param == "postgres":
        made = PostgresPlace(request.getfixturevalue("postgres"))
    else:
        made = JetStreamPlace(request.getfixturevalue("nats_server"))
    yield made
    made.delete()
