"""What every process started by the demo has in common: it ends with its parent, and knows its own memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Final

EXIT_ORPHANED: Final = 5
"""The parent is gone."""

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """End this process as soon as stdin does: the parent holds the other end and never writes."""
    killed_with_parent()
    # A thread, because the event loop may be busy or stuck.
    threading.Thread(target=_watch_stdin, daemon=True).start()


def killed_with_parent() -> None:
    """Have the system kill this process when the thread ends that started it, even while it is frozen.

    Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(EXIT_ORPHANED)


def peak_rss_mb() -> float:
    """The most memory this process ever held, in MiB."""
    # getrusage counts what the parent held before exec as well; where there is /proc, it tells better.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024
