"""Other work for the machine: processes that do nothing, at full speed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

BURN: Final = """
import os
parent = int(os.sys.argv[1])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""Ends with its parent, however that ends."""


@contextlib.contextmanager
def load(processes: int) -> Iterator[list[int]]:
    """So many processes, each at one core, while the block runs; yields their ids."""
    burning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            burning.append(subprocess.Popen([sys.executable, "-c", BURN, str(os.getpid())]))  # noqa: PERF401 (each is ended)
        yield [one.pid for one in burning]
    finally:
        for one in burning:
            one.kill()
        for one in burning:
            one.wait()
