"""Who is called when something has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

__all__ = ["Watchers"]

P = ParamSpec("P")


class Watchers(Generic[P]):
    """Functions that are called in the order in which they came. One may come or go while they are."""

    def __init__(self) -> None:
        self._watchers: list[Callable[P, None]] = []

    def __repr__(self) -> str:
        return f"<Watchers: {len(self._watchers)}>"

    def add(self, watcher: Callable[P, None]) -> None:
        """Call it from now on. Idempotent."""
        if watcher not in self._watchers:
            self._watchers.append(watcher)

    def remove(self, watcher: Callable[P, None]) -> None:
        """Call it no more. Idempotent."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all of them."""
        for watcher in list(self._watchers):
            watcher(*args, **kwargs)
