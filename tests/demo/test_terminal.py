"""The demo's report ends with a table on a terminal, and with a JSON line elsewhere."""

from __future__ import annotations

import json
import sys

import pytest

from demo import Report
from demo.terminal import EXIT_KEPT, show
from demo.view import View
from tests.demo.test_report import report


async def job(_: View) -> Report:
    return report()


def test_the_json_line_is_last_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job) == EXIT_KEPT
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == json.loads(report().json())
    assert "every promise was kept" in table


def test_the_table_is_last_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert show(job) == EXIT_KEPT
    first, *table = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(report().json())
    assert any("speed-up" in line for line in table)
    assert "every promise was kept" in table[-1]
