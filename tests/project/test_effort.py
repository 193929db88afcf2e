"""A test with many runs makes some runs in `make test`, and all of them in `make campaign`, which selects it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import FULL, SHARE, SLICE, is_full, runs

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
MARKS = ("pytest.mark.sliced", "given(")


def functions_with_runs() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The tests that ask for their number of runs, or whether they make all runs."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "from tests.effort import" in text and path != Path(__file__):
            found += [
                (path, node)
                for node in ast.parse(text).body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and re.search(r"\b(runs|is_full)\(", ast.unparse(node))
            ]
    return found


def test_make_campaign_selects_each_test_that_makes_a_part_of_its_runs() -> None:
    tests = functions_with_runs()
    assert len(tests) > 20
    campaign = MAKEFILE.split("\ncampaign:")[1].split("\n\n")[0]
    assert f'pytest -m "(sliced or hypothesis) and not slow" --hypothesis-profile {FULL} ' in campaign
    for path, node in tests:
        marks = " ".join(map(ast.unparse, node.decorator_list))
        assert any(mark in marks for mark in MARKS), f"{path.name}: {node.name} needs the mark sliced"
        assert "pytest.mark.slow" not in marks, f"{path.name}: {node.name} is slow, and make campaign leaves it out"


@pytest.mark.parametrize(
    ("profile", "every", "least", "expected"),
    [(SLICE, 300, 1, 300 // SHARE), (SLICE, 3, 1, 1), (SLICE, 6, 2, 2), (FULL, 300, 1, 300), (FULL, 3, 5, 3)],
)
def test_the_profile_decides_the_number_of_runs(profile: str, every: int, least: int, expected: int) -> None:
    before = settings.get_current_profile_name()
    settings.load_profile(profile)
    try:
        assert (runs(every, least=least), is_full()) == (expected, profile == FULL)
        assert settings().max_examples == runs(100)
        assert settings().deadline is None
    finally:
        settings.load_profile(before)
