"""Planted faults: the tests that prove the promises must find each of them.

A mutant replaces one piece of a module's source when the module is imported. The tables are in ``table`` (campaigns),
``table_kafka`` (the adapter's tests) and ``table_demo`` (the demo's reports). ``campaigns`` looks for the first kind.
``lease_machines`` has wrong lease machines as subclasses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True)
class Mutant:
    """``old``, which is exactly once in the source of ``module``, becomes ``new``; ``breaks`` says what then fails.

    ``campaign`` is the one that looks for it, ``found_by`` the checks of it one of which must find it. ``machine``: a
    campaign of the engine alone that has to find it as well, then its checks. ``also``: the rest of the same mistake,
    in other modules: made in one place alone, what is in the others hides it.
    """

    name: str
    module: str
    old: str
    new: str
    breaks: str
    campaign: str
    found_by: tuple[str, ...]
    machine: tuple[str, ...] = ()
    also: tuple[Mutant, ...] = ()


def install(mutant: Mutant) -> None:
    """Have the mutant's modules imported with its fault. To be called before anything imports one of them."""
    for each in (mutant, *mutant.also):
        if each.module in sys.modules:
            raise RuntimeError(f"{each.module} is imported already: the mutant {mutant.name} would change nothing")
        sys.meta_path.insert(0, _Finder(each))


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            raise ImportError(f"the mutant {self._mutant.name} needs the source of {fullname}")
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        # Never from the cache of compiled modules, and never into it.
        path = self.get_filename(fullname)
        source = mutated(self.get_data(path).decode(), self._mutant)
        return compile(source, path, "exec", dont_inherit=True)


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the fault. Raises ``ValueError`` unless the old text occurs exactly once."""
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name}: its old text occurs {count} times in {mutant.module}, must be once: "
            "the code has changed, write the mutant anew"
        )
    return source.replace(mutant.old, mutant.new)
