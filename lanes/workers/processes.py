"""The long-lived processes of a plain handler, and the calls that threads of the workers make into these processes.

A call belongs to one process from its start to its end, and a process has at most one call. The end of a process
therefore fails only this call, and a kill of the process ends the call immediately.

Each process has a thread that starts it, waits for its end and starts its successor. A process ends when its
connection closes, and the kernel kills it when the process of the consumer ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import anyio

from lanes.core.types import ABANDON, ACK, Message, Outcome, Partition
from lanes.dead_letter import error_text, printable
from lanes.errors import ConfigError, HandlerProcessError
from lanes.handlers import Decode, handler_name
from lanes.loops import entry_of_loop
from lanes.observe.otel import carrier
from lanes.workers.crossing import (
    PROTOCOL,
    READY,
    STOP_SIGNALS,
    Closed,
    HandlerTraceback,
    SetUp,
    Skipped,
    pack,
    receive,
    result_of,
    send,
)
from lanes.workers.outcomes import counts, failure
from lanes.workers.pool import Call, Pool, Result

log = logging.getLogger("lanes")

_CODE: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); life = int(sys.argv.pop()); "
    "from lanes.workers.child import main; main(int(sys.argv.pop()), life)"
)

_STARTS: Final = 5
"""Maximum number of processes in a row that may end before they are ready, without an error of the handler."""

_PAUSE: Final = 0.1
"""Seconds between a process that did not become ready and the start of the next process. Doubles with each further one.
"""

_REAPED_WITHIN: Final = 5.0
"""Seconds for the system to report the end of a killed process."""


class Killed(BaseException):
    """The result of a call that received no process, or whose process was killed by ``cancel`` or ``end``."""


class _Process:
    """One process, and the connection to it. ``ended`` is set when the system has reported the end of the process.

    ``life`` is the end of a pipe. Each process has a separate pipe, because the kernel signals only one process for a
    pipe.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes], connection: socket.socket, life: int) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.life = life
        self.ended = threading.Event()
        self.reason = ""

    def kill(self, reason: str) -> None:
        """Kill the process. The call does not block. Idempotent. ``reason``: reason for the log."""
        self.reason = self.reason or reason
        self.process.kill()

    def leave(self) -> None:
        """Make the process end after its call. The call does not block. Idempotent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and the pipe of a process that has ended."""
        self.connection.close()
        os.close(self.life)

    def how(self) -> str:
        """Return a text that says how the process ended."""
        status = self.process.returncode if self.ended.wait(_REAPED_WITHIN) else None
        if status is None:
            return "closed its connection"
        if status >= 0:
            return f"ended with status {status}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"


class ProcessCall:
    """A call with one or several messages, from ``ProcessPool.take`` to the end of its ``with`` block."""

    __slots__ = ("_pool", "_process", "cancelled", "messages")

    def __init__(self, pool: ProcessPool, messages: Sequence[Message]) -> None:
        self._pool = pool
        self._process: _Process | None = None
        self.messages = messages
        self.cancelled = False

    def __enter__(self) -> ProcessCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool._give_back(self)

    def handle(self, message: Message) -> None:
        """Handle one message in the process. Blocks. Raises the handler's exception, or ``Killed``."""
        self._ask([message])

    def handle_batch(self, messages: list[Message]) -> list[Outcome]:
        """Handle a batch in the process. Blocks. Raises the handler's exception, or ``Killed``.

        Returns one outcome for each message.
        """
        results = self._ask(messages)
        assert results is not None, "a batch has a result for each message"
        return [_outcome(one) for one in results]

    def _ask(self, messages: Sequence[Message]) -> list[BaseException | type[Skipped] | None] | None:
        pool = self._pool
        frame = pack(messages, carrier() if pool.traced else {})
        timeout = pool.timeout
        while True:
            process = self._process
            assert process is not None, "a call has a process until it ends"
            until = None if timeout is None else time.monotonic() + timeout
            try:
                try:
                    send(process.connection, frame, until)
                except Closed:
                    # The process has ended before this call, so the handler was not called.
                    if not pool._replace(self):
                        raise Killed from None
                    continue
                answer = receive(process.connection, until)
            except TimeoutError:
                self._drop(process, "its handler did not end within the timeout")
                raise TimeoutError(f"the handler did not end within timeout={timeout:g} s") from None
            except Closed:
                self._drop(process, "")
                if self.cancelled:
                    raise Killed from None
                raise HandlerProcessError(
                    f"the process of the handler {process.how()} during the call: look for a crash in C code, a lack "
                    "of memory, or a call of os._exit"
                ) from None
            return result_of(answer)

    def _drop(self, process: _Process, reason: str) -> None:
        """End a process that cannot handle a further call."""
        process.kill(reason)
        self._process = None


