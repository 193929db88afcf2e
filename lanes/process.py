"""A consumer as the main job of a process: signals, exit statuses and one line for each error."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any, Final, Literal, NoReturn, ParamSpec, TypeVar, Unpack

import anyio

from lanes.arguments import OF_MAIN, check_one_of, check_seconds, kind_of, unknown_name
from lanes.consumer import Consumer, ConsumerOptions
from lanes.dead_letter import error_text, printable
from lanes.errors import ConfigError, HandlerHalted, LanesError
from lanes.handlers import Handler
from lanes.loops import BACKENDS, backend_arguments, entry_of_loop, has_trio, has_uvloop, runs_a_loop
from lanes.observe.failures import shown, traceback_of
from lanes.runtime.consumer_arguments import check_import
from lanes.runtime.garbage import tuned_gc
from lanes.source import Source
from lanes.web.opening import port_of
from lanes.web.settings import Web

log = logging.getLogger("lanes")

# Exit statuses of consumers and commands alike: each number has one meaning.
EXIT_DRAINED: Final = 0
"""The consumer has drained, after the first signal or at the end of a finite source; or the command succeeded.

A first signal before the source is open ends the start, with nothing to drain.
"""
EXIT_FAILED: Final = 1
"""An error of ``lanes`` ended the consumer, for example an invalid setting or a lost broker."""
EXIT_UNUSABLE: Final = 3
"""The command failed, for example because of bad input, a missing package or a broker that cannot be reached."""
EXIT_AT_ONCE: Final = 4
"""A second signal stopped the consumer immediately; the broker delivers unfinished messages again."""
EXIT_HALTED: Final = 5
"""A message failed permanently under the poison policy ``exit``, or user code cancelled a handler; the consumer then
drained.
"""
EXIT_USAGE: Final = 64
"""The command line is wrong: a command or option is unknown or missing, or options contradict each other."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C ended the command."""
EXIT_CLOSED_PIPE: Final = 141
"""The reader of the command's output ended first, as ``head`` does; a shell shows this status after SIGPIPE."""

SAME_REQUEST: Final = 1.0
"""Seconds after a signal in which the process ignores further signals.

A supervisor may signal the process and its group, and the process then gets each request twice.
"""

GRACE: Final = 2.0
"""Maximum number of seconds from a second signal to the end of the process. Cancelled handlers may clean up."""


class SignalCounter:
    """A counter of the requests to stop a process.

    Signals within ``SAME_REQUEST`` seconds of a request are part of this request.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._ignored_until = 0.0

    def received(self, now: float) -> int:
        """Count a signal. A signal handler may make this call, because it does not block.

        Args:
            now: Time of the signal on ``time.monotonic``, in seconds.

        Returns:
            Number of requests so far, or 0 if the signal is part of the last request.
        """
        if self._requests and now < self._ignored_until:
            return 0
        self._requests += 1
        self._ignored_until = now + SAME_REQUEST
        return self._requests


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _explains_wrong_calls(function: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Make a function of this module refuse wrong arguments with an error that shows the right call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    async def checked(*values: _P.args, **options: _P.kwargs) -> _T:
        try:
            signature.bind(*values, **options)
        except TypeError:
            raise _wrong_call(function.__name__, values) from None
        return await function(*values, **options)

    return checked


def _ends_wrong_calls(function: Callable[_P, NoReturn]) -> Callable[_P, NoReturn]:
    """Make ``main`` end the process with one line after a call with wrong arguments."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*values: _P.args, **options: _P.kwargs) -> NoReturn:
        try:
            signature.bind(*values, **options)
        except TypeError:
            _say(_describe(_wrong_call(function.__name__, values)))
            sys.exit(EXIT_FAILED)
        function(*values, **options)

    return checked


