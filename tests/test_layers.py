"""Imports point one way: the table of layers in ``docs/design.md`` is what every import of what is shipped is held to.

The finer order within the core, and its purity, are in ``tests/core/test_purity.py``.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from typing import Any, Final, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.public_api import PACKAGES, ROOT, modules, path_of, read

PAGE: Final = ROOT / "docs" / "design.md"
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BESIDE: Final = {
    "bench": {"tests.components"},
    "fuzz": {"tests"},
    "examples": set[str](),
    "tests": {"bench", "fuzz", "examples"},
}
"""What is not shipped, and what each of it imports of the others."""


@dataclass(frozen=True)
class Layer:
    """One row of the table."""

    name: str
    members: tuple[str, ...]  # modules, or `package.*`
    knows: frozenset[str]  # layers
    third: frozenset[str]  # top-level names of what is imported
    extras: frozenset[str]  # of the project; or a distribution that none of them has
    lazily: frozenset[str]  # layers and third parties


class Import(NamedTuple):
    """``wanted`` is a module of this project, shipped or not, or the top-level name of a third party."""

    module: str
    line: int
    wanted: str
    lazy: bool  # inside of a function, or for the type checker

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.wanted}{', when used' if self.lazy else ''}"


def words(cell: str) -> frozenset[str]:
    """What a cell lists: separated by commas, code without its marks."""
    return frozenset(re.sub("^and ", "", one.strip()).strip("`") for one in re.split("[,;]", cell) if one.strip())


@cache
def layers() -> dict[str, Layer]:
    """The table, by the names of the layers."""
    found: dict[str, Layer] = {}
    rows = PAGE.read_text().partition("| layer | what is in it |")[2].splitlines()[2:]
    for row in rows:
        if not row.startswith("|"):
            break
        name, members, knows, third, extras, lazily = (cell.strip() for cell in row.split("|")[1:-1])
        assert name not in found, f"{name} has two rows"
        inside = tuple(sorted(words(members)))
        found[name] = Layer(name, inside, words(knows), words(third), words(extras), words(lazily))
    return found


@cache
def layer_of(module: str) -> Layer:
    """The layer that names a module, or else the one that has it by the longest ``package.*``."""
    matching = [
        (len(member), layer)
        for layer in layers().values()
        for member in layer.members
        if member == module or (member.endswith(".*") and f"{module}.".startswith(member[:-1]))
    ]
    exact = [layer for _, layer in matching if module in layer.members]
    assert matching, f"{module} is in no layer of docs/design.md"
    assert len(exact) < 2, f"{module} is in two layers"
    return exact[0] if exact else max(matching, key=lambda found: found[0])[1]


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it is passed only when something is called or by the type checker."""
    for child in ast.iter_child_nodes(node):
        checked = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        inner = lazy or checked or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, inner
        yield from walk(child, inner)


def is_foreign(top: str) -> bool:
    """Whether a top-level name is a third party's."""
    return top not in PACKAGES and top not in BESIDE


def imports(module: str, tree: ast.Module) -> Iterator[Import]:
    """All of a module but those of the standard library. ``import_module("x")`` counts."""
    for node, lazy in walk(tree):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(source), names=aliases):
                inner = [f"{source}.{alias.name}" for alias in aliases]
                names = [one if path_of(one) is not None or source == "tests" else source for one in inner]
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[called]):
                names = [str(called.value)] if isinstance(called, ast.Constant) else []
            case _:
                continue
        for name in dict.fromkeys(names):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names:
                yield Import(module, getattr(node, "lineno", 0), top if is_foreign(top) else name, lazy)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for module in modules() for found in imports(module, read(module).tree))


def needed(found: Import) -> str:
    """What the table has to allow: a layer, or a third party."""
    top = found.wanted.partition(".")[0]
    return layer_of(found.wanted).name if top in PACKAGES else top


def is_allowed(found: Import) -> bool:
    layer = layer_of(found.module)
    wanted = needed(found)
    return wanted == layer.name or wanted in layer.knows | layer.third or (found.lazy and wanted in layer.lazily)


def test_every_module_is_in_one_layer() -> None:
    assert {layer_of(module).name for module in modules()} == layers().keys()
    gone = [name for layer in layers().values() for name in layer.members if path_of(name.removesuffix(".*")) is None]
    assert gone == [], "the table names modules that are not there"


def test_layers_know_layers_that_are_there_and_above_them() -> None:
    # `knows` alone: what is imported when it is used may go around.
    order = graphlib.TopologicalSorter({layer.name: layer.knows for layer in layers().values()})
    assert set(order.static_order()) == layers().keys()


