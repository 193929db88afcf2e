"""The process between an owner and one server, which ends the server when its owner ends.

`supervised.py` starts this file as a script, in a new session:

    python supervisor.py FOLDER OWNER_PID ORDERS REPLIES LOG COMMAND...

ORDERS is the descriptor of a pipe whose other end the owner holds. Each line is a signal number for the server; a
negative number is for its process group. The end of the pipe means stop, and the kernel closes the pipe at any end of
the owner. REPLIES is the descriptor of a second pipe: the supervisor writes the server's pid, then a line after each
effective SIGSTOP.

LOG is a file for the server's output, or `-` for a command that uses the terminal of its owner. A stop removes FOLDER.
If the server ends without a stop, FOLDER stays. The exit status is the exit status of the server, or 128 + n after its
end by signal n.

The script imports only the standard library, so it starts in 20 ms, and changes of the project do not affect it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

STOP_SECONDS = 5.0  # between TERM and KILL
BUSY = 75  # exit status: another owner's server runs in the folder
_OWNER_CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1


def take_lock(folder: Path) -> int | None:
    """Lock the folder until the end of this process; return None if the folder is missing or locked. Does not block.

    The kernel frees the lock at the end of its holder. So the process ids in a locked folder are valid. In an unlocked
    folder, other processes may have these ids.
    """
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:  # the owner has just removed the folder
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A supervisor that ends removes the folder, and a lock on a removed file protects nothing.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


class Server:
    """A child process that leads a process group. Only this class waits for the child, so its id stays valid until
    `code` is set."""

    def __init__(self, command: list[str], log: Path | None) -> None:
        output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, output)
        with contextlib.suppress(OSError):  # the child makes the same call, and either may be first
            os.setpgid(self.pid, self.pid)
        if output is not None:
            os.close(output)

    def wait(self, options: int = 0) -> int | None:
        """Return the exit status as a shell reports it, or None while the server runs. `options` are those of
        `os.waitpid`."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid and not os.WIFSTOPPED(status):
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code
        return self.code

    def stop(self) -> None:
        """Send TERM, and KILL after five seconds. Blocks until the server has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # a paused process would receive its TERM only after the KILL
        deadline = time.monotonic() + STOP_SECONDS
        while self.wait(os.WNOHANG) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                self.wait()
                return
            time.sleep(_POLL_SECONDS)

    def kill_group(self) -> None:
        """End the remaining processes that the server started."""
        # The leader has ended, but the system does not reuse its id while the group has a member. An empty group is not
        # hit, unless a new process leads a group of this id at this moment.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _become(command: list[str], output: int | None) -> None:
    """In the child: execute the server's command. If the command cannot start, the exit status is 127."""
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            # After a kill -9 of the supervisor, no process would read the pipe.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # An ignored signal stays ignored through exec, and Python ignores these two.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if output is not None:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def obey(order: int, server: Server, replies: int) -> None:
    """Send one signal; after a SIGSTOP, report that the server has stopped."""
    if order < 0:
        os.killpg(server.pid, -order)
        return
    os.kill(server.pid, order)
    if order == signal.SIGSTOP and server.wait(os.WUNTRACED) is None:
        os.write(replies, b"stopped\n")


def supervise(server: Server, owner: int, orders: int, replies: int, wake: int, asked: list[int]) -> None:
    """Pass signals on until the server has ended, or must be stopped."""
    while True:
        readable, _, _ = select.select([orders, wake], [], [], _OWNER_CHECK_SECONDS)
        if wake in readable:
            os.read(wake, 4096)
        if server.wait(os.WNOHANG) is not None or asked:
            return
        # A child that the owner forked may keep the pipe open, so the parent's id is checked too.
        if os.getppid() != owner:
            return
        if orders in readable:
            lines = os.read(orders, 4096)
            if not lines:
                return
            for line in lines.split():
                if server.code is None:
                    obey(int(line), server, replies)


def main(folder: Path, owner: int, orders: int, replies: int, log: Path | None, command: list[str]) -> int:
    lock = take_lock(folder)
    if lock is None:
        return BUSY
    for descriptor in (orders, replies):
        os.set_inheritable(descriptor, False)  # an inherited descriptor would stay open after the end of this process
    asked: list[int] = []
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked.append(number))
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda _number, _frame: None)

    current = folder / "run"
    shutil.rmtree(current, ignore_errors=True)  # the process ids and ports of a former server are invalid
    current.mkdir()
    server = Server(command, log)
    (current / "supervisor.pid").write_text(f"{os.getpid()}\n")
    # If the owner has already ended, `supervise` detects it.
    with contextlib.suppress(BrokenPipeError):
        os.write(replies, f"{server.pid}\n".encode())
    supervise(server, owner, orders, replies, wake, asked)
    stopped = server.code is None
    server.stop()
    server.kill_group()
    if stopped:
        shutil.rmtree(folder, ignore_errors=True)
    return server.code or 0


if __name__ == "__main__":
    _, folder, owner, orders, replies, log, *command = sys.argv
    sys.exit(main(Path(folder), int(owner), int(orders), int(replies), None if log == "-" else Path(log), command))
