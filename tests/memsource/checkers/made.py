"""Histories that worlds write, made once for each seed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random

from tests.memsource.checkers.rows import Rows, rows_of


class Made:
    """The histories that ``run`` writes into a folder, by seed."""

    def __init__(self, run: Callable[[Path, Random], None]) -> None:
        self._run = run
        self._of = lru_cache(maxsize=512)(self._make)

    def history_of(self, seed: int) -> bytes:
        """The files of a world, joined: torn lines and all."""
        return self._of(seed)[0]

    def segments_of(self, seed: int) -> list[Rows]:
        """A copy of the rows of a world's segments."""
        return copy.deepcopy(self._of(seed)[1])

    def _make(self, seed: int) -> tuple[bytes, list[Rows]]:
        with tempfile.TemporaryDirectory(prefix="lanes-history-") as name:
            directory = Path(name)
            self._run(directory, Random(seed))
            files = sorted(directory.glob("*.jsonl"))
            return b"".join(file.read_bytes() for file in files), [rows_of(file) for file in files]
