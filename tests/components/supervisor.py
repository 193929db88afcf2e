"""The process between an owner and one server, so that no server outlives its owner.

Started by `supervised.py` as a script, in a session of its own:

    python supervisor.py FOLDER OWNER_PID ORDERS REPLIES LOG COMMAND...

ORDERS is the descriptor of a pipe whose other end the owner holds. One number a line is a signal for the
server, a negative one a signal for its whole process group. The end of the pipe means stop, and the kernel
closes it however the owner dies. REPLIES is a pipe back: first the server's pid, then a line for each stop
signal that has taken effect.

LOG is a file for the server's output, or `-` for a command that keeps the terminal of its owner. FOLDER is
removed when the server is *stopped*; when it ends by itself the folder stays, for its log and its data.
Exit status: that of the server, 128 + n when signal n ended it.

Standard library only, nothing imported from the project: it starts in 20 ms and goes on while the tree under
it changes.
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
BUSY = 75  # exit status: somebody else's server lives in the folder
_OWNER_CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1


def take_lock(folder: Path) -> int | None:
    """Lock the folder for as long as this process lives; None when it is locked already. Does not block.

    The kernel lets go of the lock when its holder dies, so a locked folder has a living supervisor and the
    numbers written in it are true. Without the lock they may by now belong to anybody.
    """
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:  # no folder any more: its owner has stopped just now
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A supervisor that has just stopped removes the folder: a lock on a removed file guards nothing.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


class Server:
    """A child process that leads its own group. All waiting for it goes through here, so its number is known
    to be its own until `code` is set."""

    def __init__(self, command: list[str], log: Path | None) -> None:
        output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, output)
        with contextlib.suppress(OSError):  # the child does the same: whoever is first
            os.setpgid(self.pid, self.pid)
        if output is not None:
            os.close(output)

    def wait(self, options: int = 0) -> int | None:
        """The exit status as a shell would say it; None while it lives (`options` says what else to see)."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid and not os.WIFSTOPPED(status):
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code
        return self.code

    def stop(self) -> None:
        """TERM, five seconds, KILL. Blocks until the server is gone."""
        if self.code is None:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # a paused process would see its TERM only after the KILL
        deadline = time.monotonic() + STOP_SECONDS
        while self.wait(os.WNOHANG) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                self.wait()
                return
            time.sleep(_POLL_SECONDS)

    def kill_group(self) -> None:
        """End what the server itself has started and left behind."""
        # The leader is gone, but its number stays taken while its group has a member, and without one there
        # is nobody to be hit: a new process would have to get this number and lead a group, all just now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _become(command: list[str], output: int | None) -> None:
    """In the child: turn into the server. A command that cannot be started ends with status 127."""
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            # Should the supervisor itself be killed with -9, nobody is left to read the pipe.
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
    """Send one signal, and say so when it is a stop and the server has stopped."""
    if order < 0:
        os.killpg(server.pid, -order)
        return
    os.kill(server.pid, order)
    if order == signal.SIGSTOP and server.wait(os.WUNTRACED) is None:
        os.write(replies, b"stopped\n")


def supervise(server: Server, owner: int, orders: int, replies: int, wake: int, asked: list[int]) -> None:
    """Pass signals on until the server has ended, or is to be stopped."""
    while True:
        readable, _, _ = select.select([orders, wake], [], [], _OWNER_CHECK_SECONDS)
        if wake in readable:
            os.read(wake, 4096)
        if server.wait(os.WNOHANG) is not None or asked:
            return
        # The pipe stays open when the owner had forked a child that holds it: hence the second question.
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
        os.set_inheritable(descriptor, False)  # held by the server, they would outlive this process
    asked: list[int] = []
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: asked.append(number))
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda _number, _frame: None)

    current = folder / "run"
    shutil.rmtree(current, ignore_errors=True)  # a predecessor's: its pids and ports are not ours
    current.mkdir()
    server = Server(command, log)
    (current / "supervisor.pid").write_text(f"{os.getpid()}\n")
    # The owner may be gone already, and its end of the pipe with it: `supervise` sees that.
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
