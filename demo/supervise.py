"""Child processes of the demo. Each child leads a process group, and a kill ends the whole group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from demo.errors import DemoError

_CHUNK: Final = 1 << 16
_WORDS_LIMIT: Final = 500
"""Maximum number of stored characters of a child's last line."""


class Child:
    """One child process.

    Args:
        command: Command that ``start`` runs.
        log: File to which the demo appends the child's stderr.
        environment: Environment of the child; None = the environment of this process.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = tuple(command)
        self._log = log
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self.last_words = ""
        self.killed = False

    @property
    def pid(self) -> int:
        """Process id of the child; 0 before ``start``."""
        return self._process.pid if self._process is not None else 0

    @property
    def status(self) -> int | None:
        """Exit status of the child, negative for a signal; None before the end of the child."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the child. Raises ``DemoError`` if the program does not start."""
        try:
            # In its own group, the child does not receive a Ctrl+C at the terminal. In the same session, the system
            # resumes and hangs up a frozen child after the end of its parent.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                process_group=0,
                env=self._environment,
            )
        except OSError as error:
            raise DemoError(f"{self._command[0]!r} cannot be started ({error.strerror}): correct its path") from None
        self._listener = asyncio.create_task(self._listen(self._process))

    def kill(self) -> None:
        """Kill the process group with SIGKILL. The call does not block. Idempotent."""
        self.killed = True
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Freeze the process group with SIGSTOP. The call does not block. Idempotent."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the frozen process group. The call does not block. Idempotent."""
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to the process group. The call does not block. Idempotent."""
        self._signal(signal.SIGTERM)

    async def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the child and of its stderr.

        Return the child's exit status; None after ``timeout`` seconds, or before ``start``.
        """
        if self._process is None or self._listener is None:
            return None
        try:
            async with asyncio.timeout(timeout):
                await self._process.wait()
                await asyncio.shield(self._listener)
        except TimeoutError:
            return None
        return self._process.returncode

    def say(self, line: str) -> None:
        """Write a line to the child's stdin. The call does not block. The call drops the line unless the child runs."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    async def exchange(self, line: str, timeout: float) -> str:
        """Write a line, and return the child's next line; "" at the end of the child, or after ``timeout`` seconds."""
        self.say(line)
        return await self.line(timeout)

    async def line(self, timeout: float | None = None) -> str:
        """Return the next line of stdout; "" at the end of the child, or after ``timeout`` seconds."""
        if self._process is None or self._process.stdout is None:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                answer = (await self._process.stdout.readline()).decode("utf-8", "replace")
                return answer if answer.endswith("\n") else ""
        return ""

    async def output(self) -> str:
        """Wait for the end of the child's stdout, and return the unread text."""
        if self._process is None or self._process.stdout is None:
            return ""
        return (await self._process.stdout.read()).decode("utf-8", "replace")

    async def end(self) -> None:
        """Kill the child unless it has ended, and wait for its end. Idempotent."""
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
        unfinished = ""
        while chunk := await process.stderr.read(_CHUNK):
            # A full disk must not block the child.
            with contextlib.suppress(OSError), self._log.open("ab") as log:
                log.write(chunk)
            lines = (unfinished + chunk.decode("utf-8", "replace")).splitlines(keepends=True)
            unfinished = lines[-1][-_CHUNK:] if not lines[-1].endswith("\n") else ""
            said = [line.strip() for line in lines if not line.isspace()]
            if said:
                self.last_words = said[-1][:_WORDS_LIMIT]
