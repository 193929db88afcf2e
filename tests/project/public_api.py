"""The public API as text: the importable names, with their kinds, signatures, fields and defaults.

``python -m tests.project.public_api`` writes ``public_api.txt`` in this folder, and ``test_public_api`` compares the
file. The program parses the sources without importing them. So annotations are shown as written, and every Python
version writes the same text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "tests" / "project" / "public_api.txt"

PACKAGES: Final = ("lanes", "memsource", "lanes_jetstream", "lanes_kafka", "lanes_postgres", "lanes_spark")
"""The packages that are shipped."""

PUBLIC: Final = (
    "lanes",
    "lanes.ring",
    # For authors of a backend: docs/guides/writing-a-source.md
    "lanes.source",
    "lanes.outputs",
    "lanes.core.types",
    "lanes.clock",
    "lanes.retention",
    "lanes.cohort",
    "lanes.ownership",
    "lanes.dead_letters",
    "lanes.web",
    "memsource",
    # For authors of a backend: the contract suites
    "memsource.contract",
    "memsource.contract.commits",
    "memsource.contract.leases",
    "memsource.contract.epochs",
    "memsource.contract.dead_letters",
    "memsource.contract.publishers",
    "memsource.contract.attempts",
    "memsource.contract.states",
    "memsource.contract.locks",
    # For authors of tests and checkers: docs/guides/testing.md, docs/checkers.md, docs/design.md
    "memsource.checkers",
    "memsource.explorer",
    "memsource.sim.runs.machine",
    "memsource.sim.plans.strategies",
    "lanes_jetstream",
    "lanes_kafka",
    "lanes_postgres",
    "lanes_spark",
    "lanes_spark.plan",
)
"""The modules that the documentation imports or names. All other modules are private."""

ONLY: Final = {
    "lanes.core.types": (
        "Message",
        "NEVER",
        "Partition",
        "PartitionId",
        "PartitionKey",
        "Reader",
        "Room",
        "Runs",
        "Settlement",
        "key_bytes",
    ),
    "lanes_spark.plan": ("make_plan",),
}
"""The public names of modules whose other names are for the project only."""

INTERNAL: Final = {
    ("lanes.core.types", name) for name in ("MessageInternals", "PartitionInternals", "SettlementInternals")
}
"""Base classes with the engine's own fields of public objects; these fields are private."""

WIDTH: Final = 116

# Special methods that a user calls by syntax or by a built-in function. Other special methods are not listed.
CALLED: Final = {
    f"__{name}__"
    for name in (
        *("init", "new", "call", "await", "enter", "exit", "aenter", "aexit", "iter", "next", "aiter", "anext"),
        *("bool", "contains", "getitem", "len"),
    )
}

# The node types of a plain value.
PLAIN: Final = (ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Tuple, ast.expr_context)


@dataclass(frozen=True, eq=False)
class Module:
    """A source file, with its top-level statements and imports by name."""

    name: str
    tree: ast.Module
    bound: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[str, str]]

    @cached_property
    def all(self) -> tuple[str, ...] | None:
        """The sorted ``__all__``; None if the module has none."""
        for statement in self.bound.get("__all__", ()):
            assert isinstance(statement, ast.Assign)
            return tuple(sorted(ast.literal_eval(statement.value)))
        return None


