"""``tests/project/public_api.txt`` lists exactly the public API, and all of it can be imported."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

from lanes.core.types import Message, Partition, Settlement
from tests.project import public_api
from tests.project.public_api import (
    FILE,
    ONLY,
    PACKAGES,
    PUBLIC,
    ROOT,
    home_of,
    modules,
    names_of,
    path_of,
    read,
    surface,
)

DECISION = (
    "A change of the public surface is a decision. If it is meant: run `python -m tests.project.public_api`, look at "
    "the difference of tests/project/public_api.txt, and tell of it in CHANGELOG.md.\n\n"
)

SHOWN = [
    *sorted((ROOT / "examples").rglob("*.py")),
    *(ROOT / "README.md", ROOT / "memsource" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
"""Where a user sees imports."""


def test_the_public_api_equals_its_list() -> None:
    before, now = FILE.read_text(), surface()
    difference = "\n".join(
        difflib.unified_diff(before.split("\n"), now.split("\n"), "decided", "found", lineterm="", n=8)
    )
    assert before == now, DECISION + difference


# --- `__all__` is what is given


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_of_a_public_module_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names_of(module) if not hasattr(found, name)] == []
    assert set(names_of(module)) <= set(read(module).all or ())
    assert set(names_of(module)) <= set(dir(found)), "every public name must be in dir() of its module"


def taken(module: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each name that a module imports from a module of this project; submodules are left
    out."""
    for node in ast.walk(read(module).tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and path_of(node.module) is not None:
            for alias in node.names:
                if path_of(f"{node.module}.{alias.name}") is None:
                    yield node.module, alias.name


def test_no_module_imports_a_private_name_of_another() -> None:
    """A name with an underscore is used only in its module."""
    wrong = [
        f"{module}: {source}.{name}"
        for module in modules()
        for source, name in taken(module)
        if name.startswith("_") and name != "__version__"
    ]
    assert wrong == []


def test_only_public_modules_list_their_names() -> None:
    """``PUBLIC`` lists the public modules; a private module has ``__all__`` only to export names of other modules."""
    listing = {module for module in modules() if read(module).all is not None} - set(PUBLIC)
    assert [module for module in sorted(listing) if set(read(module).all or ()) <= read(module).bound.keys()] == []


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_and_examples_import_only_public_names(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(textwrap.dedent(block) for block in re.findall(r"```python[^\n]*\n(.*?)```", text, re.DOTALL))
    private = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and path_of(str(node.module)) is not None
        and not (node.module in PUBLIC and {alias.name for alias in node.names} <= set(names_of(node.module)))
    ]
    assert private == []


# --- the text is true


def definitions() -> Iterator[tuple[str, str, ast.stmt, object]]:
    """Yield every definition of the public API: its module, its name, its parsed node, and the imported object."""
    for module in PUBLIC:
        for one in names_of(module):
            home, name = home_of(module, one)
            yield module, one, home.bound[name][-1], getattr(importlib.import_module(module), one)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, inspect._ParameterKind]]:
    arguments, kinds = node.args, inspect.Parameter
    read_off: list[tuple[list[ast.arg], inspect._ParameterKind]] = [
        (arguments.posonlyargs, kinds.POSITIONAL_ONLY),
        (arguments.args, kinds.POSITIONAL_OR_KEYWORD),
        ([arguments.vararg] if arguments.vararg else [], kinds.VAR_POSITIONAL),
        (arguments.kwonlyargs, kinds.KEYWORD_ONLY),
        ([arguments.kwarg] if arguments.kwarg else [], kinds.VAR_KEYWORD),
    ]
    return [(one.arg, kind) for ones, kind in read_off for one in ones]


def test_the_list_has_the_parameters_of_each_public_function() -> None:
    compared = 0
    for module, name, node, there in definitions():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert callable(there)
            found = [(one.name, one.kind) for one in inspect.signature(there).parameters.values()]
            assert found == parameters(node), f"{module}.{name}"
            compared += 1
    assert compared > 20


