"""All mutations of a file: those of mutmut's operators, a call that is left out, and a condition that is negated."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeRange, CodeSpan, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_NEVER_CALLS: Final = frozenset({"cast", "isinstance", "len"})
"""Calls that no operator changes. mutmut has the last two."""

_CHANGED: Final = (cst.BooleanOperation, cst.Comparison, cst.UnaryOperation)
"""Conditions that mutmut's operators change already."""


@dataclass(frozen=True)
class Mutation:
    """A change of one function.

    Attributes:
        file: Path of the file, relative to the project.
        function: Qualified name of the outermost function around the change.
        change: The changed lines, before and after, in one line. Unique in its function.
        first: First line of the change.
        last: Last line of the change.
        def_line: First line of the function, with its decorators.
        source: Digest of the function's source.
        text: Source of the whole file with the change.
    """

    file: str
    function: str
    change: str
    first: int
    last: int
    def_line: int
    source: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.function}: {self.change}"

    @property
    def number(self) -> int:
        """A number for samples, which depends on the file and the name alone."""
        return int.from_bytes(hashlib.sha256(f"{self.file} {self.name}".encode()).digest()[:4], "big")


def mutations_of(path: Path, file: str, functions: Collection[str] | None = None) -> list[Mutation]:
    """Return the mutations of a file, in the order of its lines.

    Args:
        path: The file.
        file: Name of the file in the results.
        functions: Qualified names of the outermost functions to change; None = all functions.
    """
    text = path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(text))
    visitor = _Visitor(wrapper.module, text, file, functions)
    wrapper.visit(visitor)
    return visitor.found


def sampled(mutations: Iterable[Mutation], every: int, seed: int) -> list[Mutation]:
    """Return one of ``every`` samples, which together have all mutations.

    Args:
        mutations: The mutations.
        every: Number of samples.
        seed: Number of the sample, 0 or more.
    """
    return [each for each in mutations if each.number % every == seed % every]


class _Visitor(cst.CSTVisitor):  # type: ignore[misc]
    METADATA_DEPENDENCIES = (PositionProvider, ByteSpanPositionProvider)

    def __init__(self, module: cst.Module, text: str, file: str, functions: Collection[str] | None) -> None:
        super().__init__()
        self.found: list[Mutation] = []
        self._module = module
        self._bytes = text.encode()
        self._lines = text.splitlines()
        self._file = file
        self._functions = functions
        self._names: list[str] = []
        self._outer: cst.FunctionDef | None = None
        self._outer_name = ""
        self._digest = ""
        self._def_line = 0
        self._seen: Counter[tuple[str, str]] = Counter()

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802 - libcst's name
        self._names.append(node.name.value)
        node.body.visit(self)
        self._names.pop()
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - libcst's name
        outermost = self._outer is None
        if outermost:
            name = ".".join((*self._names, node.name.value))
            if self._functions is not None and name not in self._functions:
                return False
            self._outer = node
            self._outer_name = name
            first = node.decorators[0] if node.decorators else node
            self._def_line = self._range(first).start.line
            self._digest = hashlib.sha256(self._module.code_for_node(node).encode()).hexdigest()[:16]
        # Neither parameters nor decorators: they are evaluated before the code of the function can be replaced.
        node.body.visit(self)
        if outermost:
            self._outer = None
        return False

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._outer is not None:
            if isinstance(node, cst.Annotation) or _is_docstring(node) or _is_text(node):
                return False
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in _NEVER_CALLS:
                return bool(node.func.value != "cast")
            for mutated in _mutated(node):
                self._add(node, mutated)
        return bool(super().on_visit(node))

    def _range(self, node: cst.CSTNode) -> CodeRange:
        return self.get_metadata(PositionProvider, node)

    def _add(self, node: cst.CSTNode, mutated: cst.CSTNode) -> None:
        text = self._spliced(node, mutated)
        if text is None:
            return
        place = self._range(node)
        change = _change(self._lines, text.splitlines())
        key = (self._outer_name, change)
        self._seen[key] += 1
        if self._seen[key] > 1:
            change = f"{change} #{self._seen[key]}"
        self.found.append(
            Mutation(
                self._file,
                self._outer_name,
                change,
                place.start.line,
                _last_line(node, place, self),
                self._def_line,
                self._digest,
                text,
            )
        )

    def _spliced(self, node: cst.CSTNode, mutated: cst.CSTNode) -> str | None:
        """The source with the change, or None if nothing changes."""
        if isinstance(node, cst.BaseCompoundStatement):
            changed = self._module.deep_replace(node, mutated)
            assert isinstance(changed, cst.Module)
            return str(changed.code)
        span: CodeSpan = self.get_metadata(ByteSpanPositionProvider, node)
        new = self._module.code_for_node(mutated).encode()
        before, end = self._bytes[: span.start], span.start + span.length
        text: bytes = before + new + self._bytes[end:]
        return text.decode() if text != self._bytes else None


def _mutated(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            changes: Iterable[cst.CSTNode] = operator(node)
            yield from (change for change in changes if not _is_false_for_none(node, change))
    if isinstance(node, cst.Expr) and isinstance(node.value, (cst.Call, cst.Await)):
        yield cst.Pass()
    if isinstance(node, (cst.If, cst.While)) and not isinstance(node.test, _CHANGED):
        test = node.test if node.test.lpar else node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


def _is_text(node: cst.CSTNode) -> bool:
    """A text for people has a space. ``tests/project/messages.txt`` lists the texts of errors and logs."""
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and " " in part.value for part in node.parts)
    return isinstance(node, cst.SimpleString) and " " in node.value


def _is_false_for_none(node: cst.CSTNode, change: cst.CSTNode) -> bool:
    """Whether an assignment of False becomes one of None, which differs for no condition. There is one of True too."""
    values = (getattr(node, "value", None), getattr(change, "value", None))
    return [value.value for value in values if isinstance(value, cst.Name)] == ["False", "None"]


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString))


def _last_line(node: cst.CSTNode, place: CodeRange, visitor: _Visitor) -> int:
    """The last line of a change; for a compound statement, the last line of its condition."""
    if isinstance(node, (cst.If, cst.While)):
        place = visitor._range(node.test)
    elif isinstance(node, cst.Match):
        place = visitor._range(node.subject)
    last: int = place.end.line
    return last


def _change(old: list[str], new: list[str]) -> str:
    """The lines that differ, before and after."""
    first = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), 0)
    same_end = 0
    while same_end < min(len(old), len(new)) - first and old[-1 - same_end] == new[-1 - same_end]:
        same_end += 1
    before, after = old[first : len(old) - same_end], new[first : len(new) - same_end]
    return f"{_joined(before)} → {_joined(after)}"


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