def _wrong_call(name: str, values: tuple[object, ...]) -> ConfigError:
    """Return the error for a call whose values do not fit the parameters."""
    if name == "serve":
        remedy = "write lanes.serve(lanes.Consumer(source, handler, …))"
        return ConfigError(f"lanes.serve takes one consumer, and other arguments by their names: {remedy}")
    remedy = f"write lanes.{name}(source, handler, settings=…)"
    if values and isinstance(values[0], Consumer):
        remedy = f"{remedy}, or await {'consumer.run()' if name == 'run' else 'lanes.serve(consumer)'}"
    return ConfigError(f"lanes.{name} takes a source and a handler, and other arguments by their names: {remedy}")


@_explains_wrong_calls
async def run(source: Source, handler: Handler, **options: Unpack[ConsumerOptions]) -> None:
    """Run ``handler`` over ``source`` until a finite source ends or the call is cancelled.

    A cancellation drains first; see ``Settings.on_cancel``. The call is the same as ``Consumer(…).run()``, whose
    docstring lists the exceptions.

    Args:
        source: Source of the messages.
        handler: Async or plain function of one ``Message``, or of a list with ``Settings(batch=…)``. A plain
            function runs in threads; see ``Settings.sync_handlers``.
        **options: The keyword arguments of ``Consumer`` except ``clock``, such as ``settings`` and ``dead_letters``.
    """
    _check_names("run", options)
    await Consumer(source, handler, **options).run()


@_explains_wrong_calls
async def serve(
    consumer: Consumer,
    *,
    grace: float = GRACE,
    gc: Literal["tuned", "default"] = "tuned",
    http: str | Web | None = None,
) -> int:
    """Run a consumer under SIGINT and SIGTERM.

    Call this function on the main thread. The first signal starts a drain, or ends ``run`` if the source is not open
    yet. The second signal cancels the handlers, and the consumer stops without a drain. The process ignores further
    signals within one second of a signal, because a supervisor may signal both the process and its group.

    A separate thread answers the signals, so the process responds at once even while a handler blocks the event loop.
    If the consumer has not ended ``grace`` seconds after the second signal, another thread ends the process with
    ``EXIT_AT_ONCE``.

    The function prints an error of ``lanes`` as one line on stderr. The log has the traceback of a handler whose
    exception ended the run. Any other exception propagates.

    Args:
        consumer: The consumer to run.
        grace: Seconds for cancelled handlers to end after the second signal, before the process ends.
        gc: ``tuned`` = Python collects garbage less often until the call ends; see ``tune_gc``. ``default`` = the
            settings of the garbage collector do not change.
        http: Address of the HTTP server with probes, status and metrics, such as ``"127.0.0.1:8080"``, or a
            ``lanes.web.Web``; None = no HTTP server. The server needs the extra ``web``, and closes at the end of the
            call.

    Returns:
        ``EXIT_DRAINED``, ``EXIT_FAILED``, ``EXIT_AT_ONCE`` or ``EXIT_HALTED``.

    Raises:
        ConfigError: The call is not on the main thread, an argument has a wrong type or value, the address of ``http``
            is in use, or the extra ``web`` is not installed.
    """
    if not isinstance(consumer, Consumer):
        raise ConfigError(f"consumer is {kind_of(consumer)}: pass lanes.Consumer(source, handler, …)")
    check_seconds("grace", grace, 0.0)
    with _collector(gc), port_of(consumer, http):
        return await _serve(consumer, grace, ends_process=False)


def _collector(gc: str) -> AbstractContextManager[None]:
    """Return the block in which a consumer runs with the chosen garbage collector."""
    check_one_of("gc", gc, ("tuned", "default"))
    return tuned_gc(freeze=True) if gc == "tuned" else nullcontext()