def test_the_list_has_the_methods_of_each_public_class() -> None:
    """A class has no further method by a base, a decorator or an assignment."""
    compared = 0
    for module, name, node, there in definitions():
        if not isinstance(node, ast.ClassDef):
            continue
        assert isinstance(there, type)
        own = {base for base in there.__mro__ if base.__module__.partition(".")[0] in PACKAGES}
        methods = {
            method
            for base in own
            for method, value in vars(base).items()
            if not method.startswith("_") and isinstance(value, FunctionType | property | classmethod | staticmethod)
        }
        told = {
            method
            for base in own
            for home, original in [home_of(base.__module__, base.__name__)]
            for statement in home.bound[original]
            if isinstance(statement, ast.ClassDef)
            for method in public_api.members(home, statement)[1]
            if not method.startswith("_")
        }
        assert methods == told, f"{module}.{name}"
        compared += len(methods)
    assert compared > 100


@pytest.mark.parametrize("kind", [Message, Partition, Settlement])
def test_internal_fields_of_public_values_are_not_listed(kind: type) -> None:
    home, name = home_of("lanes.core.types", kind.__name__)
    (node,) = home.bound[name]
    assert isinstance(node, ast.ClassDef)
    assert public_api.members(home, node)[0].keys() == set(kind.__slots__)  # type: ignore[attr-defined]
    (base,) = kind.__bases__
    assert vars(base)["__slots__"] and public_api.class_lines(home, node)[0] == f"class {name}"


def test_public_names_are_listed() -> None:
    text = FILE.read_text()
    assert [module for module in PUBLIC if f"\n[{module}]\n" not in text] == []
    assert ONLY.keys() <= set(PUBLIC)
    assert " object at 0x" not in text


# --- the reader of sources


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "def f(a: int, /, b='x', *, c: float = 1.0, **d: int) -> None: ...",
            "def f(a: int, /, b='x', *, c: float = 1.0, **d: int) -> None",
        ),
        ("async def f(*a: str) -> dict[str, int]: ...", "async def f(*a: str) -> dict[str, int]"),
        ("f: Final = {1: 'a'}", "f: Final = {1: 'a'}"),
        ("f = Literal['a', 'b']", "f = Literal['a', 'b']"),
        (
            "class f(B, metaclass=M):\n  _a: int\n  b: int = 1\n  def __repr__(self): ...",
            "class f(B, metaclass=M)\n    b: int = 1",
        ),
        (
            "class f:\n  def __init__(self, a: int):\n    self.a = a\n    self._b = a",
            "class f\n    a: int\n    def __init__(self, a: int)",
        ),
        (
            "class f:\n  @property\n  def b(self) -> int: ...\n  a: str",
            "class f\n    a: str\n    @property\n    def b(self) -> int",
        ),
        (
            "@overload\ndef f(a: int): ...\n@overload\ndef f(a: str): ...\ndef f(a): ...",
            "@overload\ndef f(a: int)\n@overload\ndef f(a: str)\ndef f(a)",
        ),
        (
            "class _B:\n  a: int\n  def b(self): ...\nclass f(_B):\n  def c(self): ...",
            "class f(_B)\n    a: int\n    def b(self)\n    def c(self)",
        ),
        (
            f"def f({', '.join(f'parameter_{n}' for n in range(9))}) -> None: ...",
            "def f(\n" + ",\n".join(f"    parameter_{n}" for n in range(9)) + "\n) -> None",
        ),
    ],
)
def test_a_public_definition_is_described_as_in_the_source(
    source: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = public_api.module_of("lanes.example", source)
    monkeypatch.setattr(public_api, "home_of", lambda _, name: (module, name))
    assert "\n".join(public_api.described(module, "f")) == text


def test_a_default_with_a_name_is_told_by_its_value() -> None:
    found, _ = home_of("lanes.config", "Settings")
    lines = public_api.described(found, "Settings")
    assert "    max_in_flight_bytes: int = 64 * 1024 * 1024" in lines
