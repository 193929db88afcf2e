"""Legal histories, made once and used by many tests."""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from random import Random

from tests.history.rows import Rows, rows_of
from tests.history.world import World


@lru_cache(maxsize=512)
def _made(seed: int) -> tuple[bytes, list[Rows]]:
    with tempfile.TemporaryDirectory(prefix="lanes-history-") as name:
        directory = Path(name)
        World(directory, Random(seed)).run()
        files = sorted(directory.glob("*.jsonl"))
        return b"".join(file.read_bytes() for file in files), [rows_of(file) for file in files]


def history_of(seed: int) -> bytes:
    """The files of a world, joined: torn lines and all."""
    return _made(seed)[0]


def segments_of(seed: int) -> list[Rows]:
    """The rows of a world's segments, the caller's to change."""
    return copy.deepcopy(_made(seed)[1])
