"""The outcomes of handlers for engine, history and telemetry, made from the results and exceptions of the handlers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import anyio

from lanes.attempts import GivenUpBefore, given_up_before
from lanes.core.lane import ABANDONED, BLOCKED, DEAD_LETTERING, DEAD_LETTERING_BLOCKED, FINISHED, HELD
from lanes.core.types import ABANDON, ACK, RETURN, Failure, Message, Outcome
from lanes.errors import ConfigError, HandlerHalted, MessageError, Nak, Term
from lanes.observe.otel import Handling, Result
from lanes.workers.context import RunContext

RESULTS: Final[dict[int, Result]] = {
    FINISHED: "ack",
    HELD: "retry",
    DEAD_LETTERING: "dead_letter",
    DEAD_LETTERING_BLOCKED: "dead_letter",
    BLOCKED: "error",
    ABANDONED: "abandoned",
}
"""The result in telemetry, by the state of a message after its handler has ended."""


class LeaseExpired(BaseException):
    """The result of a handler that was not called, because the lease of the message had expired."""


def counts(error: BaseException) -> bool:
    """Return whether an exception is a failed attempt. Any other exception stops the consumer after a drain.

    An exception group is a failed attempt if every member is a failed attempt.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(counts(one) for one in error.exceptions)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | ConfigError)


def failure(error: Exception) -> Failure:
    """Return the outcome of a handler that raised an exception for which ``counts`` is True."""
    if isinstance(error, GivenUpBefore):
        return Failure(error, terminal=True, dead_lettered=error.blocked)
    if isinstance(error, Nak):
        return Failure(error, random.random(), delay=error.delay)
    if isinstance(error, Term | MessageError) or (
        isinstance(error, ExceptionGroup) and error.subgroup((Term, MessageError)) is not None
    ):
        return Failure(error, terminal=True)
    return Failure(error, random.random())


def batch_outcomes(batch: Sequence[Message], returned: object) -> list[Outcome]:
    """Return the outcomes of a batch handler that returned. After an invalid result, every message has failed."""
    if returned is None:
        return [ACK] * len(batch)
    if isinstance(returned, list | tuple) and len(returned) == len(batch):
        wrong = [one for one in returned if one is not None and not (isinstance(one, BaseException) and counts(one))]
        if not wrong:
            return [ACK if one is None else failure(one) for one in returned]
    nonsense = TypeError(
        f"the batch handler returned a {type(returned).__name__}: return None, or a list with None or an exception for "
        f"each of its {len(batch)} messages"
    )
    return [failure(nonsense)] * len(batch)


def cancellation_of(error: BaseException) -> BaseException | None:
    """Return the part of an exception that a cancelled task must raise again. ``None`` = no part."""
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        # trio raises the cancellations of a nursery in a group, together with its other exceptions.
        return error.split(cancelled)[0]
    return error if isinstance(error, cancelled) else None


def stopping(error: BaseException, message: Message) -> BaseException:
    """Return the error of a consumer that stops because a handler raised an exception for which ``counts`` is False."""
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return error
    # Without a wrapper the exception would look like a cancellation by the caller.
    halted = HandlerHalted(
        f"the handler at {message.partition.id} position {message.position} was cancelled, but not by lanes "
        f"({type(error).__qualname__}): await the tasks that it starts, and catch their cancellation"
    )
    halted.__cause__ = error
    return halted


class OutcomeReporter:
    """The reporter of ended handlers, for all kinds of workers, to history, engine and telemetry in this order."""

    def __init__(self, context: RunContext) -> None:
        self._engine = context.engine
        self._context = context
        self._clock = context.clock
        self._history = context.tap.history

    def give_back(self, messages: Sequence[Message]) -> None:
        """Return taken messages whose lease has expired, and call no handler.

        The run then loses each partition whose lease was not renewed meanwhile.
        """
        # Every message is returned before the loss, or it would count as a handler that still runs.
        for message in messages:
            self._engine.finish(message, RETURN, 0.0)
        for message in messages:
            # A lease that was renewed meanwhile keeps its partition, and the message is taken again.
            self._context.overdue(message.partition)

    def give_up(self, message: Message, handling: Handling | None) -> None:
        """Give up a message whose lease expired after its ``started`` row was written. The handler is not called."""
        self._context.overdue(message.partition)
        self.finish(message, RETURN, "cancelled", None, handling)

    def failed(self, message: Message, error: BaseException, handling: Handling | None) -> None:
        """Report a handler that raised an exception, which is a failed attempt or stops the consumer."""
        if isinstance(error, Exception) and counts(error):
            self.finish(message, failure(error), "error", error, handling)
            return
        # After an unexpected cancellation, KeyboardInterrupt, SystemExit or MemoryError the message stays unsettled.
        # The broker redelivers it.
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
        """Report an outcome. ``result`` is the name of the outcome in the history."""
        now = self._clock()
        if self._history is not None and not given_up_before(message):
            self._history.ended(message, result, now, error)
        self._engine.finish(message, outcome, now)
        if handling is not None:
            told = RESULTS[message.state]
            if told == "abandoned":
                told = "cancelled" if result == "cancelled" else "error" if message.partition.live else "abandoned"
            handling.end(told, error)
