"""Async handlers that continue after a cancellation by ``timeout``: repeated cancellations, and a log line.

asyncio and trio cancel such a handler again at every await while its scope is cancelled. A handler that catches its
cancellation in a loop would then use a whole processor. Each handler therefore runs in a second scope within the
cancelled scope. After ``BURST`` cancellations, the shield of this scope admits one cancellation every ``AGAIN``
seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from lanes.core.types import Message
from lanes.dead_letter import printable
from lanes.handlers import handler_name

log = logging.getLogger("lanes")

PATIENCE: Final = 5.0
"""Seconds after its cancellation in which a handler may clean up without a log line."""

BURST: Final = 0.1
"""Seconds after its cancellation in which anyio cancels a handler at every await."""

AGAIN: Final = 0.1
"""Seconds between two later cancellations of a handler that continues."""


def cancel_once(gate: anyio.CancelScope) -> None:
    """Deliver one cancellation into a scope whose parent is cancelled, and shield the scope from further cancellations.

    Args:
        gate: The scope in which the handler runs. The call takes effect at the next await of the handler.
    """
    gate.shield = False
    gate.shield = True


def report_ignored(handler: Callable[..., object], message: Message, age: float, timeout: float) -> None:
    """Report a cancelled handler that has not ended.

    Args:
        handler: The function.
        message: The message of the call, or the first message of its batch.
        age: Seconds since the cancellation.
        timeout: The setting that has cancelled the call, in seconds.
    """
    log.warning(
        "%s position %d attempt %d: the handler %s has not ended %.1f s after its cancellation by timeout=%g s. The "
        "handler keeps its lane until it ends, and is cancelled again every %g s. If the handler catches "
        "CancelledError or BaseException, raise the exception again",
        message.partition.id,
        message.position,
        message.attempt,
        printable(handler_name(handler)),
        age,
        timeout,
        AGAIN,
    )
