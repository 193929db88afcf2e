"""The sender of the outputs of handlers, which passes them to the publisher of the consumer."""

from __future__ import annotations

import logging
import random
from typing import Final, cast

import anyio
import anyio.lowlevel

from lanes.core.effects import PublishDue, PublishHeld
from lanes.core.lane import ABANDONED
from lanes.core.types import NEVER, Failure
from lanes.dead_letter import described
from lanes.errors import LanesError, is_retryable
from lanes.loops import Doorbell
from lanes.observe.health import WARNED_EVERY
from lanes.outputs.publisher import Output, Publisher
from lanes.workers.context import RunContext
from lanes.workers.outputs import Outputs

log = logging.getLogger("lanes")

_BATCH: Final = 1_000
"""Maximum number of outputs of one call of the publisher."""


class OutputSender:
    """The sender of one consumer. A message is finished after the publisher has reported all of its outputs.

    Outputs of one message to one target with one key leave one after the other, because a failed send must not let a
    later output overtake. All other outputs leave together. A repeated send has only the unconfirmed outputs.

    Args:
        context: The run.
        publisher: The publisher.

    Attributes:
        confirmed: Number of confirmed outputs.
    """

    def __init__(self, context: RunContext, publisher: Publisher) -> None:
        self._context = context
        self._engine = context.engine
        self._clock = context.clock
        self._tap = context.tap
        self._publisher = publisher
        self._due: list[tuple[Outputs, Output]] = []
        # Messages of batches that have waited for the outputs of an earlier message, and have no outputs themselves.
        self._empty: list[Outputs] = []
        self._bell = Doorbell()
        self._waits = False
        self._warn_at = 0.0
        self.confirmed = 0

    def due(self, effect: PublishDue) -> None:
        """Schedule the first send of a message's outputs, or the next send of those that are unconfirmed."""
        outputs = cast(Outputs, effect.produced.outputs)
        outputs.error = None
        self._tap.publishing(effect.message, outputs.made)
        for chain in outputs.chains.values():
            self._enqueue(outputs, chain[0])
        if not outputs.chains:
            self._empty.append(outputs)
            self._ring()

    def _enqueue(self, outputs: Outputs, output: Output) -> None:
        outputs.sending += 1
        self._due.append((outputs, output))
        self._ring()

    def _ring(self) -> None:
        if self._waits:
            self._waits = False
            self._bell.ring()

    async def run(self) -> None:
        """Send outputs until cancelled."""
        while True:
            if not (self._due or self._empty):
                self._waits = True
                await self._bell.wait(NEVER)
                self._waits = False
            freezes = self._context.freezes
            if freezes is not None and freezes.look(self._clock()):
                # Another process may own the messages, and publish their outputs.
                await freezes.wait()
            empty, self._empty = self._empty, []
            for outputs in empty:
                if self._is_ours(outputs):
                    self._ended(outputs)
            due, self._due = self._due[:_BATCH], self._due[_BATCH:]
            owned = {output: outputs for outputs, output in due if self._is_ours(outputs)}
            if owned:
                if self._tap.history is not None:
                    # The rows are in the file before the outputs leave.
                    self._tap.history.flush()
                self._context.start_soon(self._send, owned)
            # The outputs of handlers that end in this turn of the loop share the next call.
            await anyio.lowlevel.checkpoint()

    def _is_ours(self, outputs: Outputs) -> bool:
        """Return whether the outputs may be sent. The outputs of a partition that was given up never leave."""
        partition = outputs.message.partition
        if partition.deadline != NEVER and self._context.overdue(partition):
            self._context.after()
        return outputs.message.state != ABANDONED

    async def _send(self, owned: dict[Output, Outputs]) -> None:
        def report(output: Output, error: Exception | None) -> None:
            outputs = owned.pop(output, None)
            if outputs is not None:
                self._reported(outputs, output, error)

        outputs = list(owned)
        failure: Exception
        try:
            await self._publisher.publish(outputs, report)
        except Exception as error:
            failure = error
        except BaseException:
            # The run has ended, so no later report counts.
            owned.clear()
            raise
        else:
            failure = LanesError(
                f"{self._publisher!r} has not reported an output; please report this bug of the publisher"
            )
        for output in list(owned):
            report(output, failure)

    def _reported(self, outputs: Outputs, output: Output, error: Exception | None) -> None:
        outputs.sending -= 1
        message = outputs.message
        if error is None:
            self.confirmed += 1
            outputs.confirmed += 1
            chain = outputs.chains[output.target, output.key]
            chain.popleft()
            if not chain:
                del outputs.chains[output.target, output.key]
            elif outputs.error is None and message.state != ABANDONED:
                self._enqueue(outputs, chain[0])
        elif outputs.error is None or not is_retryable(error, unknown=True):
            outputs.error = error
        if not outputs.sending and message.state != ABANDONED:
            self._ended(outputs)

    def _ended(self, outputs: Outputs) -> None:
        """Report the end of all sends of a message to the engine."""
        message, now = outputs.message, self._clock()
        confirmed, outputs.confirmed = outputs.confirmed, 0
        if confirmed:
            self._tap.outputs(message, confirmed)
        if outputs.error is None:
            self._tap.published(message)
            self._engine.published(message, now)
        else:
            terminal = not is_retryable(outputs.error, unknown=True)
            self._tap.publish_failed(message, outputs.error)
            self._engine.publish_failed(message, Failure(outputs.error, random.random(), terminal=terminal), now)
        self._context.after()

    def held(self, effect: PublishHeld) -> None:
        """Log a failed send, at most once in ``WARNED_EVERY`` seconds."""
        now = self._clock()
        if now < self._warn_at:
            return
        self._warn_at = now + WARNED_EVERY
        message = effect.message
        log.warning(
            "%s: the outputs of %s position %d are not confirmed (%s); its lane waits, and the next send is in %.1f s. "
            "%d message(s) wait for their outputs",
            self._context.name,
            message.partition.id,
            message.position,
            described(effect.failure.error),
            effect.delay,
            len(self._engine.publishing.produced),
        )
