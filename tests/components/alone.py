"""Set-ups that only one process runs at a time."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold the lock of a set-up during the block.

    Blocks while another process holds the lock, and prints a line about the wait. The end of a process frees its lock.
    """
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"lanes: waiting for another set-up of {what}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
