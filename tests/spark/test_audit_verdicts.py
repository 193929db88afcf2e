"""An audit refuses wrong columns, and has the verdicts and exit statuses of ``lanes check``; no Spark runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lanes.errors import ConfigError
from lanes.history.columns import row_tables
from lanes_spark.audits.audit import Audit
from lanes_spark.audits.judge import Judged
from lanes_spark.audits.rows import COLUMNS, check_columns
from lanes_spark.audits.verdicts import AUDITED, AuditStatus, AuditVerdict
from memsource import CHECKERS

ARROW = {"bigint": "int64"}


def table(kinds: dict[str, str]) -> Any:
    """A fake DataFrame with these columns."""
    fields = [
        SimpleNamespace(name=name, dataType=SimpleNamespace(simpleString=kind.__str__)) for name, kind in kinds.items()
    ]
    return SimpleNamespace(schema=fields)


def test_the_columns_are_those_of_a_journal() -> None:
    schema = row_tables().schema("r")
    assert {name: str(schema.field(name).type) for name in COLUMNS} == {
        name: ARROW.get(kind, kind) for name, kind in COLUMNS.items()
    }
    check_columns(table(COLUMNS | {"more": "int"}))


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({name: kind for name, kind in COLUMNS.items() if name != "n"}, "column n, of type bigint, is missing"),
        (COLUMNS | {"wall": "timestamp"}, "column wall, of type double, is of type timestamp"),
    ],
)
def test_other_columns_are_refused(kinds: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_columns(table(kinds))


@pytest.mark.parametrize(
    ("statuses", "status"),
    [(["held", "held"], 0), (["held", "unproven"], 2), (["unproven", "violated", "held"], 1)],
)
def test_the_exit_status_is_that_of_lanes_check(statuses: list[AuditStatus], status: int) -> None:
    verdicts = tuple(AuditVerdict(name="a", status=one, checked=1) for one in statuses)
    findings: Any = None
    assert Audit(verdicts=verdicts, rows=1, processes=1, duplicates={}, findings=findings).status == status


class Told:
    """A fake DataFrame of counts, without findings."""

    def __init__(self, *rows: dict[str, object]) -> None:
        self.rows = rows

    def groupBy(self, *_: str) -> Told:  # noqa: N802 (as Spark calls it)
        return self

    count = groupBy

    def collect(self) -> Sequence[dict[str, object]]:
        return self.rows


@pytest.mark.parametrize(
    ("sourced", "messages", "status", "reasons"),
    [
        (False, 0, "held", ()),
        (True, 3, "held", ()),
        (True, 0, "unproven", ("0 messages are in the source, so no message had to be handled",)),
    ],
)
def test_an_empty_source_proves_nothing(sourced: bool, messages: int, status: str, reasons: tuple[str, ...]) -> None:
    rows = [{"history": "", "kind": "figure", "checker": "", "what": "rows", "count": 2}]
    if messages:
        rows.append({"history": "", "kind": "checked", "checker": "AtLeastOnce", "what": "", "count": messages})
    frames: Any = {"findings": Told(), "tallies": Told(*rows)}
    verdicts, _ = Judged(**frames, sourced=sourced).told()[""]
    found = {one.name: (one.status, one.checked, one.reasons) for one in verdicts}
    assert found.pop("AtLeastOnce") == (status, messages, reasons)
    # Without a source, the verdict is that of `lanes check`: the history has no row to judge.
    assert set(found.values()) == {("held", 0, ())}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (0, ""),
        (1, "1 unfinished file: its writer still runs or was killed, and its rows are not judged"),
        (2, "2 unfinished files: their writers still run or were killed, and their rows are not judged"),
    ],
)
def test_the_report_counts_the_unfinished_files_that_it_does_not_judge(files: int, said: str) -> None:
    findings: Any = None
    assert Audit(verdicts=(), rows=1, processes=1, duplicates={}, unfinished=files, findings=findings).unjudged == said


def test_the_verdicts_of_an_audit_have_the_names_of_the_checkers() -> None:
    assert set(AUDITED) < {make.name for make in CHECKERS}  # type: ignore[attr-defined]
