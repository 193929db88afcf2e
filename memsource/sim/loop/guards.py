"""Guards that refuse calls that virtual time cannot control: threads, sockets, processes, signals and sleeps.

The guards replace functions of the standard library and of anyio's asyncio backend while a simulation runs in the
process. A guard refuses a call only on the loop of a simulation, and passes calls of other threads on. Guards do not
replace a function that a module has already imported by name (``from time import sleep``). If such a function waits by
the wall clock, the ``step_limit`` of the loop ends the step.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import asyncio
import functools
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from asyncio.events import _get_running_loop
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, Final, Protocol

from anyio import CapacityLimiter
from anyio._backends import _asyncio as backend
from anyio._core._eventloop import claim_worker_thread, threadlocals

from memsource.sim.errors import Refused


class Refuser(Protocol):
    """The methods of a simulation's loop that the guards call."""

    scopes: Iterator[int]
    """0, 1, 2 …: the numbers of the cancel scopes of this run."""

    def refuse(self, what: str, remedy: str) -> Refused:
        """Return the error to raise. The run ends with this error even if the program catches it."""

    def thread_seconds(self, what: str) -> float:
        """Return the virtual seconds to wait before the loop calls a thread's function.

        Args:
            what: Name of the call that needs a thread.

        Returns:
            Virtual seconds.

        Raises:
            Refused: The simulation refuses threads.
        """


THREADS: Final = 'make it async, or pass threads="inline" for calls of anyio.to_thread and asyncio.to_thread'
REAL_CONSUMER: Final = (
    "start the consumer by world.workers(count, handler), which replaces the source by a simulated broker"
)
_SLEEP: Final = "await anyio.sleep, which takes virtual time"
_NETWORK: Final = "give the handler a client that answers from memory"
_LOOP: Final = "await on the loop of the simulation"
_PROCESS: Final = "give the handler a function in place of the process"
_SIGNAL: Final = "call the function of the signal's handler directly"
_FROM_THREAD: Final = (
    'a function of threads="inline" runs on the loop\'s own thread: return a value instead of calling the loop'
)