def _outcome(result: BaseException | type[Skipped] | None) -> Outcome:
    if result is None:
        return ACK
    if isinstance(result, Exception) and counts(result):
        return failure(result)
    return ABANDON


class ProcessPool:
    """The processes of one consumer.

    Args:
        handler: Plain function of one message, or of a list of messages.
        decode: Function for ``Message.data``, which runs in the processes.
        set_up: Function that each process calls once before its first message; None = no function.
        batch: Whether the handler receives lists.
        count: Number of processes.
        timeout: Seconds after which the pool kills the process of a call. ``None`` = never.
        grace: Seconds in which idle processes may end at the end of the run.
        traced: Whether the pool passes the trace context of the current span to the process.
        refuse: Function that the workers call on the event loop with the error that prevents the start of a process.

    Attributes:
        timeout: See ``Args``.
        traced: See ``Args``.
    """

    def __init__(
        self,
        handler: Callable[..., object],
        decode: Decode | None,
        set_up: SetUp | None,
        *,
        batch: bool,
        count: int,
        timeout: float | None,
        grace: float,
        traced: bool,
        refuse: Callable[[BaseException], None],
    ) -> None:
        self.timeout = timeout
        self.traced = traced
        self._name = handler_name(handler)
        self._call = (handler, decode, set_up, batch)
        self._count = count
        self._grace = grace
        self._refuse = refuse
        # Guards the attributes below. Each change wakes the waiting calls.
        self._changed = threading.Condition()
        self._all: dict[_Process, None] = {}
        self._free: list[_Process] = []
        self._calls: dict[ProcessCall, None] = {}
        self._ending = False
        self._refused: BaseException | None = None
        self._keepers: list[threading.Thread] = []
        self._keeping = 0
        self._first_frame = b""
        self._enter: Callable[[Callable[[], None]], object]
        self._ended: anyio.Event

    # --- on the event loop

    def start(self) -> None:
        """Start the processes. The call does not block. The processes import the handler in parallel."""
        self._enter, self._ended = entry_of_loop(), anyio.Event()
        try:
            self._first_frame = _first_frame(*self._call)
        except Exception as error:
            self._stop(_refused(self._name, error))
            return
        for number in range(1, self._count + 1):
            thread = threading.Thread(target=self._keep, args=(number,), name=f"lanes-process-{number}", daemon=True)
            with self._changed:
                self._keeping += 1
            try:
                thread.start()
            except RuntimeError as error:
                self._stop(_no_process(number, self._count, error))
                self._leave()
                break
            self._keepers.append(thread)

    def cancel(self, partition: Partition) -> None:
        """Kill the processes that handle messages of a partition, whose calls then raise ``Killed``.

        The call does not block.
        """
        with self._changed:
            self._cancel(lambda call: any(message.partition is partition for message in call.messages))

    def end(self) -> None:
        """Begin no further call, kill the processes that have a call, and let the idle processes end.

        The call does not block.
        """
        with self._changed:
            self._ending = True
            self._cancel(lambda call: True)
            for process in self._all:
                if process in self._free:
                    process.leave()
                else:
                    process.kill("the run ends")

    def kill(self) -> None:
        """Kill all processes. The call does not block. Idempotent."""
        with self._changed:
            self._ending = True
            for process in self._all:
                process.kill("the run ends")

    async def close(self) -> None:
        """Wait for the end of all processes after ``end``. Kill each process that has not ended after the grace."""
        with anyio.move_on_after(self._grace):
            await self._until_ended()
        self.kill()
        await self._until_ended()
        for thread in self._keepers:
            # The thread has run its last line, so this waits only for the system.
            thread.join()

    async def _until_ended(self) -> None:
        if self._keepers:
            await self._ended.wait()

    def _cancel(self, which: Callable[[ProcessCall], bool]) -> None:
        for call in self._calls:
            if which(call):
                call.cancelled = True
                if call._process is not None:
                    call._process.kill("its call is cancelled")
        self._changed.notify_all()

    # --- in the threads of the workers

    def take(self, messages: Sequence[Message]) -> ProcessCall:
        """Wait for a process, and begin a call in it. Blocks.

        Raises ``Killed`` if the call is cancelled during the wait. If no process can start, raises the error of the
        start.
        """
        call = ProcessCall(self, messages)
        with self._changed:
            self._calls[call] = None
            if self._assign(call):
                return call
            del self._calls[call]
        raise Killed if self._refused is None else self._refused

    def _assign(self, call: ProcessCall) -> bool:
        while not (self._free or self._ending or call.cancelled):
            self._changed.wait()
        if self._ending or call.cancelled:
            return False
        call._process = self._free.pop()
        return True

    def _replace(self, call: ProcessCall) -> bool:
        with self._changed:
            call._process = None
            return self._assign(call)

    def _give_back(self, call: ProcessCall) -> None:
        with self._changed:
            del self._calls[call]
            process, call._process = call._process, None
            if process is not None and process in self._all:
                if self._ending:
                    process.leave()
                else:
                    self._free.append(process)
                    self._changed.notify()

    # --- in the thread of one process

    def _keep(self, number: int) -> None:
        """Start a process, and another process after each end, until the pool ends or a process cannot start."""
        unready = 0
        try:
            while not self._is_ending():
                process = self._begin(number)
                ready = self._make_ready(process)
                unready = 0 if ready else unready + 1
                process.process.wait()
                with self._changed:
                    del self._all[process]
                    if process in self._free:
                        self._free.remove(process)
                process.ended.set()
                process.close()
                if self._is_ending():
                    break
                how = process.how()
                log.log(
                    logging.INFO if process.reason else logging.WARNING,
                    "process %d of the handler %s (pid %d) %s%s; the next process starts",
                    number,
                    printable(self._name),
                    process.process.pid,
                    how,
                    f", because {process.reason}" if process.reason else "" if ready else " before it was ready",
                )
                if unready == _STARTS:
                    self._stop(
                        ConfigError(
                            f"the handler {self._name} has no process, because {unready} processes in a row ended "
                            f"before they were ready, and the last process {how}. Read their stderr, and check the "
                            "import of the handler and process_setup="
                        )
                    )
                    break
                if unready:
                    with self._changed:
                        self._changed.wait_for(lambda: self._ending, _PAUSE * 2 ** (unready - 1))
        except BaseException as error:
            self._stop(error)
        finally:
            self._leave()

    def _is_ending(self) -> bool:
        return self._ending

    def _leave(self) -> None:
        """Record that a thread no longer manages a process. The last such thread wakes the loop."""
        with self._changed:
            self._keeping -= 1
            if self._keeping:
                return
        with contextlib.suppress(RuntimeError):
            self._enter(lambda: self._ended.set())

    def _begin(self, number: int) -> _Process:
        try:
            process = _spawn(number)
        except OSError as error:
            raise _no_process(number, self._count, error) from error
        with self._changed:
            self._all[process] = None
            if self._ending:
                process.kill("the run ends")
        return process

    def _make_ready(self, process: _Process) -> bool:
        """Wait until a process has imported the handler. Stop the consumer if the import fails."""
        try:
            send(process.connection, self._first_frame)
            answer = receive(process.connection)
            if answer != READY:
                result_of(answer)
        except Closed:
            process.kill("")
            return False
        except BaseException as error:
            self._stop(_refused(self._name, error))
            return False
        with self._changed:
            if self._ending:
                process.leave()
            else:
                self._free.append(process)
                self._changed.notify()
        return True

    def _stop(self, error: BaseException) -> None:
        """Stop the consumer because no process can start. The method cancels all waiting calls."""
        with self._changed:
            if self._ending:
                return
            self._ending, self._refused = True, error
            for process in self._free:
                process.leave()
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):
            self._enter(lambda: self._refuse(error))