def test_imports_keep_to_the_table() -> None:
    wrong = [str(found) for found in all_imports() if not is_allowed(found)]
    assert wrong == [], "the table in section 3 of docs/design.md does not allow:\n" + "\n".join(wrong)


def test_what_the_table_allows_is_needed() -> None:
    used: dict[tuple[str, bool], set[str]] = {}
    for found in all_imports():
        used.setdefault((layer_of(found.module).name, found.lazy), set()).add(needed(found))
    idle = {
        layer.name: (layer.knows | layer.third) - used.get((layer.name, False), set())
        | layer.lazily - used.get((layer.name, True), set())
        for layer in layers().values()
    }
    assert {name: sorted(left) for name, left in idle.items() if left} == {}


def test_no_two_modules_need_each_other() -> None:
    wanted: dict[str, set[str]] = {module: set() for module in modules()}
    for found in all_imports():
        if not found.lazy and found.wanted in wanted and found.wanted != found.module:
            wanted[found.module].add(found.wanted)
    tuple(graphlib.TopologicalSorter(wanted).static_order())  # raises CycleError, with the cycle


def asked_by(extra: str) -> set[str]:
    """The distributions of an extra; a word that is none is a distribution."""
    asked = PROJECT["optional-dependencies"].get(extra, [extra])
    return {canonicalize_name(Requirement(one).name) for one in asked}


def test_what_is_imported_from_others_is_asked_for() -> None:
    """By the project itself, or by the extras that the layer names. pytest alone imports its plug-in."""
    core = {canonicalize_name(Requirement(one).name) for one in PROJECT["dependencies"]}
    homes = {top: {canonicalize_name(one) for one in found} for top, found in packages_distributions().items()}
    missing = [
        f"{layer.name}: {top}"
        for layer in layers().values()
        for top in layer.third - {"pytest"}
        if not homes[top] & core.union(*map(asked_by, layer.extras))
    ]
    assert missing == []


def test_extras_that_layers_name_are_needed() -> None:
    known = [one for layer in layers().values() for one in layer.extras if one not in PROJECT["optional-dependencies"]]
    assert known == ["psycopg-pool"], "the demo on Spark says so when it is not there"


def test_what_is_not_shipped_keeps_to_itself() -> None:
    """Nothing that is shipped imports it, for it is in no layer; and of the rest each imports what it may."""
    named = re.compile(rf"^\s*(from|import) ({'|'.join(BESIDE)})\b", re.MULTILINE)
    wrong = [
        str(found)
        for folder, allowed in BESIDE.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if any(top != folder for _, top in named.findall(path.read_text()))  # to parse all would take seconds
        for found in imports(str(path.relative_to(ROOT)), ast.parse(path.read_text()))
        if found.wanted.partition(".")[0] in BESIDE.keys() - {folder}
        and not any(f"{found.wanted}.".startswith(f"{one}.") for one in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("lanes.core.engine", "import anyio", False),
        ("lanes.core.engine", "from lanes import errors", False),
        ("lanes.source", "from lanes.core import types", True),
        ("lanes.source", "from lanes.core.engine import Engine", False),
        ("lanes.source", "import typer", False),
        ("lanes.runtime.run", "import lanes.consumer", False),
        ("lanes.consumer", "import memsource", False),
        ("lanes.consumer", "def f():\n  import lanes_kafka", False),
        ("lanes.consumer", "from tests.components import wait_until", False),
        ("lanes.cli.app", "import typer", True),
        ("lanes.cli.app", "import lanes_kafka.cli.commands", False),
        ("lanes.cli.app", "def f():\n  import lanes_kafka.cli.commands", True),
        ("lanes.history.columns", "def f():\n  import_module('pyarrow.json')", True),
        ("lanes.history.columns", "import pyarrow", False),
        ("lanes_kafka.source", "from lanes.core.engine import Engine", False),
        ("lanes_kafka.source", "import lanes_jetstream", False),
        ("lanes_kafka.source", "import typer", False),
        ("lanes_kafka.cli.commands", "import typer", True),
        ("memsource.world", "import hypothesis", False),
        ("memsource.sim.plans.strategies", "import hypothesis", True),
    ],
)
def test_what_is_allowed_and_what_not(module: str, line: str, allowed: bool) -> None:
    (found,) = imports(module, ast.parse(line))
    assert is_allowed(found) is allowed
