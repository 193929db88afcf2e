"""The sender of the outputs of handlers, which passes them to the publisher of the consumer."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Final, cast

from lanes.core.effects import PublishDue, PublishHeld
from lanes.core.lane import ABANDONED
from lanes.core.types import NEVER, Failure
from lanes.dead_letter import described
from lanes.errors import LanesError, is_retryable
from lanes.loops import Doorbell, ThreadSafeCall, turn_of_loop
from lanes.observe.health import WARNED_EVERY
from lanes.outputs.publisher import Output, Publisher
from lanes.workers.context import RunContext
from lanes.workers.outputs import Outputs

log = logging.getLogger("lanes")

_BATCH: Final = 1_000
"""Maximum number of outputs of one call of the publisher."""


class OutputSender:
    """The sender of one consumer. A message is finished after the publisher has reported all of its outputs.

    The sender sends outputs of one message to one target with one key in sequence. Otherwise a later output could
    overtake an output whose send failed. The sender sends all other outputs together. A repeated send contains only the
    unconfirmed outputs.

    The publisher may report outputs in any thread. A task of the loop applies all reports that have arrived, so that
    many reports wake the loop once.

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
        # The messages whose outputs leave in the next turn. A message of a batch without outputs has only waited for
        # the outputs of an earlier message.
        self._due: list[Outputs] = []
        self._bell = Doorbell()
        self._waits = False
        self._reports: list[tuple[Outputs, Output, Exception | None]] = []
        self._report_bell = Doorbell()
        self._report_wake = ThreadSafeCall(self._report_bell.ring, self._report_bell.ring)
        self._waits_for_reports = False
        self._warn_at = 0.0
        self.confirmed = 0

    def due(self, effect: PublishDue) -> None:
        """Schedule the first send of a message's outputs, or the next send of those that are unconfirmed."""
        outputs = cast(Outputs, effect.produced.outputs)
        outputs.error = None
        if self._tap.history is not None:
            self._tap.publishing(effect.message, outputs.made)
        outputs.next = outputs.heads()
        self._enqueue(outputs)

    def _enqueue(self, outputs: Outputs) -> None:
        self._due.append(outputs)
        if self._waits:
            self._waits = False
            self._bell.ring()

    async def run(self) -> None:
        """Send outputs and apply their reports until cancelled."""
        self._context.start_soon(self._apply_reports)
        turn = turn_of_loop()
        while True:
            if not self._due:
                self._waits = True
                await self._bell.wait(NEVER)
                self._waits = False
            freezes = self._context.freezes
            if freezes is not None and freezes.look(self._clock()):
                # Another process may own the messages, and publish their outputs.
                await freezes.wait()
            if (owned := self._take()) and self._tap.history is not None:
                # The rows are in the file before the outputs leave.
                self._tap.history.flush()
            while owned:
                part = owned
                if len(owned) > _BATCH:
                    pairs = list(owned.items())
                    part, owned = dict(pairs[:_BATCH]), dict(pairs[_BATCH:])
                else:
                    owned = {}
                self._context.start_soon(self._send, part)
            # The outputs of handlers that end in this turn of the loop share the next call.
            await turn()

    def _take(self) -> dict[Output, Outputs]:
        """Remove and return the outputs to send now.

        The sender never sends outputs of a partition that the consumer has given up.
        """
        owned: dict[Output, Outputs] = {}
        due, self._due = self._due, []
        for outputs in due:
            message = outputs.message
            partition = message.partition
            if partition.deadline != NEVER and self._context.overdue(partition):
                self._context.after()
            if message.state == ABANDONED:
                continue
            if not outputs.next:
                self._ended(outputs, self._clock())
                self._context.after()
                continue
            outputs.sending += len(outputs.next)
            for output in outputs.next:
                owned[output] = outputs
            outputs.next = []
        return owned

    async def _send(self, owned: dict[Output, Outputs]) -> None:
        reports = self._reports

        def report(output: Output, error: Exception | None) -> None:
            outputs = owned.pop(output, None)
            if outputs is not None:
                reports.append((outputs, output, error))
                if self._waits_for_reports:
                    self._waits_for_reports = False
                    self._report_wake()

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

    async def _apply_reports(self) -> None:
        """Apply the reports of the publisher until cancelled."""
        reports, bell, turn = self._reports, self._report_bell, turn_of_loop()
        while True:
            # Set before the list is read: a thread that appends after the read rings the bell.
            self._waits_for_reports = True
            if not reports:
                await bell.wait(NEVER)
            self._waits_for_reports = False
            some = reports[:_BATCH]
            del reports[: len(some)]
            self._apply(some)
            # One call for all reports, because the call wakes other components.
            self._context.after()
            await turn()

    def _apply(self, reports: Sequence[tuple[Outputs, Output, Exception | None]]) -> None:
        now = self._clock()
        for outputs, output, error in reports:
            outputs.sending -= 1
            if error is None:
                self.confirmed += 1
                outputs.confirmed += 1
                following = outputs.confirm(output)
                if following is not None and outputs.error is None and outputs.message.state != ABANDONED:
                    outputs.next.append(following)
                    if len(outputs.next) == 1:
                        self._enqueue(outputs)
            elif outputs.error is None or not is_retryable(error, unknown=True):
                outputs.error = error
            if not (outputs.sending or outputs.next) and outputs.message.state != ABANDONED:
                self._ended(outputs, now)

    def _ended(self, outputs: Outputs, now: float) -> None:
        """Report the end of all sends of a message to the engine. The caller must call ``after``."""
        message, tap = outputs.message, self._tap
        confirmed, outputs.confirmed = outputs.confirmed, 0
        if confirmed and tap.telemetry is not None:
            tap.outputs(message, confirmed)
        if outputs.error is None:
            if tap.history is not None:
                tap.published(message)
            self._engine.published(message, now)
        else:
            terminal = not is_retryable(outputs.error, unknown=True)
            tap.publish_failed(message, outputs.error)
            self._engine.publish_failed(message, Failure(outputs.error, random.random(), terminal=terminal), now)

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