@cache
def path_of(module: str) -> Path | None:
    """Return the file of a module; None for a module of another project."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    for base in (ROOT, ROOT / "adapters"):
        place = base.joinpath(*module.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def modules() -> tuple[str, ...]:
    """Return the full names of all shipped modules."""
    paths = [
        path.relative_to(base).with_suffix("")
        for package in PACKAGES
        for base in (ROOT, ROOT / "adapters")
        for path in (base / package).rglob("*.py")
    ]
    return tuple(sorted(".".join(path.parts).removesuffix(".__init__") for path in paths))


@cache
def read(module: str) -> Module:
    """Parse a module of this project."""
    path = path_of(module)
    assert path is not None, f"no file of the project defines the module {module}"
    return module_of(module, path.read_text())


def module_of(name: str, source: str) -> Module:
    """Parse this text as a module."""
    module = Module(name, ast.parse(source, name), {}, {})
    _enter(module.tree.body, module)
    return module


def _enter(body: list[ast.stmt], module: Module) -> None:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                module.bound.setdefault(name, []).append(statement)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                module.bound.setdefault(name, []).append(statement)
            case ast.ImportFrom(module=str(source), names=names):
                module.imported.update({alias.asname or alias.name: (source, alias.name) for alias in names})
            case ast.If(body=inner, orelse=other):  # `if TYPE_CHECKING`, in which a lazy package imports its names
                _enter([*inner, *other], module)


@cache
def home_of(module: str, name: str) -> tuple[Module, str]:
    """Return the module that defines a name, and its name there. Imports are followed within this project."""
    here = read(module)
    while name not in here.bound and name in here.imported and path_of(here.imported[name][0]) is not None:
        source, name = here.imported[name]
        here = read(source)
    return here, name


def names_of(module: str) -> tuple[str, ...]:
    """Return the public names of a public module."""
    names = ONLY.get(module, read(module).all)
    assert names is not None, f"the public module {module} has no __all__: add one"
    return names


@cache
def owners() -> dict[tuple[str, str], str]:
    """Return the public module that describes each definition: the defining module, or else the first that exports the
    name."""
    found: dict[tuple[str, str], str] = {}
    for module in PUBLIC:
        for name in names_of(module):
            home, original = home_of(module, name)
            found.setdefault((home.name, original), module)
            if home.name in PUBLIC and original in names_of(home.name):
                found[home.name, original] = home.name
    return found


def surface() -> str:
    """Return the text of the whole public API. A name of several modules is described in one of them, by ``owners``."""
    lines = ["# The public surface. Written by `python -m tests.project.public_api`, compared by test_public_api.py."]
    for module in PUBLIC:
        lines += ["", f"[{module}]"]
        for name in names_of(module):
            home, original = home_of(module, name)
            owner = owners()[home.name, original]
            if owner == module:
                lines += described(home, original)
            else:
                lines.append(f"{name} = {owner}.{original}")
    return "\n".join(lines) + "\n"


def described(home: Module, name: str) -> list[str]:
    """Return the lines of a definition; the lines of its members are indented."""
    assert name in home.bound, f"{home.name}: found no class, function or assignment that defines {name}"
    statements = home.bound[name]
    if isinstance(statements[0], ast.ClassDef):
        return class_lines(home, statements[0])
    if isinstance(statements[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return function_lines(home, statements, "")
    return constant_lines(statements[0], "")


def constant_lines(statement: ast.stmt, indent: str) -> list[str]:
    """Return the lines of a constant, an alias or a field, with its value."""
    assert isinstance(statement, ast.Assign | ast.AnnAssign)
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    line = f"{indent}{ast.unparse(target)}"
    if isinstance(statement, ast.AnnAssign):
        line += f": {ast.unparse(statement.annotation)}"
    if statement.value is not None:
        line += f" = {ast.unparse(statement.value)}"
    return wrapped(line)


def function_lines(home: Module, statements: list[ast.stmt], indent: str) -> list[str]:
    """Return the lines of a function with its overloads, or of a property with its setter."""
    lines = []
    for function in statements:
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        lines += [f"{indent}@{ast.unparse(decorator)}" for decorator in function.decorator_list]
        kind = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
        returned = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
        lines += wrapped(f"{indent}{kind} {function.name}({signature(home, function.args)}){returned}")
    return lines


def signature(home: Module, arguments: ast.arguments) -> str:
    """Return the parameters, with annotations as written. A default that names a constant is shown by its value."""
    every = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(every) - len(arguments.defaults)), *arguments.defaults]
    parts = [_parameter(home, one, default) for one, default in zip(every, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parts.append(f"*{_parameter(home, arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_parameter(home, *one) for one in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        parts.append(f"**{_parameter(home, arguments.kwarg, None)}")
    return ", ".join(parts)


def _parameter(home: Module, one: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {ast.unparse(one.annotation)}" if one.annotation is not None else ""
    if default is None:
        return one.arg + annotation
    return f"{one.arg}{annotation}{' = ' if annotation else '='}{value_of(home, default)}"


def value_of(home: Module, default: ast.expr) -> str:
    """Return a default as text; the name of a constant with a plain value is replaced by the value."""
    if isinstance(default, ast.Name):
        there, name = home_of(home.name, default.id)
        for statement in there.bound.get(name, ()):
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if value is not None and all(isinstance(node, PLAIN) for node in ast.walk(value)):
                return ast.unparse(value)
    return ast.unparse(default)


def class_lines(home: Module, node: ast.ClassDef) -> list[str]:
    """Return the lines of a class: its bases, its fields in order, and its public methods. Members of private bases
    count as its own."""
    lines = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    bases = [ast.unparse(base) for base in [*node.bases, *node.keywords] if not is_internal(home, base)]
    lines += wrapped(f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}")
    fields, methods = members(home, node)
    for found in [*fields.values(), *(methods[name] for name in sorted(methods))]:
        lines += found
    return lines


@cache
def members(home: Module, node: ast.ClassDef) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the fields and methods that a user can access through an instance, by name."""
    fields: dict[str, list[str]] = {}
    methods: dict[str, list[str]] = {}
    kept: set[str] = set()
    for base in reversed(node.bases):
        there, name = home_of(home.name, base.id) if isinstance(base, ast.Name) else (home, "")
        for statement in there.bound.get(name, ()):
            if isinstance(statement, ast.ClassDef) and not is_public(there, name):
                of_base, by_base = members(there, statement)
                if is_internal(home, base):
                    kept |= of_base.keys()
                    continue
                fields |= of_base
                methods |= by_base
    own: dict[str, list[ast.stmt]] = {}
    for name, statement in _class_statements(node):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            if name not in own and name not in kept:
                fields[name] = _field_lines(home, statement)
        else:
            own.setdefault(name, []).append(statement)
    return fields, methods | {name: function_lines(home, found, "    ") for name, found in own.items()}