async def _serve(consumer: Consumer, grace: float, *, ends_process: bool) -> int:
    """Run a consumer under SIGINT and SIGTERM.

    With ``ends_process`` the consumer is the only job of the process. The process then ends at most ``grace`` seconds
    after a second signal.
    """
    check_import()
    failure: BaseException | None = None
    at_once = False
    enter = entry_of_loop()
    with anyio.CancelScope() as scope:

        def drain() -> str:
            starts = consumer._life.state in ("new", "starting")
            consumer.stop()
            if not starts:
                return f"draining, for which running handlers get up to {consumer._settings.drain_timeout:g} s"
            with suppress(RuntimeError):
                enter(stop_start)
            return "stopping, because the source is not open yet"

        def stop_start() -> None:
            # Otherwise the source has been opened meanwhile, and the consumer drains.
            if consumer._life.state == "starting":
                scope.cancel()

        def stop_at_once() -> None:
            nonlocal at_once
            at_once = True
            consumer.stop(at_once=True)
            scope.cancel()

        def end_process(failure: BaseException | None) -> NoReturn:
            """End the process without waiting for a handler that ignores its cancellation."""
            try:
                status = _status(consumer._life.name, failure, at_once=at_once)
            except SystemExit as leaving:
                status = exit_status(leaving)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
                status = EXIT_FAILED
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(status)

        if ends_process:
            consumer._end_process = end_process
        signals = StopSignals("lanes.main" if ends_process else "lanes.serve", drain, stop_at_once, grace)
        try:
            # Not ``run``, which would log the error that this function reports.
            await consumer._consume()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            failure = error
        finally:
            signals.close(bounded=at_once and ends_process)
    return _status(consumer._life.name, failure, at_once=at_once)


async def serve_alone(consumer: Consumer) -> int:
    """Run a consumer as the only job of this process, as ``main`` does, and return the exit status.

    Args:
        consumer: The consumer.

    Returns:
        ``EXIT_DRAINED``, ``EXIT_FAILED``, ``EXIT_AT_ONCE`` or ``EXIT_HALTED``.
    """
    with _collector("tuned"):
        return await _serve(consumer, GRACE, ends_process=True)


def _status(name: str, failure: BaseException | None, *, at_once: bool) -> int:
    """Return the exit status of a run, and report the error of the run.

    The function raises an error that is not an error of ``lanes``.
    """
    if at_once:
        return EXIT_AT_ONCE
    if failure is None:
        return EXIT_DRAINED
    if not isinstance(failure, LanesError):
        raise failure
    halted = isinstance(failure, HandlerHalted)
    if isinstance(failure, HandlerHalted) and failure.__cause__ is not None:
        # No caller gets the error. The line on stderr has its text, and the log has the traceback.
        cause = failure.__cause__
        at = f" at {failure.place}" if failure.place else ""
        log.error("%s: the run ends after %s%s", name, shown(cause), at, exc_info=traceback_of(cause))
    _say(_describe(failure))
    return EXIT_HALTED if halted else EXIT_FAILED


def exit_status(leaving: SystemExit) -> int:
    """Return the status with which Python ends for this error, and print the error's text, if any."""
    if leaving.code is None:
        return EXIT_DRAINED
    if isinstance(leaving.code, int):
        return leaving.code
    if _form is None:
        sys.stderr.write(f"{leaving.code}\n")
    else:
        _say(printable(str(leaving.code)))
    return EXIT_FAILED


_JOINED_WITHIN: Final = 1.0
"""Seconds that the thread of ``StopSignals`` gets to end."""

_ANSWERED: Final = 0x80
"""Bit that marks a byte from the signal handler of ``StopSignals``. The thread does not forward such a byte."""


