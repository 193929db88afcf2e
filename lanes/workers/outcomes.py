"""The end of a handler: from what it raised or returned to the outcome that engine, history and telemetry get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import anyio

from lanes.attempts import GivenUpBefore, given_up_before
from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.lane import ABANDONED, ARCHIVING, BLOCKED, FINISHED, HELD, PARKING
from lanes.core.types import ABANDON, ACK, RETURN, Failure, Message, Outcome
from lanes.errors import ConfigError, HandlerHalted, MessageError, Nak, Term
from lanes.observe.otel import Handling, Result
from lanes.observe.tap import Tap
from lanes.workers.context import RunContext

RESULTS: Final[dict[int, Result]] = {
    FINISHED: "ack",
    HELD: "retry",
    PARKING: "dead_letter",
    ARCHIVING: "dead_letter",
    BLOCKED: "error",
    ABANDONED: "abandoned",
}
"""The state of a message after its handler ended -> what telemetry calls that."""


class LeaseExpired(BaseException):
    """In place of the exception of a handler that was not called: the lease on its partition has run out."""


def counts(error: BaseException) -> bool:
    """Whether it is a failed attempt; else it is not the handler's to decide, and everything stops in order.

    A group is judged by its worst member.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(counts(one) for one in error.exceptions)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | ConfigError)


def failure(error: Exception) -> Failure:
    """The outcome of a handler that raised what counts."""
    if isinstance(error, GivenUpBefore):
        return Failure(error, terminal=True, archived=error.blocked)
    if isinstance(error, Nak):
        return Failure(error, random.random(), delay=error.delay)
    if isinstance(error, Term | MessageError) or (
        isinstance(error, ExceptionGroup) and error.subgroup((Term, MessageError)) is not None
    ):
        return Failure(error, terminal=True)
    return Failure(error, random.random())


def batch_outcomes(batch: Sequence[Message], returned: object) -> list[Outcome]:
    """The outcomes of a batch handler that returned. One that returned nonsense has failed with all of it."""
    if returned is None:
        return [ACK] * len(batch)
    if isinstance(returned, list | tuple) and len(returned) == len(batch):
        wrong = [one for one in returned if one is not None and not (isinstance(one, BaseException) and counts(one))]
        if not wrong:
            return [ACK if one is None else failure(one) for one in returned]
    nonsense = TypeError(
        f"a batch handler returns None, or for each of its {len(batch)} messages None or the exception it failed "
        f"with; this one returned a {type(returned).__name__}"
    )
    return [failure(nonsense)] * len(batch)


def cancellation_of(error: BaseException) -> BaseException | None:
    """What of an exception has to go on when the task that it came out of was cancelled; None = nothing."""
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        # trio hands the cancellations of a nursery on in a group, together with what else went wrong there.
        return error.split(cancelled)[0]
    return error if isinstance(error, cancelled) else None


def stopping(error: BaseException, message: Message) -> BaseException:
    """What the consumer stops with after a handler raised what does not count."""
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return error
    # Raised as it is, it would pass for a cancellation of the caller's own.
    halted = HandlerHalted(
        f"the handler was cancelled at {message.partition.id} position {message.position}, and not by lanes "
        f"({type(error).__qualname__}): await what it starts, and catch the cancellation of its own tasks"
    )
    halted.__cause__ = error
    return halted


class OutcomeReporter:
    """Shared by all kinds of workers of one consumer."""

    def __init__(self, engine: Engine, context: RunContext, clock: Clock, tap: Tap) -> None:
        self._engine = engine
        self._context = context
        self._clock = clock
        self._history = tap.history

    def give_back(self, messages: Sequence[Message]) -> None:
        """The lease of these taken messages has run out: no handler is called, and their partitions are lost."""
        # All of them first, so that none passes for a handler that still runs.
        for message in messages:
            self._engine.finish(message, RETURN, 0.0)
        for message in messages:
            # One that was renewed a moment ago is not lost, and its message is taken again.
            self._context.overdue(message.partition)

    def give_up(self, message: Message, handling: Handling | None) -> None:
        """The same for one that was said to have started: it ends like any handler of what is lost."""
        self._context.overdue(message.partition)
        self.finish(message, RETURN, "cancelled", None, handling)

    def failed(self, message: Message, error: BaseException, handling: Handling | None) -> None:
        """The handler raised: a failed attempt, or what is not the handler's to decide."""
        if isinstance(error, Exception) and counts(error):
            self.finish(message, failure(error), "error", error, handling)
            return
        # A cancellation that nobody asked for, KeyboardInterrupt, SystemExit, no memory. Stop in order; the message
        # is not settled and comes again.
        self.finish(message, ABANDON, "error", error, handling)
        self._context.stop_because(stopping(error, message))

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
