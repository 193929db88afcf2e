"""Rooms stay small: each has a bounded number of modules, files of bounded length, and a docstring with a reading
order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.project.public_api import PACKAGES, ROOT

MOST_MODULES: Final = 24
MOST_BESIDE_ROOMS: Final = 14
"""Largest number of modules directly in ``lanes/``, without ``__init__``."""

ASK_AT_LINES: Final = 600
MOST_LINES: Final = 800

HOMES: Final = [ROOT / ("adapters" if name.startswith("lanes_") else ".") / name for name in PACKAGES]


def rooms() -> Iterator[Path]:
    """Yield every folder with modules, outside of tests."""
    for home in (*HOMES, ROOT / "demo"):
        yield from (init.parent for init in sorted(home.rglob("__init__.py")))


def modules_of(room: Path) -> list[str]:
    """Names of the modules of a room, without its ``__init__``."""
    return sorted(path.stem for path in room.glob("*.py") if path.stem not in ("__init__", "__main__"))


def test_no_room_has_too_many_modules() -> None:
    crowded = {str(room.relative_to(ROOT)): len(modules_of(room)) for room in rooms()}
    assert {room: count for room, count in crowded.items() if count > MOST_MODULES} == {}


def test_lanes_shows_few_modules_beside_its_rooms() -> None:
    assert len(modules_of(ROOT / "lanes")) <= MOST_BESIDE_ROOMS


@pytest.mark.parametrize("room", [*rooms()], ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_says_its_job_and_its_reading_order(room: Path) -> None:
    """The reading order names every module and sub-room, and no other name."""
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert said, f"{room.relative_to(ROOT)} has no docstring"
    order = re.search(r"Reading order: (.+?\.)(?:\n\n|$)", said, re.DOTALL)
    if len(modules_of(room)) > 1:
        assert order is not None, f"{room.relative_to(ROOT)}/__init__.py: add a line `Reading order: …`"
        assert sorted(set(re.findall(r"``(\w+)``", order[1]))) == sorted(
            {*modules_of(room), *(each.name for each in room.iterdir() if (each / "__init__.py").is_file())}
        )


def test_no_python_file_is_long_without_a_reason() -> None:
    """A file of over 600 lines states in its docstring why it is long."""
    folders = ("lanes", "adapters", "memsource", "demo", "examples", "bench", "fuzz", "tests")
    texts = {path: path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    long = {path: text for path, text in texts.items() if len(text.splitlines()) > ASK_AT_LINES}
    wrong = {
        str(path.relative_to(ROOT)): len(text.splitlines())
        for path, text in long.items()
        if len(text.splitlines()) > MOST_LINES
        or not re.search(r"longer than most, because \w", ast.get_docstring(ast.parse(text)) or "")
    }
    assert wrong == {}, "split the file by concept, or say in its docstring: This file is longer than most, because …"
