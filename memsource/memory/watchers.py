"""Who is called when something has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

__all__ = ["Watched", "Watchers"]

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


class Watched:
    """What has watchers, which are called whenever there may be something new for them."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers: Watchers[[]] = Watchers()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` from now on whenever there may be something new for it. Idempotent."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Call it no more. Idempotent."""
        self._watchers.remove(watcher)

    def _changed(self) -> None:
        self._watchers.call()
