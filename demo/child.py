"""Functions for child processes of the demo: end with the parent, read the configuration, measure the memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Final, TypeVar

from demo.errors import DemoError

EXIT_ORPHANED: Final = 6
"""Exit status of a child process whose parent has ended."""

_PR_SET_PDEATHSIG: Final = 1

_T = TypeVar("_T")


def end_with_parent() -> None:
    """End this process at the end of stdin, and on Linux also at the end of the thread that started it."""
    killed_with_parent()
    # A thread watches stdin, because the event loop may be busy or stuck.
    threading.Thread(target=_watch_stdin, daemon=True).start()


def killed_with_parent() -> None:
    """Let the system kill this process, even a frozen one, at the end of the thread that started it.

    Does nothing on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(EXIT_ORPHANED)


def told(kind: type[_T], variable: str, process: str, command: str) -> _T:
    """Read the configuration from an environment variable of the parent.

    Args:
        kind: Class of the configuration.
        variable: Name of the environment variable, which holds a JSON object.
        process: Name of this kind of process, for the error.
        command: Command of the parent process, for the error.

    Returns:
        The configuration, of the class ``kind``.

    Raises:
        DemoError: The variable is missing, or holds no configuration of the class ``kind``.
    """
    try:
        return kind(**json.loads(os.environ.get(variable, "")))
    except (ValueError, TypeError):
        raise DemoError(
            f"{variable} has no configuration of a {process}: run `{command}`, which starts each {process}"
        ) from None


def peak_rss_mb() -> float:
    """Return the peak memory of this process, in MiB."""
    # getrusage also counts the memory of the parent before exec, and /proc does not.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024
