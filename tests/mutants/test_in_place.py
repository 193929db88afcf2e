"""A mutant is planted in an imported module exactly if new bodies of functions suffice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants import Mutant
from tests.mutants.in_place import Imported, imported

SOURCE = """
import functools

LIMIT = 3

def early():
    return 1

EARLY = early()

def doubling(function):
    @functools.wraps(function)
    def doubled(*arguments):
        return 2 * function(*arguments)
    return doubled

class Lane:
    room = 5

    def __init__(self, size=4):
        self.size = size

    @property
    def free(self):
        return self.size - 1

    @staticmethod
    def least(numbers):
        return min(number for number in numbers)

    @doubling
    def twice(self):
        return self.size

class Wide(Lane):
    @property
    def free(self):
        return super().free + 10

def counter():
    total = 0
    def count():
        nonlocal total
        total += 1
        return total
    return count
"""


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imported]:
    (tmp_path / "mutable_lane.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield imported("mutable_lane")
    sys.modules.pop("mutable_lane", None)


def planted(lane: Imported, old: str, new: str) -> ModuleType | None:
    """The module with the fault; None if the fault needs a new import."""
    mutant = Mutant("fault", "mutable_lane", old, new, "", "", ())
    return import_module("mutable_lane") if lane.plant(mutant) else None


@pytest.mark.parametrize(
    ("old", "new", "shown", "value"),
    [
        ("self.size = size", "self.size = size + 1", "Lane().size", 5),
        ("self.size - 1", "self.size -\\\n 2", "Lane().free", 2),
        ("self.size - 1", "self.size - 2", "Wide().free", 12),
        ("super().free + 10", "super().free + 20", "Wide().free", 23),
        ("min(number for", "min(-number for", "Lane.least([1, 2])", -2),
        ("return self.size\n", "return 0 * self.size\n", "Lane().twice()", 0),
        ("total += 1", "total += 7", "counter()()", 7),
    ],
)
def test_a_fault_in_the_body_of_a_function_is_planted(
    lane: Imported, old: str, new: str, shown: str, value: int
) -> None:
    module = import_module("mutable_lane")
    existing = module.Lane()
    changed = planted(lane, old, new)
    assert changed is module
    assert eval(shown, vars(module)) == value
    assert existing.size == 4
    # The other functions stay.
    assert module.early() == module.EARLY == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("room = 5", "room = 6"),
        ("size=4", "size=5"),
        ("def free(self):\n        return self", "def free(self, more=0):\n        return self"),
        ("    @staticmethod\n", ""),
        ("class Wide(Lane)", "class Wide"),
    ],
)
def test_a_fault_elsewhere_needs_a_new_import(lane: Imported, old: str, new: str) -> None:
    assert planted(lane, old, new) is None


@pytest.mark.parametrize(("old", "new"), [("return 1", "return 2"), ("2 * function", "3 * function")])
def test_a_fault_in_a_function_that_the_import_called_needs_a_new_import(lane: Imported, old: str, new: str) -> None:
    assert planted(lane, old, new) is None


def test_a_module_that_is_not_imported_needs_an_import(lane: Imported) -> None:
    del sys.modules["mutable_lane"]
    assert planted(lane, "total += 1", "total += 7") is None


def test_a_bug_with_several_parts_is_never_planted_in_part(lane: Imported) -> None:
    other = Mutant("fault", "mutable_lane", "LIMIT = 3", "LIMIT = 4", "", "", ())
    mutant = Mutant("fault", "mutable_lane", "total += 1", "total += 7", "", "", (), also=(other,))
    assert not lane.plant(mutant)
    assert import_module("mutable_lane").counter()() == 1
