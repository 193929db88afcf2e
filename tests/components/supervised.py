"""The owner's side of one server: its folder, its process, its signals.

A component (`nats_server.py`) says which command to run and when it is ready; everything else is here.
A folder holds `lock` (held while a server lives there), `log`, `run/` (pids, ports, `state.json`, written
last) and whatever the server itself keeps, such as `data/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.components import supervisor
from tests.components.waiting import wait_until


class ComponentError(Exception):
    """A component is missing, does not start, or is used in a state that does not allow it."""


class MissingComponent(ComponentError):
    """The program of a component is not installed."""


class Supervised:
    """One process in one folder. Whoever launches it owns it; it does not outlive its owner.

    Not for use by several threads at once.
    """

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self._name = name
        self._directory = directory
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._orders = -1
        self._replies = -1
        self._pid = 0

    def __repr__(self) -> str:
        state = f"pid {self._pid}" if self.alive else "not running"
        return f"<Supervised {self._name}, {state}, folder {self._folder}>"

    @property
    def folder(self) -> Path:
        """The folder, made at first use and kept until `stop`. One that holds something else is refused."""
        if self._folder is None:
            if self._directory is None:
                self._folder = Path(tempfile.mkdtemp(prefix=f"lanes-{self._name}-"))
            else:
                folder = self._directory.absolute()
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()) and not (folder / "lock").exists():
                    # It will be removed as a whole at stop.
                    raise ComponentError(f"{folder} is not empty: give {self._name} a folder of its own")
                self._folder = folder
        return self._folder

    @property
    def alive(self) -> bool:
        """Whether the process launched here is running (a paused one is)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process launched here."""
        if not self.alive:
            raise ComponentError(f"{self._name} is not running: call start()")
        return self._pid

    def launch(
        self,
        command: Sequence[str],
        *,
        log: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> int | None:
        """Start `command`; its pid, or None when somebody else's server lives in the folder.

        `log=False` leaves it the standard input and output of this process.
        """
        if self.alive:
            raise ComponentError(f"{self._name} is running already, as process {self._pid}")
        self._forget()
        orders_read, self._orders = os.pipe()
        self._replies, replies_write = os.pipe()
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)  # another owner's stop may have removed it
        arguments = [folder, os.getpid(), orders_read, replies_write, folder / "log" if log else "-"]
        try:
            self._process = subprocess.Popen(
                # -I -S: no site packages, so nothing of the environment can delay or break it.
                [sys.executable, "-I", "-S", supervisor.__file__, *map(str, arguments), *command],
                pass_fds=(orders_read, replies_write),
                start_new_session=True,  # a Ctrl+C in the terminal is its owner's to handle
                env=env,
            )
        finally:
            os.close(orders_read)
            os.close(replies_write)
        line = os.read(self._replies, 64)
        if not line:
            code = self._process.wait()
            self._forget()
            if code == supervisor.BUSY:
                return None
            raise ComponentError(f"{self._name}: its supervisor ended with {code}, see {folder / 'log'}")
        self._pid = int(line)
        return self._pid

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group. Returns when a SIGSTOP has taken effect."""
        if not self.alive:
            raise ComponentError(f"{self._name} is not running: no {number.name} for it")
        try:
            os.write(self._orders, f"{-number if group else +number}\n".encode())
        except BrokenPipeError:
            return  # it has ended just now
        if number is signal.SIGSTOP:
            os.read(self._replies, 64)

    def wait(self, seconds: float | None = None) -> int:
        """Block until the process has ended; its exit status, 128 + n when signal n ended it."""
        if self._process is None:
            raise ComponentError(f"{self._name} was never started")
        return self._process.wait(seconds)

    def stop(self) -> None:
        """End the process (TERM, five seconds, KILL) and remove the folder. Idempotent; blocks until done."""
        self._forget()
        if self._folder is not None:
            if not self.occupied():
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def occupied(self) -> bool:
        """Whether a server lives in the folder, whoever started it."""
        lock = supervisor.take_lock(self.folder) if self.folder.exists() else None
        if lock is not None:
            os.close(lock)
        return lock is None and self.folder.exists()

    def evict(self) -> None:
        """End somebody else's server in the folder. Blocks until it is gone."""
        try:
            pid = int((self.folder / "run" / "supervisor.pid").read_text())
        except (FileNotFoundError, ValueError):
            pid = 0
        # The lock is held, so the number is that of its holder.
        if pid and self.occupied():
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not self.occupied(), f"the old {self._name} in {self.folder} to end")

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Say that the server is ready. Atomic: who reads it finds all of it."""
        path = self.folder / "run" / "state.json"
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(state))
        draft.replace(path)

    def read_state(self) -> dict[str, Any] | None:
        """What the server in the folder is, once it is ready; None before that."""
        try:
            state: dict[str, Any] = json.loads((self.folder / "run" / "state.json").read_text())
        except FileNotFoundError:
            return None
        return state

    def last_words(self, lines: int = 3) -> str:
        """The end of the log, in one line."""
        try:
            text = (self.folder / "log").read_text(errors="replace")
        except FileNotFoundError:
            return "no log"
        return " | ".join(text.splitlines()[-lines:]) or "its log is empty"

    def _forget(self) -> None:
        """Close our ends of the pipes, which stops what still runs, and wait for the end."""
        for descriptor in (self._orders, self._replies):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._replies = -1
        if self._process is not None:
            try:
                self._process.wait(2 * supervisor.STOP_SECONDS)
            except subprocess.TimeoutExpired:  # a supervisor that is itself stopped or starved
                for leader in (self._pid, self._process.pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(leader, signal.SIGKILL)
                self._process.wait()
            self._process = None
        self._pid = 0
