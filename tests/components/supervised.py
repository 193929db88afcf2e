"""The folder, the process and the signals of one server, for the process that owns the server.

A component, such as `nats_server.py`, defines the command and checks when the server is ready. A folder holds `lock`,
`log`, `run/` and the server's own files, such as `data/`. The supervisor holds the lock while the server runs. `run/`
has the process ids, the ports and `state.json`, which is written last.
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
    """A component is missing, does not start, or is used in a state that does not allow the call."""


class MissingComponent(ComponentError):
    """The program of a component is not installed."""


class Supervised:
    """One process in one folder. The process that calls `launch` is the owner, and its end also ends the launched
    process.

    Not thread-safe.
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
        """The folder, which the first use makes, and which stays until `stop`.

        The property refuses a folder with other files.
        """
        if self._folder is None:
            if self._directory is None:
                self._folder = Path(tempfile.mkdtemp(prefix=f"lanes-{self._name}-"))
            else:
                folder = self._directory.absolute()
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()) and not (folder / "lock").exists():
                    # `stop` would remove the other files too.
                    raise ComponentError(f"{folder} is not empty: choose an empty folder for {self._name}")
                self._folder = folder
        return self._folder

    @property
    def alive(self) -> bool:
        """Whether the process launched here runs or is paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the process launched here. Raises `ComponentError` if the process does not run."""
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
        """Start `command`; return its process id, or None if another owner's server runs in the folder.

        With `log=False`, the command uses the standard input and output of this process.
        """
        if self.alive:
            raise ComponentError(f"{self._name} is running already, as process {self._pid}")
        self._forget()
        orders_read, self._orders = os.pipe()
        self._replies, replies_write = os.pipe()
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)  # another owner's `stop` may have removed the folder
        arguments = [folder, os.getpid(), orders_read, replies_write, folder / "log" if log else "-"]
        try:
            self._process = subprocess.Popen(
                # -I -S: without site packages, the environment can neither delay nor break the supervisor.
                [sys.executable, "-I", "-S", supervisor.__file__, *map(str, arguments), *command],
                pass_fds=(orders_read, replies_write),
                start_new_session=True,  # only the owner handles a Ctrl+C in the terminal
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
        """Send a signal to the process, or to its whole group. A SIGSTOP has taken effect when the call returns."""
        if not self.alive:
            raise ComponentError(f"{self._name} is not running: cannot send {number.name}; call start()")
        try:
            os.write(self._orders, f"{-number if group else +number}\n".encode())
        except BrokenPipeError:
            return  # the process has just ended
        if number is signal.SIGSTOP:
            os.read(self._replies, 64)

    def wait(self, seconds: float | None = None) -> int:
        """Block until the process has ended; return its exit status, or 128 + n after its end by signal n."""
        if self._process is None:
            raise ComponentError(f"{self._name} was never started")
        return self._process.wait(seconds)

    def stop(self) -> None:
        """End the process (TERM, then KILL after five seconds) and remove the folder. Idempotent; blocks until done."""
        self._forget()
        if self._folder is not None:
            if not self.occupied():
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def occupied(self) -> bool:
        """Whether a server of any owner runs in the folder."""
        lock = supervisor.take_lock(self.folder) if self.folder.exists() else None
        if lock is not None:
            os.close(lock)
        return lock is None and self.folder.exists()

    def evict(self) -> None:
        """End another owner's server in the folder. Blocks until the server has ended."""
        try:
            pid = int((self.folder / "run" / "supervisor.pid").read_text())
        except (FileNotFoundError, ValueError):
            pid = 0
        # The lock is held, so the file has the process id of its holder.
        if pid and self.occupied():
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not self.occupied(), f"the {self._name} of another owner in {self.folder} to end")

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Write the state file, which reports that the server is ready. Atomic: a reader never finds a part of the
        state."""
        path = self.folder / "run" / "state.json"
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(state))
        draft.replace(path)

    def read_state(self) -> dict[str, Any] | None:
        """Return the state of the server in the folder; None until the server is ready."""
        try:
            state: dict[str, Any] = json.loads((self.folder / "run" / "state.json").read_text())
        except FileNotFoundError:
            return None
        return state

    def last_words(self, lines: int = 3) -> str:
        """The last lines of the log, joined by ` | `."""
        try:
            text = (self.folder / "log").read_text(errors="replace")
        except FileNotFoundError:
            return "no log"
        return " | ".join(text.splitlines()[-lines:]) or "its log is empty"

    def _forget(self) -> None:
        """Close this side of the pipes, which stops a running process, and wait for the end of the process."""
        for descriptor in (self._orders, self._replies):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._replies = -1
        if self._process is not None:
            try:
                self._process.wait(2 * supervisor.STOP_SECONDS)
            except subprocess.TimeoutExpired:  # the supervisor itself is frozen or gets no CPU time
                for leader in (self._pid, self._process.pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(leader, signal.SIGKILL)
                self._process.wait()
            self._process = None
        self._pid = 0
