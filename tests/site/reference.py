"""The pages of the API: one for each public module, with what it gives, grouped by kind.

What is public is what ``tests/project/public_api.py`` says; what is said of it stands in the docstrings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.project.public_api import PUBLIC, Module, home_of, names_of, owners

GROUPS: Final = ("Functions", "Classes", "Errors", "Types and constants")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Path and text of each page."""
    for module in PUBLIC:
        yield f"reference/{module}.md", "\n".join(_page(module))


def _page(module: str) -> Iterator[str]:
    yield f"# {module}\n"
    yield f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}\n"
    names: dict[str, list[str]] = {group: [] for group in GROUPS}
    elsewhere = []
    for name in names_of(module):
        home, original = home_of(module, name)
        owner = owners()[home.name, original]
        if owner == module:
            names[_group(home, original)].append(name)
        else:
            elsewhere.append(f"[`{name}`][{owner}.{original}]")
    if elsewhere:
        yield f"Also importable from here: {', '.join(elsewhere)}.\n"
    for group in GROUPS:
        if names[group]:
            yield f"## {group}\n"
            yield from (f"::: {module}.{name}\n" for name in names[group])


def _group(home: Module, name: str) -> str:
    statement = home.bound[name][0]
    if isinstance(statement, ast.ClassDef):
        return "Errors" if _is_error(home, name) else "Classes"
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return "Functions"
    return "Types and constants"


def _is_error(home: Module, name: str) -> bool:
    """Whether this is a class that can be raised, as far as the sources say."""
    for statement in home.bound.get(name, ()):
        if isinstance(statement, ast.ClassDef):
            return any(_is_error(*home_of(home.name, ast.unparse(base))) for base in statement.bases)
    return name.endswith(("Error", "Exception"))
