"""The table of the last soaks has the figures of these soaks, and counts every planted fault."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memsource.checkers import CHECKERS
from tests.mutants.campaigns import CAMPAIGNS
from tests.mutants.table import MUTANTS
from tests.soak.published import BACKENDS, PROMISES, rows
from tests.soak.record import NAMES, ROOT, collected, leave

KNOWN = {check for checks in PROMISES.values() for check in checks}
RESULTS: dict[str, dict[str, Any]] = {
    "simulation": {
        "schedules": 9_000,
        "kafka_schedules": 1_000,
        "jetstream_schedules": 500,
        "postgres_schedules": 400,
        "cohort_schedules": 70,
        "kafka_pairs": (400, 486),
        "jetstream_pairs": (300, 400),
        "postgres_pairs": (200, 567),
        "real_faults": 12,
        "planted_names": [name for name in MUTANTS if name != "two_of_a_lane"],
    },
    "kafka": {"faults": 34},
    "jetstream": {"faults": 56},
    "postgres": {"faults": 78},
}


def test_a_row_has_the_soaks_of_a_promise_on_a_backend() -> None:
    table = rows(RESULTS)
    assert len(table) == 2 + (len(PROMISES) + 1) * len(BACKENDS)
    (memory,) = (line for line in table if line.startswith("| [P1](promises.md#p1) | in memory |"))
    searched = re.fullmatch(r".* \| 9,000 \| – \| (\d+) of (\d+) \| – \|", memory)
    assert searched is not None, memory
    assert int(searched[1]) == int(searched[2]) - 1
    (kafka,) = (line for line in table if line.startswith("| [P2](promises.md#p2) | Kafka |"))
    assert "| 1,000 | 34 |" in kafka
    assert kafka.endswith("| 400 of 486 |")


def test_every_planted_fault_counts_for_a_backend() -> None:
    campaigns = [campaign for backend in BACKENDS for campaign in backend.campaigns]
    assert len(campaigns) == len(set(campaigns))
    assert set(campaigns) == set(CAMPAIGNS)


def test_the_checks_of_a_promise_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "promises.md").read_text()
    for title, checks in PROMISES.items():
        section = page.split(f"## {title[1:3]}\n")[1].split("\n## ")[0]
        named = re.findall(r"`(\w+)`", section.split("**Checkers**:")[1].split("\n- ")[0])
        assert {*named} <= {*checks}


def test_every_checker_proves_a_promise() -> None:
    judges = {type(each).__name__ if not isinstance(each, type) else each.__name__ for each in CHECKERS}
    assert judges <= KNOWN


def test_a_soak_that_has_not_run_keeps_its_former_result(tmp_path: Path) -> None:
    last = tmp_path / "last.json"
    with pytest.raises(FileNotFoundError, match="no result of the soak 'simulation'"):
        collected(tmp_path, last)
    last.write_text(json.dumps({name: {"faults": 1} for name in NAMES}))
    leave("kafka", {"faults": 2}, tmp_path)
    assert collected(tmp_path, last) == {
        "simulation": {"faults": 1}, "kafka": {"faults": 2}, "jetstream": {"faults": 1}, "postgres": {"faults": 1}
    }  # fmt: skip
