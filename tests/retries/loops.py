"""Finds the retry loops of ``lanes`` and of the adapters in their sources.

A function is found if a loop of it pauses, or if it names a pause between retries: a constant such as ``SETTLE_RETRY``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOTS: Final = ("lanes", *(f"adapters/lanes_{name}" for name in ("jetstream", "kafka", "postgres", "spark")))

_PAUSE: Final = re.compile(r"(_RETRY|RETRY_DELAY|_PAUSES?|_AGAIN)$")
"""Names of constants that are seconds between retries."""

_HINT: Final = re.compile(r"sleep|wait\(|_RETRY|RETRY_DELAY|_PAUSE|_AGAIN")
"""A file without a match has no retry loop; most files have none, and parsing is slow."""

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def found(top: Path) -> list[str]:
    """Return the functions with a retry loop under a folder of the project, as ``module:qualified name``, sorted."""
    places = []
    for root in ROOTS:
        base = top / root
        for path in sorted(base.rglob("*.py")):
            module = ".".join(path.relative_to(base.parent).with_suffix("").parts).removesuffix(".__init__")
            source = path.read_text()
            if _HINT.search(source):
                places += [f"{module}:{name}" for name, node in _functions(ast.parse(source), "") if _waits(node)]
    return sorted(places)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            name = prefix + child.name
            if isinstance(child, _FUNCTIONS):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node, without the nodes of nested functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _own(child)


def _waits(function: ast.AST) -> bool:
    for node in _own(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and _PAUSE.search(node.id):
            return True
        if isinstance(node, ast.While | ast.For | ast.AsyncFor) and any(map(_pauses, _own(node))):
            return True
    return False


def _pauses(node: ast.AST) -> bool:
    """Whether a node is a call of a sleep, or of a wait with a limit."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    return name in ("sleep", "sleep_until") or (name == "wait" and bool(node.args or node.keywords))
