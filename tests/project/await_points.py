"""Find the places where state is looked at before an await and relied on after it.

A place is a function and the name of a piece of state. Two forms count:

- A local variable gets its value from the state before an await or a call of a client, and is read after it.
- A condition reads the state, and its branch awaits or calls a client and then continues.

The state is that of ownership, leases, drains and brokers: the names in ``STATE`` and ``QUESTIONS``. A place whose
state is read again after the await counts too, because the finder does not follow the values; the table then says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("lanes", "adapters")

STATE: Final = frozenset(
    {
        *("live", "steady", "owned", "leases", "deadline", "token", "epoch", "generation", "rebalances"),
        *("assigned", "assignments", "lost", "over", "unended", "ended", "pulls"),
        *("closed", "closing", "draining", "drained", "fenced", "revoked", "releasing", "released", "returning"),
        *("stopping", "stopped", "connected", "is_connected", "paused", "floor", "by_number", "plan", "phase"),
        *("failure", "joined", "idle", "confirmed", "taken_over"),
    }
)
"""Names of attributes, with or without an underscore in front."""

QUESTIONS: Final = frozenset({"of", "owns", "leased", "assignment"})
"""Names of methods that answer about ownership."""

CLIENTS: Final = frozenset({"client", "consumer", "producer", "admin"})
CALLBACKS: Final = frozenset({"poll", "consume", "close", "unsubscribe", "flush"})
"""Calls of a Kafka client that run callbacks, and so change state like an await."""

READS: Final = frozenset({"read", "_read", "_consume"})
"""Methods of ``lanes_kafka`` that call ``consume``."""


class Shown(NamedTuple):
    """The state changes at the place in this test: ``test`` is its file and name."""

    test: str


class Harmless(NamedTuple):
    """A change of the state at the place does not matter, for this reason."""

    reason: str


class AwaitPoint(NamedTuple):
    """A function that looks at a piece of state before an await and relies on it after the await."""

    file: str
    function: str
    state: str

    def __str__(self) -> str:
        return f"{self.file}::{self.function}::{self.state}"


def await_points() -> dict[AwaitPoint, int]:
    """The places of all folders, and the line of each."""
    found: dict[AwaitPoint, int] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for place, line in in_source(path.read_text(), path.relative_to(ROOT).as_posix()):
                found.setdefault(place, line)
    return found


def in_source(source: str, file: str) -> Iterator[tuple[AwaitPoint, int]]:
    """The places of one file."""
    for name, function in _functions(ast.parse(source), ()):
        for state, line in _relied_on(function):
            yield AwaitPoint(file, name, state), line


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST, outer: Sequence[str]) -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield ".".join([*outer, node.name]), node
        inner = [*outer, node.name] if isinstance(node, Function | ast.ClassDef) else outer
        yield from _functions(node, inner)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without the nodes of nested functions, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own(child)


def _relied_on(function: Function) -> Iterator[tuple[str, int]]:
    breaks = sorted(_at(node) for node in _own(function) if _suspends(node))
    if breaks:
        yield from _variables(function, breaks)
        yield from _conditions(function, breaks)


def _variables(function: Function, breaks: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    reads = [node for node in _own(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for node in _own(function):
        value, targets = _assigned(node)
        states = [] if value is None else _states(value)
        if not states:
            continue
        names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        after = [each for each in breaks if each > _at(node)]
        if isinstance(node, ast.For) and any(_start(node.body[0]) <= each <= _at(node) for each in breaks):
            # The later passes rely on what the head of the loop has read.
            yield from ((state, node.lineno) for state in states)
        elif after and any(read.id in names and _start(read) > after[0] for read in reads):
            yield from ((state, _start(node)[0]) for state in states)


def _assigned(node: ast.AST) -> tuple[ast.expr | None, list[ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            return value, targets
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            return value, [target]
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            return value, [target]
    return None, []


def _conditions(function: Function, breaks: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    for node in _own(function):
        if not isinstance(node, ast.If | ast.While):
            continue
        states = _states(node.test)
        last = node.body[-1]
        inside = [each for each in breaks if _start(node.body[0]) <= each <= _at(last)]
        # After an early exit, the rest of the function relies on the condition.
        leaves = isinstance(last, ast.Return | ast.Raise | ast.Continue) and not inside
        behind = [each for each in breaks if each > _at(node)]
        ends = _at(function.body[-1]) if leaves else _at(last)
        first = (behind if leaves else inside)[:1]
        if (
            states
            and first
            and any(_acts(each) and _start(each) > first[0] and _at(each) <= ends for each in _own(function))
        ):
            yield from ((state, node.lineno) for state in states)


def _acts(node: ast.AST) -> bool:
    """Whether a node does something: it assigns, calls or returns a value."""
    return isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Await) or (
        isinstance(node, ast.Return) and node.value is not None
    )


def _states(value: ast.expr) -> list[str]:
    found = set()
    for node in ast.walk(value):
        match node:
            case ast.Attribute(attr=name) if name.lstrip("_") in STATE:
                found.add(name.lstrip("_"))
            case ast.Call(func=ast.Attribute(attr=name)) if name in QUESTIONS:
                found.add(name)
    return sorted(found)


def _suspends(node: ast.AST) -> bool:
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
        return True
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=of) | ast.Name(id=of), attr=name)):
            return (name in CALLBACKS and of.lstrip("_") in CLIENTS) or (name in READS and of in ("self", "_intake"))
    return False


def _start(node: ast.AST) -> tuple[int, int]:
    return (node.lineno, node.col_offset)  # type: ignore[attr-defined]


def _at(node: ast.AST) -> tuple[int, int]:
    """The end of a node; a loop or a block that suspends does so at its head."""
    if isinstance(node, ast.AsyncFor | ast.AsyncWith):
        return _start(node.body[0])
    return (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
