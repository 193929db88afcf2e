"""Every public docstring has its Google sections: each parameter and field is a row of the API reference."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.project.public_api import PUBLIC, Module, home_of, names_of, owners

SECTION: Final = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Warns|Example|Examples|Note|References):$")
ENTRY: Final = re.compile(r"^    \*{0,2}(\w+)(?: \([^)]*\))?:(?: |$)")


@dataclass(frozen=True)
class Documented:
    """A public function, class or method, and the parameters that its docstring must name."""

    name: str
    said: str
    parameters: tuple[str, ...]

    @property
    def entries(self) -> list[str]:
        """The names in the sections ``Args:`` and ``Attributes:``."""
        found: list[str] = []
        section = ""
        for line in self.said.splitlines():
            if named := SECTION.match(line):
                section = named[1]
            elif section in ("Args", "Attributes") and (entry := ENTRY.match(line)):
                found.append(entry[1])
        return found


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Return the parameters that a caller passes."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return tuple(one.arg for one in every if one.arg not in ("self", "cls") and not one.arg.startswith("_"))


def fields_of(node: ast.ClassDef) -> tuple[str, ...]:
    """Return the parameters of ``__init__``, or the public fields of a dataclass or named tuple."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return parameters_of(statement)
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list) or any(
        ast.unparse(base) == "NamedTuple" for base in node.bases
    ):
        return tuple(
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and not one.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(one.annotation)
        )
    return ()


def of_class(home: Module, node: ast.ClassDef) -> Iterator[Documented]:
    yield Documented(f"{home.name}.{node.name}", ast.get_docstring(node) or "", fields_of(node))
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
            overloaded = any(ast.unparse(one) == "overload" for one in method.decorator_list)
            if not overloaded and not any(ast.unparse(one).endswith(".setter") for one in method.decorator_list):
                yield Documented(
                    f"{home.name}.{node.name}.{method.name}", ast.get_docstring(method) or "", parameters_of(method)
                )


def documented(module: str) -> Iterator[Documented]:
    """Yield the functions, classes and methods that a public module describes; each has one such module."""
    for name in names_of(module):
        home, original = home_of(module, name)
        if owners()[home.name, original] != module:
            continue
        node = home.bound[original][-1]
        if isinstance(node, ast.ClassDef):
            yield from of_class(home, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Documented(f"{home.name}.{original}", ast.get_docstring(node) or "", parameters_of(node))


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_docstring_names_its_parameters(module: str) -> None:
    public = list(documented(module))
    assert [one.name for one in public if not one.said] == [], "add the docstrings"
    missing = {
        one.name: left for one in public if (left := [name for name in one.parameters if name not in one.entries])
    }
    assert missing == {}, "add them under `Args:` (a dataclass: `Attributes:`)"


def test_the_public_modules_describe_hundreds_of_definitions() -> None:
    assert sum(1 for module in PUBLIC for _ in documented(module)) > 400
