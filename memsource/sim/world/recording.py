"""A history in memory and in virtual time: the rows of a file, and the same from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lanes.clock import Clock
from lanes.history.recorder import Recorder
from lanes.history.writer import GivenUp, SegmentFile

__all__ = ["MemoryRecorder"]

_KEPT: Final = GivenUp(0, False)


class _MemorySegment(SegmentFile):
    """Takes every line, until it is cut off."""

    __slots__ = ("chunks", "cut")

    def __init__(self, path: Path, head: str) -> None:
        self.path = path
        self.chunks = [head]
        self.cut = False

    @property
    def whole(self) -> bool:
        return True

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        if not self.cut:
            self.chunks += rows
        return _KEPT

    def close(self) -> None:
        """Nothing is open."""


class MemoryRecorder(Recorder):
    """Records what one worker of a simulation does. ``number`` stands for its process, ``wall`` is its wall clock."""

    __slots__ = ("_kept", "_number", "_wall_clock")

    def __init__(self, member: str, number: int, wall: Clock) -> None:
        super().__init__(".", member=member)
        self._number = number
        self._wall_clock = wall
        self._kept: _MemorySegment | None = None

    def cut(self) -> None:
        """The process is gone: what it has not handed over by now is in no history. Idempotent."""
        if self._kept is not None:
            self._kept.cut = True

    @property
    def data(self) -> bytes:
        """The rows as they would be in the file; empty before the consumer has opened."""
        return b"" if self._kept is None else "".join(self._kept.chunks).encode("ascii")

    def _process(self) -> tuple[int, str]:
        return self._number, "simulation"

    def _wall(self) -> float:
        return self._wall_clock()

    def _segment(self, path: Path, head: str) -> SegmentFile:
        self._kept = _MemorySegment(path, head)
        self._kept.append([])
        return self._kept