_GUARDS: Final[tuple[tuple[object, str, str, str], ...]] = (
    (threading.Thread, "start", "threading.Thread.start", THREADS),
    (_thread, "start_new_thread", "_thread.start_new_thread", THREADS),
    (time, "sleep", "time.sleep", _SLEEP),
    (socket.socket, "__init__", "socket.socket", _NETWORK),
    *((socket, name, f"socket.{name}", _NETWORK) for name in ("socketpair", "create_connection", "create_server")),
    *((socket, name, f"socket.{name}", _NETWORK) for name in ("getaddrinfo", "getnameinfo")),
    *((socket, name, f"socket.{name}", _NETWORK) for name in ("gethostbyname", "gethostbyname_ex", "gethostbyaddr")),
    *((module, "new_event_loop", "asyncio.new_event_loop", _LOOP) for module in (asyncio, asyncio.events)),
    (subprocess.Popen, "__init__", "subprocess.Popen", _PROCESS),
    (_posixsubprocess, "fork_exec", "a new process", _PROCESS),
    *((os, name, f"os.{name}", _PROCESS) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
    *((signal, name, f"signal.{name}", _SIGNAL) for name in ("signal", "set_wakeup_fd", "setitimer", "alarm")),
    *((signal, name, f"signal.{name}", _SIGNAL) for name in ("pause", "sigwait", "sigwaitinfo", "sigtimedwait")),
)

LOOP_CALLS: Final[dict[str, str]] = {
    **dict.fromkeys(("add_signal_handler", "remove_signal_handler"), _SIGNAL),
    **dict.fromkeys(("subprocess_exec", "subprocess_shell"), _PROCESS),
    **dict.fromkeys(("add_reader", "remove_reader", "add_writer", "remove_writer"), _NETWORK),
    **dict.fromkeys(("getaddrinfo", "getnameinfo", "start_tls", "sendfile", "connect_accepted_socket"), _NETWORK),
    **dict.fromkeys(("create_connection", "create_server", "create_datagram_endpoint"), _NETWORK),
    **dict.fromkeys(("create_unix_connection", "create_unix_server"), _NETWORK),
    **dict.fromkeys(("connect_read_pipe", "connect_write_pipe"), _NETWORK),
    **dict.fromkeys(("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into"), _NETWORK),
    **dict.fromkeys(("sock_sendall", "sock_sendto", "sock_connect", "sock_accept", "sock_sendfile"), _NETWORK),
}
"""The methods of an event loop that have no virtual time, each with its remedy."""

_lock: Final = threading.Lock()
_users = 0
_undo: Final = ExitStack()


@contextmanager
def installed(kind: type[Refuser]) -> Iterator[None]:
    """Install the guards and switch garbage collection off, until the block of the last caller ends.

    The garbage collector runs at the end of each run. During a run, a finalizer would act at a turn that depends on the
    memory of the whole process.

    Args:
        kind: Class of the guarded loops. Callers in several threads must pass the same class.

    Yields:
        Nothing.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            if gc.isenabled():
                gc.disable()
                _undo.callback(gc.enable)
            _install(kind)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            last = _users == 0
            if last:
                _undo.close()
        if last:
            # All objects of the run are in the youngest generation, because the collector was off.
            gc.collect(0)


def refusing(what: str, remedy: str) -> Callable[..., Any]:
    """Make a method of a loop that refuses each call."""

    def call(loop: Refuser, *args: object, **kwargs: object) -> Any:
        raise loop.refuse(what, remedy)

    return call


def _install(kind: type[Refuser]) -> None:
    for owner, name, what, remedy in _GUARDS:
        if hasattr(owner, name):
            _replace(owner, name, _guard(kind, getattr(owner, name), what, remedy))
    _replace(backend, "CancelScope", _numbered_scope(kind, backend.CancelScope))
    in_order = _as_completed(kind)
    for module in (asyncio, asyncio.tasks):
        _replace(module, "as_completed", in_order)
    asynchronous = backend.AsyncIOBackend
    _replace(asynchronous, "run_sync_in_worker_thread", classmethod(_to_thread(kind)))
    for name in ("run_async_from_thread", "run_sync_from_thread"):
        guard = _guard(kind, getattr(asynchronous, name), "anyio.from_thread", _FROM_THREAD)
        _replace(asynchronous, name, staticmethod(guard))


def _replace(owner: Any, name: str, by: object) -> None:
    # The original is read from the dictionary of the class, because getattr would bind a classmethod.
    _undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, by)


@functools.lru_cache(maxsize=256)
def _guard(kind: type[Refuser], original: Callable[..., Any], what: str, remedy: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def guard(*args: Any, **kwargs: Any) -> Any:
        loop = _get_running_loop()
        if isinstance(loop, kind):
            raise loop.refuse(what, remedy)
        return original(*args, **kwargs)

    return guard


@functools.cache
def _numbered_scope(kind: type[Refuser], base: type[backend.CancelScope]) -> type[backend.CancelScope]:
    """Make a class of anyio's cancel scopes, with a hash that is the same in every run.

    anyio keeps the scopes within a scope in a set, and cancels them in the order of the set. Without the hash, the
    order of the set depends on memory addresses. All runs share one class. With a new class for each
    run, the interpreter would have to specialize the code again.
    """

    def number_of(scope: Any) -> int:
        try:
            number: int = scope._number
        except AttributeError:
            loop = _get_running_loop()
            number = scope._number = next(loop.scopes) if isinstance(loop, kind) else id(scope)
        return number

    return type("CancelScope", (base,), {"__slots__": ("_number",), "__hash__": number_of})


def _as_completed(kind: type[Refuser]) -> Callable[..., Any]:
    """Make an ``asyncio.as_completed`` that makes tasks in the order of its argument.

    asyncio's own function makes tasks in the order of a set, which depends on memory addresses.
    """
    original = asyncio.as_completed

    @functools.wraps(original)
    def as_completed(fs: Iterable[Any], **options: Any) -> Any:
        if isinstance(_get_running_loop(), kind):
            fs = [asyncio.ensure_future(one) for one in dict.fromkeys(fs)]
        return original(fs, **options)

    return as_completed


def _to_thread(kind: type[Refuser]) -> Callable[..., Awaitable[Any]]:
    original = backend.AsyncIOBackend.run_sync_in_worker_thread

    async def run_sync_in_worker_thread(
        cls: type[backend.AsyncIOBackend],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        abandon_on_cancel: bool = False,
        limiter: CapacityLimiter | None = None,
    ) -> Any:
        loop: object = asyncio.get_running_loop()
        if not isinstance(loop, kind):
            return await original(func, args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        seconds = loop.thread_seconds("anyio.to_thread.run_sync")
        await cls.checkpoint()
        async with limiter or cls.current_default_thread_limiter():
            with backend.CancelScope(shield=not abandon_on_cancel) as scope:
                await asyncio.sleep(seconds)
                # anyio.from_thread.check_cancelled reads the scope, as in anyio's own worker threads.
                threadlocals.current_cancel_scope = scope if abandon_on_cancel else scope._parent_scope
                try:
                    with claim_worker_thread(cls, loop):
                        return copy_context().run(func, *args)
                finally:
                    del threadlocals.current_cancel_scope

    return run_sync_in_worker_thread
