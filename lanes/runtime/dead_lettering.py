"""DeadLetterWriter: the write of a dead letter, repeated for as long as it takes; only its lane waits."""

from __future__ import annotations

import logging
import time
from typing import Final

import anyio

from lanes.core.effects import DeadLetterDue
from lanes.core.engine import Engine
from lanes.core.lane import ABANDONED
from lanes.core.types import NEVER
from lanes.dead_letter import dead_letter, error_text
from lanes.errors import is_retryable
from lanes.observe.tap import Tap
from lanes.source import DeadLetters
from lanes.workers.context import RunContext

log = logging.getLogger("lanes")

DEAD_LETTER_RETRY: Final = (0.2, 30.0)
"""Seconds before a dead letter that was not confirmed is written again: first, and at most."""


class DeadLetterWriter:
    """Writes the dead letters of one consumer. ``confirmed`` counts them."""

    def __init__(
        self,
        engine: Engine,
        target: DeadLetters | None,
        context: RunContext,
        tap: Tap,
        name: str,
    ) -> None:
        self._engine = engine
        self._target = target
        self._context = context
        self._tap = tap
        self._name = name
        self.confirmed = 0

    async def write(self, due: DeadLetterDue) -> None:
        """Write the letter of one message until it is confirmed, or the message is abandoned."""
        assert self._target is not None, "the engine gives up on messages only where dead letters are configured"
        message = due.message
        letter = dead_letter(message, due.failure, time.time())
        log.error(
            "%s: giving up %s position %d after %d attempt(s) with %s: it goes to the dead letters",
            self._name,
            message.partition.id,
            message.position,
            message.attempt,
            letter.error_type,
            exc_info=due.failure.error,
        )
        pause = DEAD_LETTER_RETRY[0]
        partition = message.partition
        while message.state != ABANDONED:
            if partition.deadline != NEVER and self._context.overdue(partition):
                # The next owner has the message, and its letter.
                self._context.after()
                return
            try:
                self._tap.parking(message)
                await self._target.put(letter)
            except Exception as error:
                if not is_retryable(error, unknown=True):
                    # It can never be written: what is not parked is not settled either, so nothing may go on.
                    self._context.stop_because(error)
                    return
                log.warning(
                    "%s: dead letter %s not confirmed (%s: %s), again in %.1f s; its lane waits",
                    self._name,
                    letter.id,
                    type(error).__qualname__,
                    error_text(error),
                    pause,
                )
                await anyio.sleep(pause)
                pause = min(pause * 2, DEAD_LETTER_RETRY[1])
                continue
            self._tap.parked(message, archived=due.follows == "dead_letter_and_block")
            self.confirmed += 1
            self._engine.dead_lettered(message)
            self._context.after()
            return
