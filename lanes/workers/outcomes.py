"""The conversion of results and exceptions of handlers into outcomes for the engine, the history and the telemetry."""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

import anyio

from lanes.arguments import kind_of
from lanes.attempts import GivenUpBefore, given_up_before
from lanes.core.lane import (
    ABANDONED,
    BLOCKED,
    DEAD_LETTERING,
    DEAD_LETTERING_BLOCKED,
    FINISHED,
    HANDLED,
    HELD,
    PUBLISHING,
)
from lanes.core.types import ABANDON, ACK, RETURN, Failure, LaneId, Message, Outcome, Partition
from lanes.dead_letter import error_text, members_of
from lanes.errors import ConfigError, HandlerHalted, MessageError, Nak, Term
from lanes.handlers import Decode, fill_data
from lanes.observe.otel import Handling, Result
from lanes.workers.context import RunContext

RESULTS: Final[dict[int, Result]] = {
    FINISHED: "ack",
    PUBLISHING: "ack",
    HANDLED: "ack",
    HELD: "retry",
    DEAD_LETTERING: "dead_letter",
    DEAD_LETTERING_BLOCKED: "dead_letter",
    BLOCKED: "error",
    ABANDONED: "abandoned",
}
"""The result in telemetry, by the state of a message after its handler has ended."""


_LIST_WANTED: Final = re.compile("'Message' object is not (iterable|subscriptable)|object of type 'Message' has no len")


_CALLED: Final = "'bytes' object is not callable"

_ATTRIBUTES_CALLED: Final = {
    ".headers(": "message.headers is an attribute, a list of pairs of name and bytes; read it without ()",
    ".key(": "message.key is an attribute; read it without ()",
    ".partition(": "read message.partition.id, with the attributes source and number",
}
"""The remedy for a call of an attribute whose value is not bytes, by the call in the source line."""

_NOT_CALLABLE: Final = re.compile("'(list|tuple|NoneType|Partition)' object is not callable")

_READ_AS_JSON: Final = re.compile(
    "byte indices must be integers or slices, not str|'bytes' object has no attribute '(get|items|keys|values)'"
)
"""Texts of Python's errors after a use of bytes as a JSON object."""

_OF_THE_VALUE: Final = re.compile(r"\b(value|payload|body|data)\b")
"""Words in the source line of such a use; other bytes are not the value of a message."""

_BYTES: Final = (
    "message.value is bytes; pass decode=lambda message: json.loads(message.value) to the consumer, and read "
    "message.data"
)

_MEANT: Final[Mapping[str, str]] = {
    "data": "pass decode=… to the consumer, or read message.value",
    **dict.fromkeys(
        ("ack", "ack_sync", "acknowledge", "commit", "in_progress"),
        "leave the call out, because lanes acknowledges the message after the handler returns",
    ),
    **dict.fromkeys(("nak", "nack", "reject"), "write raise lanes.Nak(…)"),
    "term": "write raise lanes.Term(…)",
    "topic": "read message.subject",
    **dict.fromkeys(("offset", "sequence", "seq"), "read message.position"),
    **dict.fromkeys(("payload", "body"), "read message.value"),
    "json": "pass decode=lambda message: json.loads(message.value) to the consumer, and read message.data",
    "timestamp": "read message.raw, the message of the client",
    "error": "leave the call out, because the handler gets only messages, and lanes handles the errors of the client",
}
"""The remedy by an attribute that messages of the clients have and a ``Message`` has not."""


_NO_PAIRS: Final = re.compile("(list|tuple)'? (indices must be integers or slices, not str|object has no attribute)")
"""Texts of Python's errors after a use of the headers as a dictionary."""

_PAIRS: Final = "message.headers is a list of pairs of name and bytes; read dict(message.headers)"


class OwnershipInDoubt(BaseException):
    """The result for an uncalled handler, because its lease had expired or a freeze made the ownership uncertain."""