async def run_threads(
    pool: Pool[Call, Result],
    processes: ProcessPool | None,
    turn: Callable[[], None],
    grace: float,
    result_counts: Callable[[Call], bool],
) -> None:
    """Run the threads of the workers until cancelled, then end them and their processes; see ``Pool.run``.

    Args:
        pool: The threads.
        processes: The processes into which the threads call; None = no processes.
        turn: Function that reads the results.
        grace: Seconds for running calls to end.
        result_counts: Function that returns whether the engine still accepts the result of a call.
    """
    if processes is None:
        await pool.run(turn, grace, result_counts)
        return
    try:
        # The processes of running calls are killed, so every call ends.
        await pool.run(turn, grace, lambda call: True)
    except GeneratorExit:
        # The loop is closed, so no await is allowed.
        processes.kill()
        raise
    except BaseException:
        with anyio.CancelScope(shield=True):
            await processes.close()
        raise


def _first_frame(handler: object, decode: object, set_up: object, batch: bool) -> bytes:
    """Return the first frame of a process: its main module, if the handler needs it, and the handler."""
    pickled = pickle.dumps((handler, decode, set_up, batch), PROTOCOL)
    return pickle.dumps((_main_module() if b"__main__" in pickled else None, pickled), PROTOCOL)


def _main_module() -> Mapping[str, Any]:
    """Return the main module as ``multiprocessing.spawn.prepare`` imports it, under the name ``__mp_main__``."""
    main: Any = sys.modules["__main__"]
    module: dict[str, Any] = {"sys_argv": sys.argv, "dir": os.getcwd()}
    name = getattr(main.__spec__, "name", None)
    path = getattr(main, "__file__", None)
    if name is not None:
        module["init_main_from_name"] = name
    elif path is not None:
        module["init_main_from_path"] = os.path.abspath(path)
    return module


