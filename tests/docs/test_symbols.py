"""Every file and every name that docs/journey.md and the layout of docs/design.md point at is there."""

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
QUOTED: Final = re.compile(r"`([^`]+)`")
NAME: Final = re.compile(r"(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*")
FOREIGN: Final = {"remembers", "block", "block_and_dlq", "revoked", "lost", "delivered", "ack", "started", "grace"}
"""Words of users and of the history, not names of code: ``lost`` is a row."""


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """What a module defines, and what it calls or sets; of a class also ``Class.name``, as far as it has it itself."""
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


def modules_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def unknown(text: str, files: list[Path]) -> list[str]:
    """The names in ``text`` that none of these files has; what else is in backticks is no name."""
    known = frozenset().union(*map(names_of, files)) | FOREIGN
    quoted = (each for each in QUOTED.findall(text) if NAME.fullmatch(each))
    return [each for each in quoted if each not in known]


def sections(page: str) -> Iterator[str]:
    return (section for section in re.split(r"^## ", page, flags=re.MULTILINE))


def layout() -> list[tuple[list[Path], str]]:
    """The files of each row of the layout in docs/design.md, and what is said of them."""
    (section,) = (each for each in sections((ROOT / "docs" / "design.md").read_text()) if each.startswith("3. Layout"))
    rows = []
    for first, second in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", section, re.MULTILINE):
        if "/" in first and "." not in first:
            paths: list[Path] = []
            for name in QUOTED.findall(first):
                path = ROOT / name if "/" in name else paths[-1].parent / name
                module = path.with_suffix(".py")
                paths.append(path if path.is_dir() and not module.exists() else module)
            rows.append((paths, second))
    return rows


@pytest.mark.parametrize("section", list(sections((ROOT / "docs" / "journey.md").read_text())), ids=lambda s: s[:20])
def test_the_journey_leads_through_what_is_there(section: str) -> None:
    files = [ROOT / name for name in QUOTED.findall(section) if name.endswith(".py")]
    assert [str(each) for each in files if not each.is_file()] == []
    assert unknown(section, files) == []


def test_the_layout_says_what_is_there() -> None:
    rows = layout()
    assert len(rows) > 50
    missing = [str(path.relative_to(ROOT)) for paths, _ in rows for path in paths if not path.exists()]
    assert missing == []
    wrong = {name: said for paths, said in rows for name in unknown(said, [m for p in paths for m in modules_of(p)])}
    assert wrong == {}


def test_the_layout_leaves_no_file_out() -> None:
    said = {module for paths, _ in layout() for path in paths for module in modules_of(path)}
    there = {module for name in SHIPPED for module in (ROOT / name).rglob("*.py") if not module.stem.startswith("_")}
    assert sorted(str(each.relative_to(ROOT)) for each in there - said) == []


def test_a_name_that_is_not_there_is_found() -> None:
    engine = ROOT / "lanes" / "core" / "engine.py"
    assert unknown("`Engine.receive` and `Engine.recieve`, `+ACK`, `key=`", [engine]) == ["Engine.recieve"]
