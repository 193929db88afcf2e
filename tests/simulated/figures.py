"""The figures of a pytest campaign, which ``make campaign`` prints last, as a JSON object.

A test of the campaign calls ``record_property("campaign", figures)`` with a dictionary of numbers, whose names are in
``NAMES``. ``python -m pytest -p tests.simulated.figures`` prints the sums.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

import pytest

from memsource.adapters.campaign import AdapterReport

NAMES: Final = (
    "schedules",
    "kafka_schedules",
    "jetstream_schedules",
    "postgres_schedules",
    "ranges_schedules",
    "width_schedules",
    "pairs",
    "pairs_unreached",
    "violations",
)

_sums: Final[Counter[str]] = Counter()


def figures_of(name: str, report: AdapterReport) -> dict[str, int]:
    """The figures of the campaign over one adapter.

    Args:
        name: Name of the adapter.
        report: The report of the campaign.

    Returns:
        The figures by name.
    """
    return {
        "schedules": report.schedules,
        f"{name}_schedules": report.schedules,
        "pairs": len(report.pairs),
        "pairs_unreached": len(report.unreached),
        "violations": len(report.violations),
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the figures of a test. A test in a process of pytest-xdist sends its figures with its report."""
    if report.when == "call":
        for name, figures in report.user_properties:
            if name == "campaign":
                found: Any = figures
                _sums.update(found)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the sums, after the last line of pytest."""
    if _sums and not hasattr(config, "workerinput"):
        config.get_terminal_writer().line(line())


def line() -> str:
    """The sums as a JSON object."""
    return json.dumps({name: _sums[name] for name in NAMES})
