"""Checks that the arguments of a consumer have the types or methods that the consumer needs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lanes.arguments import DEAD_LETTER_TARGET, SOURCE, kind_of
from lanes.config import Settings
from lanes.errors import ConfigError
from lanes.handlers import check_function, is_async
from lanes.history.journal import Journal
from lanes.history.recorder import History

_SOURCE: Final = ("open", "receive", "settle", "extend", "release", "aclose")
_DEAD_LETTERS: Final = ("open", "put", "aclose")
_PUBLISHER: Final = ("open", "publish", "aclose")
_ATTEMPTS: Final = ("load", "keep", "drop")

_used: Final[weakref.WeakValueDictionary[int, object]] = weakref.WeakValueDictionary()
"""The sources that a consumer has begun to open, by their ``id``. A source may be equal to another, or not hashable."""

_using: Final = threading.Lock()

_imports: Final[list[str]] = []
"""The module that a command imports now, which must not start a consumer."""


class StartedByImport(ConfigError):
    """Error of a command that imports a module for a function, when this module starts a consumer."""


@contextmanager
def import_for_a_function(module: str) -> Iterator[None]:
    """Refuse the start of any consumer in the block, in any thread.

    Args:
        module: Name of the module that the block imports, for the error.

    Yields:
        Nothing.
    """
    _imports.append(module)
    try:
        yield
    finally:
        _imports.remove(module)


def check_import() -> None:
    """Raise ``StartedByImport`` if a consumer starts while a command imports a module of the user."""
    if _imports:
        raise StartedByImport(
            f"the import of {_imports[-1]} starts a consumer, but this command needs only the function; start the "
            'consumer below if __name__ == "__main__":'
        )


def check_source(source: object) -> None:
    """Raise ``ConfigError`` for a class, or for an object without the methods of a ``Source``."""
    _check_methods("source", source, _SOURCE, SOURCE)


def use_source(source: object) -> None:
    """Mark a source as used.

    Raises ``ConfigError`` if another consumer has used the source, because a source opens only once.

    The function cannot mark a source that allows no weak references. Such a source itself decides whether it opens
    again.
    """
    with _using:
        if _used.get(id(source)) is source:
            raise ConfigError(
                f"this {type(source).__qualname__} belongs to another consumer: make a source for each consumer"
            )
        try:
            _used[id(source)] = source
        except TypeError:
            return


def check_settings(settings: object) -> None:
    """Raise ``ConfigError`` unless the settings are a ``Settings`` object."""
    if settings is not None and not isinstance(settings, Settings):
        raise ConfigError(f"settings is {kind_of(settings)}: pass lanes.Settings(…), such as Settings(concurrency=10)")


def check_options(
    *,
    dead_letters: object,
    publisher: object,
    attempts: object,
    history: object,
    journal: object,
    on_event: object,
    clock: object,
) -> None:
    """Raise ``ConfigError`` for an option of a wrong type; None = the option was omitted."""
    if dead_letters is not None:
        _check_methods("dead_letters", dead_letters, _DEAD_LETTERS, DEAD_LETTER_TARGET)
    if publisher is not None:
        _check_methods("publisher", publisher, _PUBLISHER, "a publisher, an object with open, publish and aclose")
    if attempts is not None:
        wanted = "a store of attempts, such as PostgresAttempts(…)"
        if isinstance(attempts, int):
            wanted += "; the largest number of attempts is settings=lanes.Settings(retry=lanes.Retry(attempts=…))"
        _check_methods("attempts", attempts, _ATTEMPTS, wanted)
    if history is not None and not isinstance(history, History):
        raise ConfigError(f"history is {kind_of(history)}: pass lanes.History(directory)")
    if journal is not None and not isinstance(journal, Journal | str | os.PathLike):
        raise ConfigError(f"journal is {kind_of(journal)}: pass a directory, or lanes.Journal(directory, …)")
    if on_event is not None:
        if not callable(on_event) or is_async(on_event):
            came = "an async function" if callable(on_event) else kind_of(on_event)
            raise ConfigError(f"on_event is {came}: pass a plain function of one GroupEvent")
        check_function("on_event", on_event, "one GroupEvent")
    if not callable(clock):
        raise ConfigError(f"clock is {kind_of(clock)}: pass a function that returns seconds, or leave it out")


def _check_methods(name: str, value: object, methods: tuple[str, ...], wanted: str) -> None:
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if isinstance(value, type) or missing:
        lacks = "" if isinstance(value, type) else f", without the method {missing[0]}"
        raise ConfigError(f"{name} is {kind_of(value)}{lacks}: pass {wanted}")
