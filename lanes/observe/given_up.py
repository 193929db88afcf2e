"""What is said of a message that is given up without a dead letter: its lane stands still, or everything stops."""

from __future__ import annotations

import logging

from lanes.attempts import error_type
from lanes.core import effects as fx
from lanes.dead_letter import error_text
from lanes.errors import HandlerHalted
from lanes.history.recorder import key_hash

log = logging.getLogger("lanes")


def report_blocked(name: str, effect: fx.Blocked) -> None:
    message, error = effect.message, effect.failure.error
    log.error(
        "%s: blocked: %s position %d, key %s, after %d attempt(s) with %s: its lane stands still until unblock or "
        "park is called for its key",
        name,
        message.partition.id,
        message.position,
        key_hash(message.key),
        message.attempt,
        error_type(error),
        exc_info=error,
    )


def halted(name: str, effect: fx.Halted) -> HandlerHalted:
    """What the run ends with under the poison policy ``exit``."""
    message, error = effect.message, effect.failure.error
    halted = HandlerHalted(
        f"{name}: the handler failed {message.attempt} time(s) at {message.partition.id} position "
        f"{message.position} with {error_type(error)}: {error_text(error)}. The poison policy is "
        '"exit": everything else was drained and this message comes again at the next start. Fix the handler, '
        'or pass dead_letters=… and poison="skip"'
    )
    halted.__cause__ = error
    return halted
