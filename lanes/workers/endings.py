"""The end of a handler that did not simply return: told to history, engine and telemetry, in this order."""

from __future__ import annotations

from collections.abc import Sequence

from lanes.attempts import given_up_before
from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.types import ABANDON, RETURN, Message, Outcome
from lanes.observe.otel import Handling
from lanes.observe.tap import Tap
from lanes.workers.context import Shell
from lanes.workers.outcomes import RESULTS, counts, failure, stopping


class Endings:
    """Shared by all kinds of workers of one consumer."""

    def __init__(self, engine: Engine, shell: Shell, clock: Clock, tap: Tap) -> None:
        self._engine = engine
        self._shell = shell
        self._clock = clock
        self._history = tap.history

    def give_back(self, messages: Sequence[Message]) -> None:
        """The lease of these taken messages has run out: no handler is called, and their partitions are lost."""
        # All of them first, so that none passes for a handler that still runs.
        for message in messages:
            self._engine.finish(message, RETURN, 0.0)
        for message in messages:
            # One that was renewed a moment ago is not lost, and its message is taken again.
            self._shell.overdue(message.partition)

    def give_up(self, message: Message, handling: Handling | None) -> None:
        """The same for one that was said to have started: it ends like any handler of what is lost."""
        self._shell.overdue(message.partition)
        self.finish(message, RETURN, "cancelled", None, handling)

    def failed(self, message: Message, error: BaseException, handling: Handling | None) -> None:
        """The handler raised: a failed attempt, or what is not the handler's to decide."""
        if isinstance(error, Exception) and counts(error):
            self.finish(message, failure(error), "error", error, handling)
            return
        # A cancellation that nobody asked for, KeyboardInterrupt, SystemExit, no memory. Stop in order; the message
        # is not settled and comes again.
        self.finish(message, ABANDON, "error", error, handling)
        self._shell.stop_because(stopping(error, message))

    def finish(
        self,
        message: Message,
        outcome: Outcome,
        result: str,
        error: BaseException | None,
        handling: Handling | None,
    ) -> None:
        """``result``: what the history calls it."""
        now = self._clock()
        if self._history is not None and not given_up_before(message):
            self._history.ended(message, result, now, error)
        self._engine.finish(message, outcome, now)
        if handling is not None:
            told = RESULTS[message.state]
            if told == "abandoned":
                told = "cancelled" if result == "cancelled" else "error" if message.partition.live else "abandoned"
            handling.end(told, error)
