"""Mutants in modules that are imported already, so that a process for each mutant need not import them again.

A mutant that changes only the bodies of functions is planted by new code in these functions. A mutant that changes a
signature, a class or a constant needs a new import. So does a mutant of a function that the import has called, because
a module may keep the result.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from tests.mutants import Mutant, mutated

Place = tuple[str, str, int]
"""The file, qualified name and first line of a function."""

_COMPARED: Final = (
    *("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_exceptiontable"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
"""The attributes of code that tell its behaviour, beside its constants."""

_PROJECT: Final = (
    "demo",
    "lanes",
    "lanes_jetstream",
    "lanes_kafka",
    "lanes_postgres",
    "lanes_spark",
    "memsource",
    "tests",
)
"""The packages of this project."""


@dataclass(frozen=True)
class Imported:
    """The functions after an import.

    Attributes:
        functions: All functions, by their place.
        called: The functions that the import has called.
    """

    functions: dict[Place, list[FunctionType]]
    called: set[Place]

    def plant(self, mutant: Mutant) -> bool:
        """Plant the mutant, and return True. Return False if it needs a new import; then nothing is planted."""
        changes: list[tuple[FunctionType, CodeType]] = []
        for each in (mutant, *mutant.also):
            path = getattr(sys.modules.get(each.module), "__file__", None)
            if path is None:
                return False
            source = Path(path).read_text()
            before, after = (compile(text, path, "exec", dont_inherit=True) for text in (source, mutated(source, each)))
            changed = _changed_functions(before, after)
            if not changed:
                return False
            for old, new in changed:
                if not self._is_replaceable(old, new):
                    return False
                changes += [(function, new) for function in self.functions[_place(old)]]
        for function, code in changes:
            function.__code__ = code
        return True

    def _is_replaceable(self, old: CodeType, new: CodeType) -> bool:
        """Whether the import has made this function, and has not called it."""
        place = _place(old)
        if place not in self.functions or place in self.called or old.co_freevars != new.co_freevars:
            return False
        # An inner function that exists was made by a call in a way that the trace does not show.
        return not any(_place(code) in self.functions for code in _inner(old))


def imported(name: str) -> Imported:
    """Import a module, and record its functions and the functions of all modules that it imports."""
    called: set[Place] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        called.add(_place(frame.f_code))

    sys.settrace(note)
    try:
        import_module(name)
    finally:
        sys.settrace(None)
    functions: defaultdict[Place, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType:
            functions[_place(each.__code__)].append(each)
    return Imported(dict(functions), called)


def forget() -> None:
    """Remove the modules of this project but ``tests.mutants``, so that the next import makes them again."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in _PROJECT and name not in ("tests", "tests.mutants"):
            del sys.modules[name]


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions, classes and comprehensions within this code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


def _changed_functions(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]]:
    """Return the outermost functions that differ, as pairs. Return none if more than functions differ."""
    if not _is_alike(old, new):
        return []
    found: list[tuple[CodeType, CodeType]] = []
    for before, after in zip(old.co_consts, new.co_consts, strict=True):
        if not isinstance(before, CodeType) or _is_equal(before, after):
            continue
        changed = [(before, after)] if before.co_flags & inspect.CO_OPTIMIZED else _changed_functions(before, after)
        if not changed:
            return []
        found += changed
    return found


def _is_equal(old: CodeType, new: CodeType) -> bool:
    """Whether two pieces of code differ at most in their line numbers."""
    return _is_alike(old, new) and all(
        _is_equal(before, after)
        for before, after in zip(old.co_consts, new.co_consts, strict=True)
        if isinstance(before, CodeType)
    )


def _is_alike(old: CodeType, new: CodeType) -> bool:
    """Whether two pieces of code differ at most in the code of what they define."""
    return all(getattr(old, name) == getattr(new, name) for name in _COMPARED) and [*map(_constant, old.co_consts)] == [
        *map(_constant, new.co_consts)
    ]


def _constant(value: object) -> tuple[type, str]:
    return type(value), value.co_qualname if isinstance(value, CodeType) else repr(value)
