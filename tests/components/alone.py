"""Set-ups that happen once, however many processes ask for them."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(lock: Path, what: str) -> Iterator[None]:
    """Hold the lock of a set-up; blocks while another one holds it, and says so; no dead one can."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"lanes: waiting for another set-up of {what}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
