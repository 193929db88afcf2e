"""Callbacks that an object calls after each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Watchers(Generic[P]):
    """A list of functions; ``call`` calls them in the order of ``add``.

    A called function may add or remove functions.
    """

    def __init__(self) -> None:
        self._watchers: list[Callable[P, None]] = []

    def add(self, watcher: Callable[P, None]) -> None:
        """Add a function to the called functions. Idempotent."""
        if watcher not in self._watchers:
            self._watchers.append(watcher)

    def remove(self, watcher: Callable[P, None]) -> None:
        """Stop calling a function. Idempotent."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all functions with the arguments."""
        for watcher in list(self._watchers):
            watcher(*args, **kwargs)


class Watched:
    """An object that calls its watchers after each change."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers: Watchers[[]] = Watchers()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call a watcher after each change from now on. Idempotent.

        Args:
            watcher: The function, which must not block.
        """
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling a watcher. Idempotent.

        Args:
            watcher: The function.
        """
        self._watchers.remove(watcher)

    def _changed(self) -> None:
        self._watchers.call()
