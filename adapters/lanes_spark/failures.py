"""Errors of Spark made errors of ``lanes``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from lanes.errors import ConfigError, ContractError, HandlerHalted, LanesError, MessageError, SourceError

__all__ = ["as_ours", "mapped_errors"]

_ERRORS: Final[Mapping[str, type[LanesError]]] = {
    kind.__name__: kind for kind in (ConfigError, ContractError, HandlerHalted, LanesError, MessageError)
}
_OURS: Final = re.compile(r"^(?:Caused by: |: )?(?:[\w.]+: )?lanes\.errors\.(\w+): (.+)$", re.MULTILINE)
_RAISED: Final = re.compile(r"^(?:Caused by: |: )?([A-Za-z_][\w.]*(?:Error|Exit|Exception): .+)$", re.MULTILINE)

_LIMIT: Final = 500
"""Characters of what Spark says that are kept."""


@contextmanager
def mapped_errors(topic: str) -> Iterator[None]:
    """What Spark raises in the block comes out as an error of ``lanes``: as the one that a task raised, where it did,
    else as a ``SourceError``. ``topic`` is what it names."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        raise as_ours(topic, type(error).__name__, str(error)) from error


def as_ours(topic: str, name: str, text: str) -> LanesError:
    """The error of ``lanes`` for an exception of Spark of that name and text, which holds what the workers raised."""
    ours = _OURS.findall(text)
    if ours:
        kind, said = ours[-1]
        return _ERRORS.get(kind, SourceError)(said)
    # The innermost exception says most; these only say that there was one.
    raised = [line for line in _RAISED.findall(text) if not line.startswith("py4j.") and "Traceback (most" not in line]
    said = (raised or [line.strip() for line in text.splitlines() if line.strip()][:1] or ["it says nothing"])[-1]
    return SourceError(f"{topic}: Spark failed: {name}: {said[:_LIMIT]}")
