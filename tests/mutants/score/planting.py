"""Plants a mutation in this process: the function gets the code of the changed source."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType

from tests.mutants.score.mutations import Mutation
from tests.mutants.score.targets import ROOT

Place = tuple[str, str, int]
"""Path, qualified name and first line of a function."""


class Plot:
    """The functions of files, as they are in memory, with the caches that could hide a changed function.

    Args:
        files: The files, relative to the project. Their modules must be imported.
    """

    def __init__(self, files: Iterable[str]) -> None:
        paths = {str(ROOT / file) for file in files}
        gc.unfreeze()  # frozen objects are not listed
        self._functions: dict[Place, list[FunctionType]] = {}
        self._caches: list[Callable[[], object]] = []
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename in paths:
                self._functions.setdefault(_place(each.__code__), []).append(each)
            elif isinstance(each, functools._lru_cache_wrapper):
                self._caches.append(each.cache_clear)

    def plant(self, mutation: Mutation) -> None:
        """Change every function object of the mutation's function.

        Raises:
            LookupError: The function is not in memory, or the changed code does not fit into it.
            SyntaxError: The change is no valid Python.
        """
        path = str(ROOT / mutation.file)
        place = (path, mutation.function, mutation.def_line)
        code = compile(mutation.text, path, "exec", dont_inherit=True)
        inner = f"{mutation.function}.<locals>."
        # Functions that the mutation's function has made earlier live on, for example in a table of its module.
        self.replace(code, lambda each: each[0] == path and each[1].startswith(inner))
        if not self.replace(code, lambda each: each == place):
            raise LookupError(f"{mutation.file}: {mutation.name}: the function has no place for it")

    def replace(self, module: CodeType, wanted: Callable[[Place], bool] = lambda _: True) -> int:
        """Give functions the code that they have in another version of their module, and return their number."""
        replaced = 0
        for code in _codes(module):
            place = _place(code)
            for function in self._functions.get(place, ()) if wanted(place) else ():
                if function.__code__.co_freevars == code.co_freevars:
                    function.__code__ = code
                    replaced += 1
        for clear in self._caches:
            clear()
        return replaced


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