def _spawn(number: int) -> _Process:
    """Start a process, with the stop signals blocked. Raises ``OSError`` if the system refuses the process."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as refused:
        refused.callback(ours.close)
        with theirs:
            reading, life = os.pipe()
            refused.callback(os.close, life)
            try:
                process = _open(theirs.fileno(), reading)
            finally:
                os.close(reading)
        refused.pop_all()
    return _Process(number, process, ours, life)


def _open(connection: int, life: int) -> subprocess.Popen[bytes]:
    executable = multiprocessing.spawn.get_executable()
    if not executable:
        raise OSError("sys.executable names no interpreter")
    # A signal to the whole group must not end the process before it ignores these signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [os.fsdecode(executable), "-c", _CODE, str(connection), str(life), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=(connection, life),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _no_process(number: int, count: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"the system refused process {number} of processes={count} ({error}): lower processes, or raise the limits of "
        "processes and memory"
    )


def _refused(name: str, error: BaseException) -> ConfigError:
    refused = ConfigError(
        f"the handler {name} cannot start in a process ({type(error).__qualname__}: {printable(error_text(error))}): "
        'start the consumer under `if __name__ == "__main__":`, remove other effects from the import of its module, '
        "and check process_setup="
    )
    refused.__cause__ = error.__cause__ if isinstance(error.__cause__, HandlerTraceback) else error
    return refused
