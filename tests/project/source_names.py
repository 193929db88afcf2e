"""The sources of the project by name: the definition of a name, the target of a call, and the callers of a function.

The program imports no module of the product. It resolves names of modules, nested functions, methods of ``self``, and
methods whose name only one class has. For any other name, the answer is None.
"""

from __future__ import annotations

import ast
import builtins
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tests.project.public_api import modules, path_of, read

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Source:
    """A module, with the parent of every node, and the origins of its imported names, including lazy imports."""

    name: str
    tree: ast.Module
    around: dict[ast.AST, ast.AST] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    methods: list[Function] = field(default_factory=list)
    errors: list[ast.ClassDef | ast.Raise] = field(default_factory=list)
    """Class definitions, which may be errors, and raise statements."""

    def __post_init__(self) -> None:
        todo: deque[ast.AST] = deque([self.tree])
        while todo:  # like `ast.walk`, and record the parent of each node
            node = todo.popleft()
            for inner in ast.iter_child_nodes(node):
                self.around[inner] = node
                todo.append(inner)
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self.imported.update({one.asname or one.name: (node.module, one.name) for one in node.names})
            elif isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, ast.ClassDef):
                self.methods += [inner for inner in node.body if isinstance(inner, Function)]
            if isinstance(node, ast.ClassDef | ast.Raise):
                self.errors.append(node)

    def outside(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parents of a node, the innermost first."""
        while node in self.around:
            node = self.around[node]
            yield node

    def function(self, node: ast.AST) -> Function | None:
        """Return the innermost function that contains a node."""
        return next((each for each in self.outside(node) if isinstance(each, Function)), None)

    def within(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class that contains a node."""
        return next((each for each in self.outside(node) if isinstance(each, ast.ClassDef)), None)

    def where(self, node: ast.AST) -> str:
        """Return the dotted name of a node: the functions and classes that contain it, and the node itself if it is one
        of them."""
        names = [each.name for each in (node, *self.outside(node)) if isinstance(each, Function | ast.ClassDef)]
        return ".".join(reversed(names)) or "the module itself"


@cache
def source(module: str) -> Source:
    """Return a module of this project."""
    return Source(module, read(module).tree)


@cache
def defined(module: str, name: str) -> tuple[Source, ast.stmt] | None:
    """Return the top-level definition of a name in a module; None if another project defines the name."""
    here = source(module)
    if name in read(module).bound:
        return here, read(module).bound[name][-1]
    from_, original = here.imported.get(name, ("", ""))
    return defined(from_, original) if path_of(from_) is not None and (from_, original) != (module, name) else None


@cache
def methods() -> dict[str, list[tuple[Source, Function]]]:
    """Return all methods of all classes, by name."""
    found: dict[str, list[tuple[Source, Function]]] = {}
    for here in map(source, modules()):
        for method in here.methods:
            found.setdefault(method.name, []).append((here, method))
    return found


@cache
def calls() -> dict[str, list[tuple[Source, ast.Call]]]:
    """Return all calls, by the name of the called function."""
    found: dict[str, list[tuple[Source, ast.Call]]] = {}
    for here in map(source, modules()):
        for call in here.calls:
            match call.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    found.setdefault(name, []).append((here, call))
    return found


def called(here: Source, call: ast.Call) -> tuple[Source, Function | ast.ClassDef] | None:
    """Return the function or class of this project that is called. A method of an unknown instance counts if its name
    is unique."""
    found: tuple[Source, ast.AST] | None = None
    match call.func:
        case ast.Name(id=name):
            found = next(
                (
                    (here, inner)
                    for outer in here.outside(call)
                    if isinstance(outer, Function)
                    for inner in outer.body
                    if isinstance(inner, Function) and inner.name == name
                ),
                None,
            ) or defined(here.name, name)
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in here.imported:
            module = ".".join(here.imported[owner])
            if path_of(module) is not None:
                found = defined(module, name)
        case ast.Attribute(value=ast.Name(id="self"), attr=name) if around := here.within(call):
            found = next(((here, one) for one in around.body if isinstance(one, Function) and one.name == name), None)
            found = found or (only[0] if len(only := methods().get(name, [])) == 1 else None)
        case ast.Attribute(attr=name) if len(only := methods().get(name, [])) == 1:
            found = only[0]
    if found is None or not isinstance(found[1], Function | ast.ClassDef):
        return None
    return found[0], found[1]


@cache
def is_error(module: str, name: str) -> bool:
    """Whether a name means an exception: of this project, of Python, or, judged by the name alone, of another
    project."""
    found = defined(module, name)
    if found is not None:
        here, node = found
        return isinstance(node, ast.ClassDef) and any(
            is_error(here.name, base.id) for base in node.bases if isinstance(base, ast.Name)
        )
    if isinstance(kind := getattr(builtins, name, None), type):
        return issubclass(kind, BaseException)
    return name in source(module).imported and name.endswith(("Error", "Exception", "Parameter"))


def arguments(call: ast.Call) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield the arguments of a call, each with its keyword or None."""
    yield from ((None, one) for one in call.args)
    yield from ((one.arg, one.value) for one in call.keywords if one.arg is not None)


@cache
def parameters(function: Function) -> dict[str, ast.expr | None]:
    """Return the parameters of a function, with their annotations."""
    given = function.args
    return {one.arg: one.annotation for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def fields_of(owner: ast.ClassDef) -> list[str]:
    """Return the arguments that create an instance: the parameters of its ``__init__``, or its fields."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return list(parameters(node))
    annotated = (node.target for node in owner.body if isinstance(node, ast.AnnAssign))
    return [target.id for target in annotated if isinstance(target, ast.Name)]


@cache
def bound(function: Function) -> dict[str, list[ast.expr]]:
    """Return the values that a function assigns to each name."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
                targets = [target]
            case ast.NamedExpr(target=target, value=value):
                targets = [target]
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                targets = [target]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                found.setdefault(name, []).append(value)
            case _:
                continue
        for one in (one for target in targets for one in ast.walk(target)):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                found.setdefault(one.id, []).append(value)
    return found
