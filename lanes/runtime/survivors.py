"""Handlers on the event loop that ignore their cancellation and so delay the end of a run."""

from __future__ import annotations

import logging
from typing import Final

import anyio
import anyio.lowlevel

from lanes.core.types import Message
from lanes.observe.cut_off import named
from lanes.workers.context import Workers

log = logging.getLogger("lanes")

_TURNS: Final = 5
"""Turns of the event loop in which most cancelled handlers end."""

_PAUSE: Final = 0.01
"""Seconds between two looks at the handlers after these turns."""

DRAINED_WITHIN: Final = 0.1
"""Seconds that handlers get after a drain, in which they have had ``grace`` already."""


async def survivors(workers: Workers, within: float) -> list[Message]:
    """Wait for the end of the cancelled handlers, and return the messages whose handlers still run.

    Args:
        workers: The workers of the run.
        within: Maximum number of seconds of the wait.

    Returns:
        The messages; empty = all handlers have ended.
    """
    end = anyio.current_time() + within
    turns = 0
    while (left := workers.on_the_loop()) and (turns < _TURNS or anyio.current_time() < end):
        turns += 1
        if turns <= _TURNS:
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.sleep(_PAUSE)
    return left


def report_survivors(name: str, handler: str, messages: list[Message], *, ends_process: bool) -> None:
    """Log the handlers that delay the end of a run.

    Args:
        name: Name of the source.
        handler: Name of the handler.
        messages: The messages whose handlers still run.
        ends_process: Whether the process ends now.
    """
    log.warning(
        "%s: %s ignores its cancellation and still runs for %d message(s), so %s. Let the handler end when it is "
        "cancelled. Positions: %s",
        name,
        handler,
        len(messages),
        "the process ends without it" if ends_process else "the source is closed, and the run ends with the handler",
        named(messages),
    )
