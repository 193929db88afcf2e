"""The demo at a terminal: signals, exit statuses, and one line for each error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import anyio

from demo.config import DemoConfig
from demo.run import run
from demo.view import Outcome, View, best_view
from lanes.errors import LanesError

EXIT_KEPT: Final = 0
"""Exit status after a report that shows every promise kept."""
EXIT_BROKEN: Final = 1
"""Exit status after a report that names a broken promise."""
EXIT_UNUSABLE: Final = 3
"""Exit status after an error that stops the demo, such as bad input, a missing server or a closed stdout."""
EXIT_SIGNAL: Final = 128
"""Base of the exit status after a signal. The exit status adds the number of the signal, so Ctrl+C gives status 130."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(config: DemoConfig, view: View | None = None) -> int:
    """Run the demo, show its progress and report, and return an exit status, see ``show``."""
    return show(partial(run, config), view)


def show(job: Callable[[View], Awaitable[Outcome]], view: View | None = None) -> int:
    """Run a job, show its progress and report, and return an exit status.

    Blocks. The function works only on the main thread.

    The report is a table and one JSON object. The JSON object is the last line on stdout, except on a terminal,
    where the table follows the object. A first signal kills the workers, and removes the streams or topics of the run
    if possible. A second signal ends the process at once.
    """
    view = view or best_view()
    try:
        return asyncio.run(_watched(job, view))
    except LanesError as error:
        _say(str(error))
        return EXIT_UNUSABLE
    except BrokenPipeError:
        # The reader of stdout has ended. The interpreter reports an error unless buffered output can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNUSABLE


async def _watched(job: Callable[[View], Awaitable[Outcome]], view: View) -> int:
    received: list[signal.Signals] = []
    report: Outcome | None = None
    # A library may swallow a single task.cancel(). A scope repeats the cancellation until its end.
    with anyio.CancelScope() as scope:

        def stop(number: signal.Signals) -> None:
            received.append(number)
            if len(received) > 1:
                _say(f"{number.name} again: stopped at once")
                os._exit(EXIT_SIGNAL + number)
            scope.cancel()

        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            report = await job(view)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
    if report is None:
        _say(f"{received[0].name}: stopped; nothing is left running")
        return EXIT_SIGNAL + received[0]
    if sys.stdout.isatty():
        print(report.json(), flush=True)
        view.report(report)
    else:
        view.report(report)
        print(report.json(), flush=True)
    return EXIT_KEPT if report.ok else EXIT_BROKEN


def _say(text: str) -> None:
    print(f"lanes: {text}", file=sys.stderr, flush=True)