def counts(error: BaseException) -> bool:
    """Return whether an exception is a failed attempt. Any other exception stops the consumer after a drain.

    An exception group is a failed attempt if every member is a failed attempt.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(counts(one) for one in error.exceptions)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | ConfigError)


def failure(error: Exception) -> Failure:
    """Return the outcome of a handler that raised an exception for which ``counts`` is True.

    If an exception group contains ``Term`` or ``MessageError``, the consumer gives the message up. An example is the
    group of an ``asyncio.TaskGroup``. Otherwise the longest delay of the ``Nak`` exceptions in the group applies.
    """
    if isinstance(error, GivenUpBefore):
        return Failure(error, terminal=True, dead_lettered=error.blocked)
    members = members_of(error)
    if any(isinstance(one, Term | MessageError) for one in members):
        return Failure(error, terminal=True)
    delays = [one.delay for one in members if isinstance(one, Nak) and one.delay is not None]
    return Failure(error, random.random(), delay=max(delays, default=None))


_Lane = tuple[Partition, LaneId]


def readable(batch: Sequence[Message], decode: Decode | None) -> tuple[list[Message], dict[Message, Outcome]]:
    """Divide a batch into readable messages and the outcomes of the unreadable messages.

    An unreadable message stops its lane.

    Args:
        batch: Messages of one call.
        decode: Function for ``Message.data``; None = no function.

    Returns:
        The readable messages in their order, and the outcome of each other message.
    """
    unreadable: set[_Lane] = set()
    outcomes: dict[Message, Outcome] = {}
    sound = []
    for message in batch:
        lane = (message.partition, message.lane)
        if message.lane is not None and lane in unreadable:
            outcomes[message] = ABANDON  # The engine returns the messages after a failed message to their lane.
            continue
        try:
            if message.broken is not None:
                raise message.broken
            if decode is not None:
                fill_data(message, decode)
        except MessageError as error:
            outcomes[message] = failure(error)
            unreadable.add(lane)
        else:
            sound.append(message)
    return sound, outcomes


def batch_outcomes(batch: Sequence[Message], returned: object) -> list[Outcome]:
    """Return the outcomes of a batch handler that returned. After an invalid result, every message has failed."""
    if returned is None:
        return [ACK] * len(batch)
    fault = kind_of(returned)
    if isinstance(returned, list | tuple):
        wrong = next((index for index, one in enumerate(returned) if not _is_outcome(one)), None)
        if len(returned) == len(batch) and wrong is None:
            return [ACK if one is None else failure(one) for one in returned]
        if len(returned) != len(batch):
            fault = f"{fault} of length {len(returned)}"
        else:
            fault = f"{fault} with {kind_of(returned[cast(int, wrong)])} at index {wrong}"
    nonsense = TypeError(
        f"the batch handler returned {fault}: return None, or a list with None or an exception for each of its "
        f"{len(batch)} messages"
    )
    return [failure(nonsense)] * len(batch)


def _is_outcome(one: object) -> bool:
    return one is None or (isinstance(one, BaseException) and counts(one))


def explain(error: BaseException, *, batch: bool = False) -> None:
    """Add the remedy to the exception of a handler that uses its argument wrongly. Any other exception stays unchanged.

    Args:
        error: The exception.
        batch: Whether the handler receives lists of messages.
    """
    remedy = ""
    if isinstance(error, AttributeError):
        used: object = error.obj
        if isinstance(used, Message):
            remedy = _MEANT.get(error.name or "", "")
        elif batch and isinstance(used, list) and used and isinstance(used[0], Message):
            remedy = "with Settings(batch=…) the handler gets a list of messages; loop over it, or leave batch out"
    elif isinstance(error, TypeError) and _CALLED in error_text(error):
        remedy = "message.value and message.key are attributes; read them without ()"
    elif isinstance(error, TypeError) and _NOT_CALLABLE.search(error_text(error)):
        line = _line_of(error)
        remedy = next((text for call, text in _ATTRIBUTES_CALLED.items() if call in line), "")
    elif isinstance(error, TypeError) and not batch and _LIST_WANTED.search(error_text(error)):
        remedy = "the handler gets one Message, with attributes such as message.value; Settings(batch=…) passes lists"
    if not remedy and isinstance(error, AttributeError | TypeError) and _NO_PAIRS.search(error_text(error)):
        remedy = _PAIRS if "headers" in _line_of(error) else ""
    if not remedy and isinstance(error, AttributeError | TypeError) and _READ_AS_JSON.search(error_text(error)):
        remedy = _BYTES if _OF_THE_VALUE.search(_line_of(error)) else ""
    if remedy and len(error.args) == 1 and remedy not in str(error.args[0]):
        error.args = (f"{error.args[0]}: {remedy}",)


def _line_of(error: BaseException) -> str:
    """Return the source line that raised an exception; "" = unknown."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def cancellation_of(error: BaseException) -> BaseException | None:
    """Return the cancellation in an exception, which a cancelled task must raise again. ``None`` = no cancellation."""
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
        f"({type(error).__qualname__}). Await the tasks that the handler starts, and catch their cancellation"
    )
    halted.__cause__ = error
    return halted


def _acknowledged(_: Message) -> Outcome:
    return ACK


class OutcomeReporter:
    """The reporter of ended handlers for all kinds of workers.

    The reporter passes an outcome to the history, the engine and the telemetry, in this order.

    Args:
        context: The run.

    Attributes:
        succeeded: Function that returns the outcome of a handler that returned, with its outputs.
    """

    def __init__(self, context: RunContext) -> None:
        self._engine = context.engine
        self._context = context
        self._clock = context.clock
        self._history = context.tap.history
        self._outputs = context.outputs
        # Called after every message with outputs, so without a call between.
        self.succeeded = _acknowledged if context.outputs is None else context.outputs.taken

    def give_back(self, messages: Sequence[Message]) -> None:
        """Give back taken messages whose lease has expired, without a call of their handlers.

        The run then loses each partition whose lease is still expired.
        """
        # Every message is returned before the loss, or it would count as a handler that still runs.
        for message in messages:
            self._engine.finish(message, RETURN, 0.0)
        for message in messages:
            # A lease that was renewed meanwhile keeps its partition, and the message is taken again.
            self._context.overdue(message.partition)

    def give_up(self, message: Message, handling: Handling | None) -> None:
        """Give back a message without a call of its handler, because its ownership became uncertain.

        The history already contains its ``started`` row.
        """
        self._context.overdue(message.partition)
        self.finish(message, RETURN, "cancelled", None, handling)

    def failed(self, message: Message, error: BaseException, handling: Handling | None) -> None:
        """Report a handler that raised an exception, which is a failed attempt or stops the consumer."""
        if isinstance(error, Exception) and counts(error):
            explain(error)
            self.finish(message, failure(error), "error", error, handling)
            return
        # After any other exception, such as an unexpected cancellation or a ConfigError, the message stays unsettled.
        # The broker redelivers the message.
        self._context.interrupting(message.partition)
        self.finish(message, ABANDON, "error", error, handling)
        self._context.stop_because(stopping(error, message), message=message)

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
        if self._outputs is not None:
            self._outputs.drop(message)
        self._engine.finish(message, outcome, now)
        if handling is not None:
            told = RESULTS[message.state]
            if told == "abandoned":
                told = "cancelled" if result == "cancelled" else "error" if message.partition.live else "abandoned"
            handling.end(told, error)
