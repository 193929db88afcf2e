"""The changed Python files of a folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from importlib.util import find_spec

from lanes.dead_letter import printable
from lanes.errors import ConfigError


def check_watching() -> None:
    """Raise ``ConfigError`` unless the extra ``reload`` is installed."""
    if find_spec("watchfiles") is None:
        raise ConfigError("--reload needs watchfiles: pip install '.[reload]' in the checkout of lanes")


async def changes(folder: str) -> AsyncIterator[list[str]]:
    """Yield the names of Python files below a folder that changed together.

    Args:
        folder: The folder. The function ignores folders such as ``.git``, ``.venv`` and ``__pycache__``.

    Yields:
        At least one path, relative to the folder.
    """
    from watchfiles import PythonFilter, awatch

    async for found in awatch(folder, watch_filter=PythonFilter()):
        yield sorted({_shown(path, folder) for _, path in found})


def _shown(path: str, folder: str) -> str:
    return printable(os.path.relpath(path, os.path.realpath(folder)))
