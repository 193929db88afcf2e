"""``lanes spark audit`` checks its options, prints the verdicts, and exits with its status; no Spark runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lanes.cli import app as cli
from lanes.cli.misuse import Misuse
from lanes.errors import SourceError
from lanes_spark.audits.audit import Audit
from lanes_spark.audits.verdicts import CAUSES, AuditVerdict
from lanes_spark.cli import commands
from lanes_spark.cli.commands import source_of_audit
from lanes_spark.cli.output import render
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

NO_FINDINGS: Any = None
HELD = AuditVerdict(name="PerKeyOrder", status="held", checked=1_200)
VIOLATED = AuditVerdict(
    name="NoOverlap", status="violated", checked=7, violations=3, witnesses=("orders/0 position 1\x1b[2J", "the next")
)
UNPROVEN = AuditVerdict(name="AtLeastOnce", status="unproven", checked=7, reasons=("1 messages were left",))


def found(*verdicts: AuditVerdict) -> Audit:
    duplicates = dict.fromkeys(CAUSES, 0) | {"repeat": 1_234}
    return Audit(verdicts=verdicts, rows=4_800, processes=2, duplicates=duplicates, findings=NO_FINDINGS)


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Return the exit status of ``lanes`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["lanes", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_verdicts_are_a_table_followed_by_witnesses() -> None:
    output = io.StringIO()
    render(found(HELD, VIOLATED, UNPROVEN), Console(file=output, width=100, markup=False, highlight=False))
    text = output.getvalue()
    assert "4,800 rows of 2 processes" in text
    assert "repeated messages: 1,234 repeat\n" in text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert rows.keys() == {"PerKeyOrder", "NoOverlap", "AtLeastOnce"}
    assert [cell.strip() for cell in rows["NoOverlap"].split("│")[1:-1]] == ["NoOverlap", "violated", "7", "3"]
    assert "! NoOverlap: orders/0 position 1\\x1b[2J\n! NoOverlap: the next\n! NoOverlap: and 1 more\n" in text
    assert text.endswith("? AtLeastOnce: 1 messages were left\n")
    assert "unfinished" not in text


def test_unfinished_files_are_counted_and_change_no_verdict() -> None:
    output = io.StringIO()
    audit = replace(found(HELD), unfinished=1_002)
    render(audit, Console(file=output, width=100, markup=False, highlight=False))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.getvalue().splitlines() if "│" in line]
    assert rows == [["PerKeyOrder", "held", "1,200", "0"], ["unfinished files", "not judged", "1,002", ""]]
    assert output.getvalue().endswith(
        "? 1,002 unfinished files: their writers still run or were killed, and their rows are not judged\n"
    )
    assert audit.status == 0


@pytest.mark.parametrize(("verdicts", "status"), [((HELD,), 0), ((HELD, VIOLATED, UNPROVEN), 1), ((UNPROVEN, HELD), 2)])
def test_the_exit_status_is_that_of_the_audit(
    verdicts: Sequence[AuditVerdict], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    begun: list[Any] = []

    @contextmanager
    def session(*options: Any) -> Iterator[str]:
        begun.append(options)
        yield "session"

    def audit(*arguments: Any, **more: Any) -> Audit:
        asked.append((arguments, more))
        return found(*verdicts)

    monkeypatch.setattr(commands, "spark_session", session)
    monkeypatch.setattr(commands, "audit", audit)
    words = ["spark", "audit", "one", "two", "--findings", "there", "--table", "/lake", "--topic", "orders"]
    assert status_of(monkeypatch, *words, "--master", "local[1]", "--conf", "a=b") == status
    source = ParquetTable(path=["/lake"], topic="orders")
    assert asked == [(("session", ["one", "two"]), {"source": source, "findings_to": "there"})]
    assert begun == [("local[1]", {"a": "b"})]
    assert verdicts[0].name in capsys.readouterr().out


def test_a_folder_that_cannot_be_audited_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def session(*_: Any) -> Iterator[None]:
        yield

    def audit(*_: Any, **__: Any) -> Audit:
        raise SourceError("journal /nowhere: there is none\x1b")

    monkeypatch.setattr(commands, "spark_session", session)
    monkeypatch.setattr(commands, "audit", audit)
    assert status_of(monkeypatch, "spark", "audit", "/nowhere") == 3
    assert "journal /nowhere: there is none\\x1b" in capsys.readouterr().err


def test_the_source_of_an_audit_is_a_table_or_a_topic() -> None:
    assert source_of_audit("", [], "", {}, {}) is None
    assert source_of_audit("orders", ["a", "b"], "", {}, {"key": "id"}) == ParquetTable(
        path=["a", "b"], topic="orders", columns={"key": "id"}
    )
    assert source_of_audit("orders", [], "host:1", {"kafka.a": "b"}, {}) == KafkaTopic(
        servers="host:1", topic="orders", options={"kafka.a": "b"}
    )


@pytest.mark.parametrize(
    ("tables", "servers", "options", "columns", "said"),
    [
        ([], "", {}, {}, "with --topic, -X and --column"),
        (["a"], "host:1", {}, {}, "needs either --table PATH or --server HOST:PORT"),
        (["a"], "", {"kafka.a": "b"}, {}, "takes no -X with --table"),
        ([], "host:1", {}, {"key": "id"}, "takes no --column with --server"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tables: list[str], servers: str, options: dict[str, str], columns: dict[str, str], said: str
) -> None:
    with pytest.raises(Misuse, match=said):
        source_of_audit("orders", tables, servers, options, columns)