class StopSignals:
    """The signals that stop a process.

    A separate thread answers them from the constructor until ``close``. Python's signal handler in C writes the number
    of each signal into a socket, and the thread reads the socket. The signal handler and the thread work without the
    main thread, so a handler that blocks the event loop delays no answer. Only a C function that holds the
    interpreter's lock delays the thread. Other code, such as the event loop, may have set a wakeup socket for its own
    signals. The thread forwards the number of each signal to that socket.

    Args:
        caller: Name of the function that the user called, for the error.
        drain: Function that the thread calls after the first signal. The function returns the text that the thread
            prints.
        cancel: Function to call on the event loop after the second signal.
        grace: Maximum number of seconds from the second signal to the end of the process.

    Raises:
        ConfigError: The call is not on the main thread.
    """

    def __init__(self, caller: str, drain: Callable[[], str], cancel: Callable[[], None], grace: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"{caller} was called on the thread {threading.current_thread().name!r}, but Python handles signals on "
                f"the main thread: call {caller} there, or call Consumer.run and Consumer.stop instead"
            )
        self._drain = drain
        self._cancel = cancel
        self._grace = grace
        self._enter = entry_of_loop()
        self._ended = threading.Event()
        self._reading, self._writing = socket.socketpair()
        # The system's signal handler must never wait.
        self._writing.setblocking(False)
        self._other = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer, name="lanes-signals", daemon=True)
        self._thread.start()
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._received) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def close(self, *, bounded: bool) -> None:
        """Restore the former handlers of the signals.

        Args:
            bounded: Whether the thread still ends the process ``grace`` seconds after the second signal.
        """
        for number, before in self._before.items():
            if signal.getsignal(number) == self._received:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
        other = signal.set_wakeup_fd(self._other, warn_on_full_buffer=False)
        if other != self._writing.fileno():
            signal.set_wakeup_fd(other)
        if bounded:
            return
        self._ended.set()
        self._writing.send(b"\0")
        # The thread ends at once, unless stderr blocks it.
        self._thread.join(_JOINED_WITHIN)
        if not self._thread.is_alive():
            self._reading.close()
            self._writing.close()

    def _received(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal on the main thread, as soon as the main thread runs Python code again."""
        writing = self._writing.fileno()
        other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if other != writing:
            # Other code has replaced the socket since, and has received the byte of this signal.
            self._other = other
            with suppress(OSError):
                self._writing.send(bytes([number | _ANSWERED]))

    # --- in the thread

    def _answer(self) -> None:
        signals = SignalCounter()
        while (numbers := self._reading.recv(64)) and 0 not in numbers:
            for number in numbers:
                if not number & _ANSWERED:
                    self._pass_on(number)
                number &= ~_ANSWERED
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._request(signals.received(time.monotonic()), signal.Signals(number).name)

    def _request(self, request: int, name: str) -> None:
        if request == 1:
            # The drain is requested before the line is written, because a reader of the line may end the running
            # handler at once.
            answer = self._drain()
            _say_now(f"{name}: {answer}; a second signal stops at once")
        elif request == 2:
            # A separate thread ends the process, because stderr may block this thread.
            threading.Thread(target=self._end_process, name="lanes-exit", daemon=True).start()
            _say_now(f"{name}: stopping at once")
            with suppress(RuntimeError):
                self._enter(self._cancel)

    def _end_process(self) -> None:
        if not self._ended.wait(self._grace):
            # A handler ignores its cancellation. The message of the handler is not settled, so no message is lost.
            os._exit(EXIT_AT_ONCE)

    def _pass_on(self, number: int) -> None:
        other = self._other
        if other != -1:
            with suppress(OSError):
                os.write(other, bytes([number]))


@_ends_wrong_calls
def main(
    source: Source,
    handler: Handler,
    *,
    backend: Literal["asyncio", "auto", "trio", "uvloop"] = "asyncio",
    gc: Literal["tuned", "default"] = "tuned",
    http: str | Web | None = None,
    **options: Unpack[ConsumerOptions],
) -> NoReturn:
    """Run ``handler`` over ``source`` as the only job of this process, then exit.

    The call blocks and never returns. ``serve`` describes the signals.

    Args:
        source: Source of the messages.
        handler: Async or plain function of one ``Message``, or of a list with ``Settings(batch=…)``. A plain
            function runs in threads; see ``Settings.sync_handlers``.
        backend: Name of the event loop's library. ``uvloop`` needs the extra ``uvloop``. ``auto`` = uvloop if it is
            installed, else asyncio.
        gc: ``tuned`` = Python collects garbage less often; see ``tune_gc``. ``default`` = the settings of the garbage
            collector do not change.
        http: Address of the HTTP server with probes, status and metrics, such as ``"127.0.0.1:8080"``, or a
            ``lanes.web.Web``; None = no HTTP server. The server needs the extra ``web``.
        **options: The keyword arguments of ``Consumer`` except ``clock``, such as ``settings`` and ``dead_letters``.

    Raises:
        SystemExit: The consumer has ended: 0 = drained, 1 = failed, 4 = stopped at once, 5 = halted. An exception that
            is not an error of ``lanes`` propagates instead.
    """
    made: list[Consumer] = []

    async def job() -> int:
        consumer = Consumer(source, handler, **options)
        made.append(consumer)
        with port_of(consumer, http):
            return await _serve(consumer, GRACE, ends_process=True)

    # Not within ``try``, because the command that imports the module prints this error.
    check_import()
    try:
        _check_names("main", options)
        check_one_of("backend", backend, BACKENDS)
        if runs_a_loop():
            raise ConfigError(
                "lanes.main was called while an event loop runs, and starts an event loop itself: write "
                "await lanes.serve(lanes.Consumer(source, handler, …))"
            )
        if backend == "trio" and getattr(source, "needs_asyncio", False):
            raise ConfigError(f'backend="trio": {type(source).__name__} needs asyncio; leave backend out')
        if backend == "uvloop" and not has_uvloop():
            raise ConfigError(
                "backend=\"uvloop\": uvloop is not installed; pip install '.[uvloop]' in the checkout of "
                'lanes, or write backend="auto"'
            )
        if backend == "trio" and not has_trio():
            raise ConfigError(
                "backend=\"trio\": trio is not installed; pip install 'anyio[trio]', or leave backend out"
            )
        with _collector(gc):
            status = anyio.run(job, **backend_arguments(backend))
    except LanesError as error:
        _say(_describe(error))
        status = EXIT_FAILED
    except KeyboardInterrupt:
        if made and made[0]._life.run is not None:
            # A handler raised it, because a signal during the run raises nothing.
            raise
        _say("SIGINT: stopping, because the source is not open yet")
        status = EXIT_DRAINED
    sys.exit(status)


def _check_names(caller: str, options: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` for an option that a consumer does not have."""
    known = ConsumerOptions.__annotations__
    for name in options:
        if name not in known:
            if name in OF_MAIN:
                raise ConfigError(f"lanes.{caller} has no option {name}=: {OF_MAIN[name]}")
            raise unknown_name(
                f"lanes.{caller}", name, [*known, "backend", "gc", "http"] if caller == "main" else known
            )


def _describe(error: LanesError) -> str:
    return f"{type(error).__name__}: {printable(error_text(error))}"


_form: Callable[[str, str], str] | None = None


def write_lines_as(form: Callable[[str, str], str]) -> None:
    """Set the form of the lines that this process writes to stderr outside of its log, about signals and errors.

    Args:
        form: Function of a text and of a level of the log, such as ``INFO``. The function returns the line with its
            end. Any thread may call the function, and the function must take no lock.
    """
    global _form
    _form = form


def _say_now(line: str) -> None:
    """Write a line to stderr from any thread, without the locks of ``sys.stderr``."""
    with suppress(OSError):
        os.write(2, (f"lanes: {line}\n" if _form is None else _form(line, "INFO")).encode())


def _say(line: str) -> None:
    if _form is None:
        sys.stderr.write(f"lanes: {line}\n")
    else:
        sys.stderr.write(_form(line, "ERROR"))
    sys.stderr.flush()
