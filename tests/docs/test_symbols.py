"""Every file, room and name in docs/journey.md and the pages of the design exists in the code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = ("lanes", "adapters", "memsource")
DESIGN: Final = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
PLACE: Final = re.compile(rf"(?:{'|'.join(SHIPPED)}|tests|docs|demo|bench|fuzz|examples)/[\w./]*")
QUOTED: Final = re.compile(r"`([^`]+)`")
NAME: Final = re.compile(r"(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*")
FOREIGN: Final = {
    "remembers",
    "skip",
    "block",
    "block_and_dlq",
    "exit",
    "revoked",
    "lost",
    "delivered",
    "ack",
    "started",
    "grace",
}
"""Values of settings and rows of a history, which are no names of code."""


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """Return the names that a module defines, sets or uses as attributes, and ``Class.name`` for each method."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        if isinstance(node, ast.ClassDef):
            members = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{each.name}" for each in members}
    return frozenset(names)


def unknown(text: str, files: list[Path]) -> list[str]:
    """Return the names in ``text`` that none of these files contains. Other texts in backticks are no names."""
    known = frozenset().union(*map(names_of, files)) | FOREIGN
    quoted = (each for each in QUOTED.findall(text) if NAME.fullmatch(each))
    return [each for each in quoted if each not in known]


def sections(page: str) -> Iterator[str]:
    return (section for section in re.split(r"^## ", page, flags=re.MULTILINE))


def rooms() -> dict[str, list[str]]:
    """Return the rooms in the table of docs/design.md, each with its first modules."""
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(rf"^\| `((?:{'|'.join(SHIPPED)})[\w/]*)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a room has two rows"
    return {room: QUOTED.findall(first) for room, first in rows}


def modules_of(room: str) -> set[str]:
    return {path.stem for path in (ROOT / room).glob("*.py") if path.stem != "__init__"}


@pytest.mark.parametrize("section", list(sections((ROOT / "docs" / "journey.md").read_text())), ids=lambda s: s[:20])
def test_every_name_of_the_journey_exists(section: str) -> None:
    files = [ROOT / name for name in QUOTED.findall(section) if name.endswith(".py")]
    assert [str(each) for each in files if not each.is_file()] == []
    assert unknown(section, files) == []


def test_the_design_names_every_room() -> None:
    there = {path.parent for name in SHIPPED for path in (ROOT / name).rglob("__init__.py")}
    assert sorted(rooms()) == sorted(str(path.relative_to(ROOT)) for path in there)


def test_the_first_modules_of_each_room_exist() -> None:
    assert {room: gone for room, first in rooms().items() if (gone := set(first) - modules_of(room))} == {}


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.stem)
def test_every_file_on_the_pages_of_the_design_exists(page: Path) -> None:
    named = {each for each in QUOTED.findall(page.read_text()) if PLACE.fullmatch(each)}
    assert [each for each in named if not (ROOT / each).exists() and not (ROOT / f"{each}.py").is_file()] == []


def test_a_name_that_the_code_lacks_is_found_on_a_page() -> None:
    engine = ROOT / "lanes" / "core" / "engine.py"
    assert unknown("`Engine.receive` and `Engine.recieve`, `+ACK`, `key=`", [engine]) == ["Engine.recieve"]
