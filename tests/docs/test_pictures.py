"""A committed picture equals the output of its script."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.mark.parametrize("script", sorted(PICTURES.glob("*.py")), ids=lambda script: script.stem)
def test_the_committed_picture_is_what_its_script_draws(script: Path) -> None:
    names = runpy.run_path(str(script))
    drawn, picture = names["draw"](), names["PICTURE"]
    assert picture.read_text() == drawn, f"run python {script.relative_to(PICTURES.parents[1])}"
    ElementTree.fromstring(drawn)


def test_every_picture_has_a_script() -> None:
    scripts = PICTURES.glob("*.py")
    assert {runpy.run_path(str(script))["PICTURE"] for script in scripts} == set(PICTURES.glob("*.svg"))
