"""A consumer as the main job of a process: signals, exit statuses and one line for each error."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import Final, Literal, NoReturn, Unpack

import anyio

from lanes.consumer import Consumer, ConsumerOptions
from lanes.dead_letter import error_text
from lanes.errors import HandlerHalted, LanesError
from lanes.handlers import Handler
from lanes.source import Source

log = logging.getLogger("lanes")

# Exit statuses of consumers and commands alike: each number has one meaning.
EXIT_DRAINED: Final = 0
"""Stopped in order: after the first signal, or at the end of a finite source."""
EXIT_FAILED: Final = 1
"""A setting cannot be kept, or the broker is gone."""
EXIT_UNUSABLE: Final = 3
"""A command got bad input, or misses a part that it needs."""
EXIT_AT_ONCE: Final = 4
"""Stopped at once, by a second signal; unfinished messages are delivered again."""
EXIT_HALTED: Final = 5
"""A message was given up under the poison policy ``exit``, and the consumer was drained."""
EXIT_USAGE: Final = 64
"""The command or the option does not exist."""
EXIT_INTERRUPTED: Final = 130
"""Ended by Ctrl-C."""

SAME_REQUEST: Final = 1.0
"""Seconds after a signal in which further signals count as the same one.

A supervisor may signal the process and its group, and the process then gets each request twice.
"""


class SignalCounter:
    """A counter of the requests to stop a process. Two signals within ``SAME_REQUEST`` seconds are one request."""

    def __init__(self) -> None:
        self._requests = 0
        self._ignored_until = 0.0

    def received(self, now: float) -> int:
        """Count a signal. Does not block, so a signal handler may call it.

        Args:
            now: Time of the signal on ``time.monotonic``, in seconds.

        Returns:
            The number of requests so far, or 0 if the signal belongs to the last request.
        """
        if self._requests and now < self._ignored_until:
            return 0
        self._requests += 1
        self._ignored_until = now + SAME_REQUEST
        return self._requests


async def run(source: Source, handler: Handler, **options: Unpack[ConsumerOptions]) -> None:
    """Run ``handler`` over ``source`` until a finite source ends or the call is cancelled.

    The same as ``Consumer(…).run()``, which lists the exceptions.

    Args:
        source: Source of the messages.
        handler: Async or plain function of one ``Message``, or of a list of them with ``Settings(batch=…)``. A plain
            function runs in threads; see ``Settings.sync_handlers``.
        **options: The keyword arguments of ``Consumer`` except ``clock``, such as ``settings`` and ``dead_letters``.
    """
    await Consumer(source, handler, **options).run()


async def serve(consumer: Consumer, *, grace: float = 2.0) -> int:
    """Run a consumer under SIGINT and SIGTERM. Must be called on the main thread.

    The first signal drains. The second signal cancels the handlers and stops at once. Further signals within one second
    of a signal count as the same signal, because a supervisor may signal the process and its group.

    An error of ``lanes`` is one line on stderr. The log has the traceback of a handler that ended the run. Any other
    exception propagates.

    Args:
        consumer: The consumer to run.
        grace: Seconds that cancelled handlers get after the second signal, before the process ends.

    Returns:
        ``EXIT_DRAINED``, ``EXIT_FAILED``, ``EXIT_AT_ONCE`` or ``EXIT_HALTED``.
    """
    failure: BaseException | None = None
    at_once = False
    ended = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_signals, consumer, tasks.cancel_scope, ended, grace)
        try:
            await consumer.run()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            # The task group would wrap an exception that is raised here, even the SystemExit of a handler.
            failure = error
        finally:
            at_once = tasks.cancel_scope.cancel_called
            ended.set()
            tasks.cancel_scope.cancel()
    if at_once:
        return EXIT_AT_ONCE
    if failure is None:
        return EXIT_DRAINED
    if not isinstance(failure, LanesError):
        raise failure
    halted = isinstance(failure, HandlerHalted)
    if halted and failure.__cause__ is not None:
        # The line on stderr has no traceback, and no caller gets the error, so the log has both.
        log.error("this failure of the handler ends the run", exc_info=failure.__cause__)
    _say(_describe(failure))
    return EXIT_HALTED if halted else EXIT_FAILED


async def _watch_signals(consumer: Consumer, scope: anyio.CancelScope, ended: anyio.Event, grace: float) -> None:
    signals = SignalCounter()
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            request = signals.received(time.monotonic())
            if not request:
                continue
            if request == 1:
                _say(f"{number.name}: draining; a second signal stops at once")
                consumer.stop()
                continue
            _say(f"{number.name}: stopping at once")
            scope.cancel()
            with anyio.move_on_after(grace, shield=True):
                await ended.wait()
            if not ended.is_set():
                # The handler ignores its cancellation. Its message is not settled, so no message is lost.
                os._exit(EXIT_AT_ONCE)
            return


def main(
    source: Source,
    handler: Handler,
    *,
    backend: Literal["asyncio", "trio"] = "asyncio",
    **options: Unpack[ConsumerOptions],
) -> NoReturn:
    """Run ``handler`` over ``source`` as the job of this process, then exit.

    Blocks, and never returns. See ``serve`` for the signals.

    Args:
        source: Source of the messages.
        handler: Async or plain function of one ``Message``, or of a list of them with ``Settings(batch=…)``. A plain
            function runs in threads; see ``Settings.sync_handlers``.
        backend: The event loop.
        **options: The keyword arguments of ``Consumer`` except ``clock``, such as ``settings`` and ``dead_letters``.

    Raises:
        SystemExit: Always; with 0 (drained), 1 (failed), 4 (stopped at once) or 5 (halted).
    """

    async def job() -> int:
        return await serve(Consumer(source, handler, **options))

    try:
        status = anyio.run(job, backend=backend)
    except LanesError as error:
        _say(_describe(error))
        status = EXIT_FAILED
    sys.exit(status)


def _describe(error: LanesError) -> str:
    return f"{type(error).__name__}: {error_text(error)}"


def _say(line: str) -> None:
    sys.stderr.write(f"lanes: {line}\n")
    sys.stderr.flush()
