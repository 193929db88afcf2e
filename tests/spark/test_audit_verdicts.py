"""What of an audit needs no Spark."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from lanes.errors import ConfigError
from lanes.journal_rows import row_tables
from lanes_spark.audit import Audit
from lanes_spark.audit_rows import COLUMNS, check_columns
from lanes_spark.audit_verdicts import AUDITED, AuditStatus, AuditVerdict
from memsource import CHECKERS

ARROW = {"bigint": "int64"}


def table(kinds: dict[str, str]) -> Any:
    """What is asked of a DataFrame with these columns."""
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


def test_what_is_audited_has_the_names_of_the_checkers() -> None:
    assert set(AUDITED) < {make.name for make in CHECKERS}  # type: ignore[attr-defined]
