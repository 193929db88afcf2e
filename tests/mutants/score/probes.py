"""Finds the lines that a test executes: the functions get code that reports each block, which costs almost nothing."""

from __future__ import annotations

import ast
import builtins
from types import CodeType

_NAME = "__mutants_hit__"


class Probes:
    """Files with a probe at the start of each block of each function.

    Attributes:
        hits: Numbers of the blocks that were executed.
    """

    def __init__(self) -> None:
        self.hits: set[int] = set()
        self._lines: list[tuple[str, list[int]]] = []
        setattr(builtins, _NAME, self.hits.add)

    def code(self, file: str, path: str, source: str) -> CodeType:
        """Return the code of a module with probes.

        Args:
            file: Name of the file in ``lines``.
            path: Path that the code gets.
            source: Source of the module.
        """
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for block in [*_blocks(node)]:
                    self._probe(file, block)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def lines(self) -> dict[str, list[int]]:
        """The executed lines of each file."""
        found: dict[str, set[int]] = {}
        for number in self.hits:
            file, lines = self._lines[number]
            found.setdefault(file, set()).update(lines)
        return {file: sorted(lines) for file, lines in found.items()}

    def _probe(self, file: str, block: list[ast.stmt]) -> None:
        lines = [line for statement in block for line in _lines(statement)]
        call = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(len(self._lines))], [])
        self._lines.append((file, lines))
        block.insert(0, ast.copy_location(ast.Expr(call), block[0]))


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """The blocks of a function, without the blocks of nested functions."""
    found = []
    parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    for block in parts:
        # The body of a lambda or of a conditional expression is no list.
        if isinstance(block, list) and block:
            found.append(block)
            for statement in block:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found += _blocks(statement)
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        found += _blocks(part)
    return found


def _lines(statement: ast.stmt) -> range:
    """The lines of a statement, or of the head of a compound statement up to its first block."""
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    last = statement.end_lineno or statement.lineno
    if isinstance(body, list):
        first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
        last = max(statement.lineno, first.lineno - 1)
        if isinstance(statement, ast.Try):
            last = max(last, *(handler.lineno for handler in statement.handlers)) if statement.handlers else last
        if isinstance(statement, ast.Match):
            last = max(case.pattern.end_lineno or 0 for case in statement.cases)
    return range(statement.lineno, last + 1)
