"""Processes of the demo: started in a group of their own, killed as a group, heard on stderr."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from lanes.demo.errors import DemoError


class Child:
    """One process. ``command`` is started by ``start``; what it says on stderr is appended to ``log``."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = tuple(command)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self.last_words = ""
        self.killed = False

    @property
    def pid(self) -> int:
        """Of the running process; 0 before ``start``."""
        return self._process.pid if self._process is not None else 0

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start it. Raises ``DemoError`` when there is no such program."""
        try:
            # Its own session: a Ctrl+C at the terminal is the parent's to deal with.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise DemoError(f"{self._command[0]!r} cannot be started ({error.strerror}): correct its path") from None
        self._listener = asyncio.create_task(self._listen(self._process))

    def kill(self) -> None:
        """Kill the group with -9, as nothing can refuse. Does not block; idempotent."""
        self.killed = True
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end. Does not block; idempotent."""
        self._signal(signal.SIGTERM)

    async def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended and everything it said is known; its status, or None after ``timeout`` seconds."""
        if self._process is None or self._listener is None:
            return None
        try:
            async with asyncio.timeout(timeout):
                await self._process.wait()
                await asyncio.shield(self._listener)
        except TimeoutError:
            return None
        return self._process.returncode

    async def output(self) -> str:
        """Everything it printed on stdout. Waits until it has ended."""
        if self._process is None or self._process.stdout is None:
            return ""
        return (await self._process.stdout.read()).decode("utf-8", "replace")

    async def end(self) -> None:
        """Kill it unless it has ended, and wait for that. Idempotent."""
        if self._process is None or self._listener is None:
            return
        if self._process.returncode is None:
            self.kill()
            await self._process.wait()
        await self._listener
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with self._log.open("ab") as log:
            while chunk := await process.stderr.read(1 << 16):
                log.write(chunk)
                log.flush()
                lines = (self.last_words + chunk.decode("utf-8", "replace")).rstrip().splitlines()
                self.last_words = lines[-1][-500:] if lines else ""
