"""The pages of the API reference: a page for each public module, with its names grouped by kind.

``tests/project/public_api.py`` lists the public modules. The docstrings contain the descriptions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from tests.project.public_api import PUBLIC, Module, home_of, names_of, owners

GROUPS: Final = ("Functions", "Classes", "Errors", "Types and constants")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page."""
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
    """Whether the name is an exception class, judged by its bases in the sources."""
    for statement in home.bound.get(name, ()):
        if isinstance(statement, ast.ClassDef):
            return any(_is_error(*home_of(home.name, ast.unparse(base))) for base in statement.bases)
    return name.endswith(("Error", "Exception"))