def is_internal(home: Module, base: ast.AST) -> bool:
    """Whether a base class holds the engine's own fields."""
    if not isinstance(base, ast.Name):
        return False
    there, name = home_of(home.name, base.id)
    return (there.name, name) in INTERNAL


@cache
def is_public(home: Module, name: str) -> bool:
    """Whether a public module exports this name of a private module."""
    return any(
        (found.name, original) == (home.name, name)
        for module in PUBLIC
        for one in names_of(module)
        for found, original in [home_of(module, one)]
    )


def _class_statements(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the methods and fields of a class with a public name, including the fields that ``__init__`` sets."""
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name in CALLED or not name.startswith("_"):
                    yield name, statement
                if name == "__init__":
                    assert isinstance(statement, ast.FunctionDef)
                    yield from _fields_set(statement)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if not name.startswith("_"):
                    yield name, statement


def _fields_set(init: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt]]:
    annotation: ast.expr | None
    annotations = {one.arg: one.annotation for one in [*init.args.args, *init.args.kwonlyargs]}
    for node in ast.walk(init):
        match node:
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=annotation):
                pass
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                annotation = annotations.get(value.id) if isinstance(value, ast.Name) else None
            case _:
                continue
        if not name.startswith("_"):
            type_ = annotation if annotation is not None else ast.Constant(...)
            yield name, ast.AnnAssign(ast.Name(name), type_, None, simple=1)


def _field_lines(home: Module, statement: ast.Assign | ast.AnnAssign) -> list[str]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Name):
        value = ast.parse(value_of(home, statement.value), mode="eval").body
        statement = ast.AnnAssign(statement.target, statement.annotation, value, simple=1)
    return constant_lines(statement, "    ")


def wrapped(line: str) -> list[str]:
    """Return a line, or several lines if it is too long: the longest pair of brackets is broken after its commas."""
    if len(line) <= WIDTH:
        return [line]
    brackets: list[list[int]] = []  # of each outermost pair: the index of its start, of its commas, and of its end
    depth, quoted = 0, ""
    for place, sign in enumerate(line):
        if quoted:
            quoted = "" if sign == quoted else quoted
        elif sign in "'\"":
            quoted = sign
        elif sign in "([{":
            depth += 1
            if depth == 1:
                brackets.append([place])
        elif sign in ")]}":
            depth -= 1
            if depth == 0:
                brackets[-1].append(place)
        elif sign == "," and depth == 1:
            brackets[-1].append(place)
    opened, *commas, closed = max(brackets, key=lambda places: places[-1] - places[0])
    indent = line[: len(line) - len(line.lstrip())]
    edges = [opened, *commas, closed - 1]
    parts = [line[start + 1 : end + 1].strip() for start, end in pairwise(edges)]
    return [line[: opened + 1], *(f"{indent}    {part}" for part in parts), indent + line[closed:]]


if __name__ == "__main__":
    FILE.write_text(surface())
    print(f"{FILE.relative_to(ROOT)}: written")
