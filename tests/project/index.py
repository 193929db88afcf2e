"""The index of all tests in ``tests/README.md``, made from the first sentence of each test file.

``python -m tests.project.index`` writes the index, and ``test_index`` compares it with the files.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from tests.project.public_api import ROOT

PAGE: Final = ROOT / "tests" / "README.md"
MARK: Final = "<!-- Written by python -m tests.project.index from the docstrings below. -->"


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = path.read_text()
    # Only the docstring is parsed, because a parse of all tests takes seconds.
    end = text.find('"""', 3) + 3 if text.startswith('"""') else None
    said = ast.get_docstring(ast.parse(text[:end])) or ""
    first = " ".join(said.split("\n\n")[0].split())
    return first.removesuffix(".").replace("|", r"\|")


def folders() -> dict[str, list[Path]]:
    """The test files of each folder."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found.setdefault(str(path.parent.relative_to(ROOT / "tests")), []).append(path)
    return found


def index() -> str:
    """The index: a table for each folder."""
    lines = [MARK]
    for folder, paths in folders().items():
        lines += ["", f"### {folder}", "", "| file | behaviour |", "|---|---|"]
        lines += [f"| [{path.stem.removeprefix('test_')}]({folder}/{path.name}) | {summary(path)} |" for path in paths]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The text of the whole page, with a new index."""
    written, mark, _ = PAGE.read_text().partition(MARK)
    assert mark, f"{PAGE} has no line {MARK!r}"
    return written + index()


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: written")
