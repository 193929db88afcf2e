"""A forked child that reports by lines, with a bound of CPU time, and without a wait that has no end."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_IDLE: Final = 10.0
"""Seconds in which a child that hangs uses no CPU time. Tests wait for facts, and never sleep that long."""

_SILENT: Final = 90.0
"""Seconds without a report after which a child hangs although it uses CPU time, like the threads of a Kafka client."""

_MEMORY: Final = 4 << 30
"""Bytes of address space that a child may need beyond its parent. The threads of a Kafka client reserve much."""

Report = Callable[[str], None]
"""Sends one line to the parent."""


@dataclass(frozen=True)
class Ended:
    """The end of a child.

    Attributes:
        lines: The reported lines.
        signal: Number of the signal that ended the child; 0 if the child returned.
        hung: Whether the parent killed the child because it waited without end.
    """

    lines: list[str]
    signal: int
    hung: bool


def forked(work: Callable[[Report], None]) -> Ended:
    """Run a function in a forked child, and return its report. Blocks until the child has ended."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _live(work, reader, writer)
    os.close(writer)
    parts: list[bytes] = []
    hung = False
    seen, since = -1, time.monotonic()
    heard = since
    while True:
        ready, _, _ = select.select([reader], [], [], 1.0)
        if ready:
            part = os.read(reader, 1 << 16)
            if not part:
                break
            parts.append(part)
            since = heard = time.monotonic()
        elif time.monotonic() - heard > _SILENT:
            hung = True
            break
        elif (used := _ticks(child)) != seen:
            seen, since = used, time.monotonic()
        elif time.monotonic() - since > _IDLE:
            hung = True
            break
    if hung:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Ended(b"".join(parts).decode().splitlines(), number, hung)


def limit_cpu(seconds: float) -> None:
    """Let a signal end this process when it has used more CPU time. A further call replaces the limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _live(work: Callable[[Report], None], reader: int, writer: int) -> None:
    status = 1
    try:
        os.close(reader)
        # A grandchild must not keep the pipe open, and output belongs to nobody.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        with suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)

        def report(line: str) -> None:
            data = f"{line}\n".encode()
            while data:
                data = data[os.write(writer, data) :]

        try:
            work(report)
            status = 0
        except BaseException:
            report("error " + traceback.format_exc().replace("\n", " | "))
    finally:
        os._exit(status)


def _ticks(child: int) -> int:
    """The CPU time of a process that waits; a new number for a process that could run. Without ``/proc``, the time."""
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return int(time.monotonic() / (6 * _IDLE))
    return int(fields[11]) + int(fields[12]) if fields[0] == "S" else -time.monotonic_ns()
