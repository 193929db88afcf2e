"""The last line of ``make campaign`` is a JSON object with the sums of the figures of its tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = """
import pytest
@pytest.mark.parametrize("name", ["kafka", "jetstream"])
def test_one(record_property, name):
    record_property("campaign", {"schedules": 5, f"{name}_schedules": 5, "pairs": 2, "violations": 1})
    assert name == "kafka"
def test_without_figures(record_property):
    record_property("other", 1)
"""


@pytest.mark.process
@pytest.mark.parametrize("processes", [0, 2])
def test_the_last_line_has_the_sums_over_passed_and_failed_campaigns(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "test_campaign.py"
    path.write_text(_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.simulated.figures",
        f"-n{processes}",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert "1 failed, 2 passed" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "schedules": 10,
        "kafka_schedules": 5,
        "jetstream_schedules": 5,
        "postgres_schedules": 0,
        "ranges_schedules": 0,
        "width_schedules": 0,
        "pairs": 4,
        "pairs_unreached": 0,
        "violations": 2,
    }
