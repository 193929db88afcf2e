"""Planted faults, called mutants: the tests that prove the promises must find each of them.

A mutant replaces a piece of a module's source when the module is imported. ``table`` has the mutants for the campaigns,
``table_jetstream`` those for the campaign over the real JetStream sources, ``table_kafka`` those for the adapter's
tests, ``table_processes`` those for the processes of handlers, and ``table_demo`` those for the demo's reports.
``table_widths`` and a few other tables are parts of ``table``.
``campaigns`` runs the campaigns of the first table. ``lease_machines`` has faulty lease machines as subclasses.
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
    """A planted fault.

    Attributes:
        name: Unique name.
        module: Full name of the module with the fault.
        old: Text that occurs exactly once in the source of the module.
        new: Replacement of `old`.
        breaks: The promise or behaviour that the fault breaks.
        campaign: Name of the campaign that searches for the mutant.
        found_by: Checks of the campaign, at least one of which must find the mutant.
        machine: Name of a campaign of the engine alone, and its checks, which must find the mutant too. Empty: none.
        first: Seed at which the search begins. Its runs show the fault, so the search skips earlier runs.
        also: The same fault in other modules, which would hide the fault if they stayed correct.
    """

    name: str
    module: str
    old: str
    new: str
    breaks: str
    campaign: str
    found_by: tuple[str, ...]
    machine: tuple[str, ...] = ()
    first: int = 0
    also: tuple[Mutant, ...] = ()


def install(mutant: Mutant) -> None:
    """Plant the mutant. Must be called before the import of its modules."""
    for each in (mutant, *mutant.also):
        if each.module in sys.modules:
            raise RuntimeError(
                f"mutant {mutant.name}: {each.module} is already imported; install the mutant before the import"
            )
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
        # Neither read the cache of compiled modules nor write to it.
        path = self.get_filename(fullname)
        source = mutated(self.get_data(path).decode(), self._mutant)
        return compile(source, path, "exec", dont_inherit=True)


def mutated(source: str, mutant: Mutant) -> str:
    """Return the source with the fault. Raises ``ValueError`` unless the old text occurs exactly once."""
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name}: its old text occurs {count} times in {mutant.module}, but must occur once; "
            "the code has changed, so adapt the mutant"
        )
    return source.replace(mutant.old, mutant.new)
