"""Checks that each argument of a consumer has the type that the consumer needs."""

from __future__ import annotations

import os
from typing import Final

from lanes.config import Settings, kind_of
from lanes.errors import ConfigError
from lanes.handlers import is_async
from lanes.history.journal import Journal
from lanes.history.recorder import History

_SOURCE: Final = ("open", "receive", "settle", "extend", "release", "aclose")
_DEAD_LETTERS: Final = ("open", "put", "aclose")
_ATTEMPTS: Final = ("load", "keep", "drop")


def check_source(source: object) -> None:
    """Raise ``ConfigError`` for an object without the methods of a ``Source``."""
    _check_methods("source", source, _SOURCE, "a source, such as KafkaSource(…) or JetStreamSource(…)")


def check_settings(settings: object) -> None:
    """Raise ``ConfigError`` for settings that are no ``Settings``."""
    if settings is not None and not isinstance(settings, Settings):
        raise ConfigError(f"settings is {kind_of(settings)}: pass lanes.Settings(…), such as Settings(concurrency=10)")


def check_options(
    *, dead_letters: object, attempts: object, history: object, journal: object, on_event: object, clock: object
) -> None:
    """Raise ``ConfigError`` for an option of a wrong type. None = the option was omitted."""
    if dead_letters is not None:
        wanted = "a target of dead letters, such as KafkaDeadLetters(…) or JetStreamDeadLetters(…)"
        _check_methods("dead_letters", dead_letters, _DEAD_LETTERS, wanted)
    if attempts is not None:
        _check_methods("attempts", attempts, _ATTEMPTS, "a store of attempts, such as PostgresAttempts(…)")
    if history is not None and not isinstance(history, History):
        raise ConfigError(f"history is {kind_of(history)}: pass lanes.History(directory)")
    if journal is not None and not isinstance(journal, Journal | str | os.PathLike):
        raise ConfigError(f"journal is {kind_of(journal)}: pass a directory, or lanes.Journal(directory, …)")
    if on_event is not None and (not callable(on_event) or is_async(on_event)):
        came = "an async function" if callable(on_event) else kind_of(on_event)
        raise ConfigError(f"on_event is {came}: pass a plain function of one GroupEvent")
    if not callable(clock):
        raise ConfigError(f"clock is {kind_of(clock)}: pass a function that returns seconds, or leave it out")


def _check_methods(name: str, value: object, methods: tuple[str, ...], wanted: str) -> None:
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if isinstance(value, type) or missing:
        lacks = "" if isinstance(value, type) else f", without the method {missing[0]}"
        raise ConfigError(f"{name} is {kind_of(value)}{lacks}: pass {wanted}")
