"""The writer of dead letters. The writer repeats an unconfirmed write, and only the lane of the message waits."""

from __future__ import annotations

import logging
import time
from typing import Final

import anyio

from lanes.core.effects import DeadLetterDue
from lanes.core.lane import ABANDONED, FINISHED, SETTLED
from lanes.core.types import NEVER, Message
from lanes.dead_letter import dead_letter, error_text, printable
from lanes.errors import is_retryable
from lanes.observe.failures import FailedAttempts
from lanes.queues.registered import queue_partitions
from lanes.source import DeadLetters, SourceTraits
from lanes.workers.context import RunContext

log = logging.getLogger("lanes")

DEAD_LETTER_RETRY: Final = (0.2, 30.0)
"""Seconds before the next write of an unconfirmed dead letter: the first time, and the maximum."""

_UNNAMED: Final = "other"
"""The ``system`` of a source that does not say the kind of its broker."""


class DeadLetterWriter:
    """The writer of the dead letters of one consumer.

    Within one assignment, the consumer never repeats the write of a confirmed dead letter. ``confirmed`` is the number
    of confirmed dead letters. ``failures`` logs the messages that the consumer gives up. ``traits`` are the properties
    of the open source.
    """

    def __init__(
        self,
        context: RunContext,
        target: DeadLetters | None,
        failures: FailedAttempts,
        traits: SourceTraits,
    ) -> None:
        self._engine = context.engine
        self._target = target
        self._failures = failures
        self._context = context
        self._tap = context.tap
        self._name = context.name
        self._queue_partitions = queue_partitions(traits.queues)
        self._system = "" if traits.system == _UNNAMED else traits.system
        self._written: set[Message] = set()  # unfinished messages with a confirmed dead letter
        self.confirmed = 0

    async def write(self, due: DeadLetterDue) -> None:
        """Repeat the write of a dead letter until the broker confirms it.

        The call ends early if the engine abandons the message, the lease of its partition expires, or a write fails
        with a permanent error.
        """
        assert self._target is not None, "the engine gives up on messages only where dead letters are configured"
        message = due.message
        self._written = {each for each in self._written if each.state not in (ABANDONED, FINISHED, SETTLED)}
        if message in self._written:
            self._confirm(due, again=True)
            return
        place = self._queue_partitions.get(message.partition.id.source)
        record = dead_letter(message, due.failure, time.time(), place, self._system)
        self._failures.given_up(message, due.failure.error, self._context.clock())
        # The timer logs the number of counted messages.
        self._context.look_for_due()
        pause = DEAD_LETTER_RETRY[0]
        partition = message.partition
        while message.state != ABANDONED:
            if partition.deadline != NEVER and self._context.overdue(partition):
                # The next owner writes the dead letter.
                self._context.after()
                return
            freezes = self._context.freezes
            if freezes is not None and freezes.look(self._context.clock()):
                # Another process may own the message, and write its dead letter.
                await freezes.wait()
                continue
            try:
                self._tap.parking(message)
                await self._target.put(record)
            except Exception as error:
                if not is_retryable(error, unknown=True):
                    # The dead letter can never be written, and without it the message must not be settled.
                    self._context.stop_because(error)
                    return
                log.warning(
                    "%s: dead letter %s is not confirmed (%s, %s); its lane waits, and the next write is in %.1f s",
                    self._name,
                    record.id,
                    type(error).__qualname__,
                    printable(error_text(error)),
                    pause,
                )
                await anyio.sleep(pause)
                pause = min(pause * 2, DEAD_LETTER_RETRY[1])
                continue
            self._confirm(due, again=False)
            return

    def _confirm(self, due: DeadLetterDue, *, again: bool) -> None:
        """Continue or block the lane of a message. ``again``: this assignment has already written the dead letter."""
        blocks = due.follows == "dead_letter_and_block"
        if blocks:
            self._written.add(due.message)
        self.confirmed += not again
        self._tap.parked(due.message, archived=blocks, again=again)
        self._engine.dead_lettered(due.message)
        self._context.after()
