"""The health of a consumer, and the log lines about partitions that make no progress.

``examine`` makes the ``Health`` that a user asks for. ``Unsettled`` records when the settlements of a partition began
to fail. ``Stalls`` records when ``max_ahead`` stopped a partition. All times are seconds of the engine's clock. No
function or method blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from lanes.attempts import error_type
from lanes.core import effects as fx
from lanes.core.commits import Committer
from lanes.core.engine import Engine
from lanes.core.lane import BLOCKED, DEAD_LETTERING, DEAD_LETTERING_BLOCKED, FINISHED, HELD
from lanes.core.types import NEVER, Message, Partition
from lanes.dead_letter import error_text, printable, reason_line
from lanes.errors import HandlerHalted, MessageError
from lanes.history.writer import key_hash
from lanes.observe.failures import shown, traceback_of
from lanes.observe.intake import IntakeWatch
from lanes.source import Outage

log = logging.getLogger("lanes")

WARNED_AFTER: Final = 1.0
"""Seconds of failing settlements before a warning, because a rebalance may refuse a single settlement."""

WARNED_EVERY: Final = 30.0
"""Seconds between two warnings about the settlements of one partition."""

STALLED_AFTER: Final = 1.0
"""Seconds for which ``max_ahead`` stops a partition, without a confirmation by the broker, before a warning."""

OUTAGE_AFTER: Final = 30.0
"""Seconds without an answer of a broker after which the consumer is unhealthy. A client reconnects within seconds."""

_NAMED_LIMIT: Final = 5
"""Maximum number of partitions in one log line."""

_ERROR_LIMIT: Final = 500
"""Maximum number of characters of an error of the client."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The health of a consumer at one time. A ``Health`` is true when the consumer is healthy.

    Attributes:
        reasons: Reasons why the consumer is unhealthy, one line each; empty = the consumer is healthy. A reason names a
            key by its hash, and contains no part of a payload.
        no_broker: Whether no broker currently answers, even if the outage is shorter than 30 s. An outage may cause the
            other reasons. A restart of the process does not end the outage. False for a source that cannot detect an
            outage.
        rejoining: Whether the consumer waits for the group's first answer after it joined, or after an outage in which
            it lost its partitions. A waiting consumer is healthy, and handles no message. A restart of the process does
            not shorten the wait. An answer of the group may assign no partition. False for a source that cannot detect
            the wait.
        findings: Findings of the source that need an operator, one line each, such as messages that no consumer of the
            group reads. A finding does not make the consumer unhealthy, because a restart of the process does not
            remove it.
    """

    reasons: Sequence[str]
    no_broker: bool = False
    rejoining: bool = False
    findings: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether the consumer is healthy."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok


def examine(
    engine: Engine,
    now: float,
    *,
    unhealthy_after: float,
    stuck: Sequence[Message],
    unknown: Mapping[Partition, float],
    unsettled: Mapping[Partition, FailingSettlements],
    intake: IntakeWatch | None = None,
    outage: Outage | None = None,
    rejoining: bool = False,
    findings: Sequence[str] = (),
) -> Health:
    """Return the health at ``now``. The call takes time in proportion to the number of messages in flight.

    Args:
        engine: The engine of the consumer.
        now: Time of the engine's clock, in seconds.
        unhealthy_after: Seconds after which an unfinished message, a failing settlement or a request is too old.
        stuck: Messages whose handlers have run in threads for ``Settings.timeout`` or longer.
        unknown: Partitions that wait for the store of attempts, with the time of each request, in seconds.
        unsettled: Partitions whose settlements fail, with the failure of each.
        intake: The check for missing deliveries; None = the source does not report a backlog.
        outage: The current outage; None = a broker answers, or the source cannot detect an outage.
        rejoining: Whether the source waits for its group, at the start or after an outage.
        findings: Findings of the source that a restart does not remove.

    Returns:
        The health.
    """
    reasons = []
    if outage is not None and outage.seconds > min(unhealthy_after, OUTAGE_AFTER):
        # The outage is the first reason, because it may cause the others.
        why = printable(outage.error[:_ERROR_LIMIT]) or "the client reports no error"
        reasons.append(f"no broker answers for {outage.seconds:.1f} s: {why}")
    oldest = engine.oldest()
    if oldest is not None and now - oldest.received > unhealthy_after:
        reasons.append(
            f"the oldest unfinished message is too old: {_named(oldest, now)}{_awaiting(engine, oldest, now)}"
        )
    late = [partition for partition, since in unknown.items() if now - since > unhealthy_after]
    if late:
        first = min(late, key=lambda partition: unknown[partition])
        waiting = f"{first.id}, for {now - unknown[first]:.1f} s"
        reasons.append(f"{len(late)} partition(s) wait for the store of their attempts, the first: {waiting}")
    for partition, failing in unsettled.items():
        if now - failing.since > unhealthy_after or partition in engine.committer.ahead:
            lasted = f"{now - failing.since:.1f} s"
            reasons.append(f"finished messages of {partition.id} are not settled for {lasted}: {failing.error}")
    for state, what in ((BLOCKED, "blocked"), (DEAD_LETTERING, "parking"), (DEAD_LETTERING_BLOCKED, "parking")):
        heads = [lane.head for lane in engine.stopped_lanes() if lane.head.state == state]
        if heads:
            reasons.append(
                f"{len(heads)} lane(s) {what}, the first: {_named(min(heads, key=lambda head: head.received), now)}"
            )
    if stuck and len(stuck) >= engine.concurrency:
        reasons.append(f"all {len(stuck)} thread(s) are stuck, the first: {_named(stuck[0], now)}")
    for partition in engine.committer.ahead:
        first_unfinished = partition.ledger.oldest()
        at = "" if first_unfinished is None else f", held by {_named(first_unfinished, now)}"
        reasons.append(f"{partition.id} has reached max_ahead={engine.policy.max_ahead}{at}")
    if intake is not None:
        reasons += intake.reasons()
    return Health(reasons=tuple(reasons), no_broker=outage is not None, rejoining=rejoining, findings=tuple(findings))


@dataclass(slots=True)
class FailingSettlements:
    """The failing settlements of one partition.

    Attributes:
        since: Time of the first failure, in seconds.
        warn_at: Time of the next log line, in seconds.
        error: Text of the last error.
    """

    since: float
    warn_at: float
    error: str = ""


class Unsettled:
    """The ``partitions`` whose settlements fail, in the consumer called ``name``.

    The object logs the first failure as information, and after a second of failures a warning every 30 s.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.partitions: dict[Partition, FailingSettlements] = {}

    def failed(self, partitions: Iterable[Partition], error: Exception, now: float) -> None:
        """Record that a settlement of these partitions failed. The runtime repeats the settlement."""
        due: list[Partition] = []
        for partition in partitions:
            failing = self.partitions.setdefault(partition, FailingSettlements(now, now))
            failing.error = printable(error_text(error))
            if now >= failing.warn_at:
                due.append(partition)
                first_warning = failing.since + WARNED_AFTER
                failing.warn_at = first_warning if now < first_warning else now + WARNED_EVERY
        if not due:
            return
        lasted = now - min(self.partitions[partition].since for partition in due)
        log.log(
            logging.WARNING if lasted >= WARNED_AFTER else logging.INFO,
            "%s: finished messages of %s are not settled%s (%s); retrying",
            self._name,
            _names(due),
            f" for {lasted:.1f} s" if lasted else "",
            printable(error_text(error)),
        )

    def settled(self, partition: Partition) -> None:
        """Record that a settlement of the partition succeeded, or that the runtime no longer repeats the settlement.

        Idempotent.
        """
        self.partitions.pop(partition, None)

    def error(self, partition: Partition) -> str:
        """Return the last error of the partition's settlements; "" = no settlement fails."""
        failing = self.partitions.get(partition)
        return "" if failing is None else failing.error


class Stall(NamedTuple):
    """A partition that ``max_ahead`` stops.

    Attributes:
        partition: The partition.
        floor: Position below which every message is finished.
        oldest: Unfinished message that stops the partition; None = the partition waits until the broker confirms
            ``floor``.
    """

    partition: Partition
    floor: int
    oldest: Message | None


class _Awaited(NamedTuple):
    """The event that ends a stall: a confirmation by the ``broker``, or a finished message above ``confirmed``."""

    confirmed: int
    broker: bool


class Stalls:
    """The partitions of one ``committer`` that ``max_ahead`` stops. The log reports a stall longer than a second once.

    If handlers are fast and commits are slow, ``max_ahead`` stops a partition many times a second. The log therefore
    omits shorter stalls.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        # The event that ends each stall, and the time of the report; NEVER = the stall is reported.
        self._waits: dict[Partition, tuple[_Awaited, float]] = {}

    def __repr__(self) -> str:
        return f"<Stalls {len(self._waits)} partitions at max_ahead>"

    def reached(self, partition: Partition, now: float) -> None:
        """Record that ``max_ahead`` has stopped the partition."""
        self._forget()
        self._waits[partition] = self._awaited(partition), now + STALLED_AFTER

    def moved(self, now: float) -> bool:
        """Record that a message finished, or that the broker confirmed a position.

        The call takes almost no time when no partition stalls. Return whether ``next_at`` changed, because a stall now
        waits for another event.
        """
        if not self._waits:
            return False
        self._forget()
        moved = [partition for partition, (before, _) in self._waits.items() if self._awaited(partition) != before]
        for partition in moved:
            self._waits[partition] = self._awaited(partition), now + STALLED_AFTER
        return bool(moved)

    def due(self, now: float) -> list[Stall]:
        """Return the stalls to report now."""
        self._forget()
        stalls = []
        for partition in [partition for partition, (_, at) in self._waits.items() if at <= now]:
            awaited, ledger = self._awaited(partition), self._committer.partitions[partition]
            held = ledger.in_flight()
            oldest = None if awaited.broker else held[0] if held else None
            given_up = not awaited.broker and (oldest is None or oldest.position != ledger.floor())
            if given_up or (oldest is not None and oldest.state == FINISHED):
                # The ledger learns of the finished message in a moment, and then the floor moves. A message of a part
                # that was given up stops the partition until the part is handed over.
                self._waits[partition] = awaited, now + STALLED_AFTER
                continue
            self._waits[partition] = awaited, NEVER
            stalls.append(Stall(partition, ledger.floor(), oldest))
        return stalls

    def next_at(self) -> float:
        """Return the time of the next report; ``NEVER`` = no report is planned."""
        return min((at for _, at in self._waits.values()), default=NEVER)

    def _awaited(self, partition: Partition) -> _Awaited:
        commits = partition.commits
        assert commits is not None, "only a partition whose source commits has a bound above the committed position"
        return _Awaited(commits.confirmed, self._committer.partitions[partition].floor() > commits.confirmed)

    def _forget(self) -> None:
        # A draining partition takes no messages, so its stall does not matter.
        for partition in [each for each in self._waits if each not in self._committer.ahead or not each.steady]:
            del self._waits[partition]


def report_stall(stall: Stall, name: str, max_ahead: int, now: float, error: str) -> None:
    """Log why ``max_ahead`` stops a partition of the source ``name``.

    ``error`` is the last error of the partition's commits, or "" when the commits do not fail.
    """
    oldest = stall.oldest
    if oldest is None:
        why = f"commits fail: {error}" if error else "a commit has no answer"
        until = f"the broker has confirmed position {stall.floor} ({why})"
    else:
        until = (
            f"position {oldest.position} is finished (key {key_hash(oldest.key)}, attempt {oldest.attempt}, "
            f"{now - oldest.received:.1f} s old)"
        )
    log.warning(
        "%s: %s has reached max_ahead=%d and takes no more messages until %s",
        name,
        stall.partition.id,
        max_ahead,
        until,
    )


def report_blocked(name: str, effect: fx.Blocked) -> None:
    """Log that a message of the consumer called ``name`` blocks its lane."""
    message, error = effect.message, effect.failure.error
    log.error(
        "%s: %s position %d, key %s, is blocked after %d attempt(s) with %s; its lane waits until unblock or park is "
        "called for its key",
        name,
        message.partition.id,
        message.position,
        key_hash(message.key),
        message.attempt,
        shown(error),
        exc_info=traceback_of(error),
    )


@runtime_checkable
class SettledReader(Protocol):
    """An optional method of a ``Reader`` that returns whether the handler has settled a message itself."""

    def settled(self, raw: object) -> bool:
        """Return whether a method of the client's message has settled the message.

        The call does not block, and changes nothing.

        Args:
            raw: The message as the client library delivered it.

        Returns:
            Whether the message is settled.
        """


def halted(name: str, effect: fx.Halted) -> HandlerHalted:
    """Make the error that ends a run under the poison policy ``exit``."""
    message, error = effect.message, effect.failure.error
    place, text = f"{message.partition.id} position {message.position}", printable(error_text(error))
    if isinstance(error, MessageError) and (error.unread or error is message.broken):
        cause = error.__cause__
        why = "" if cause is None else f" ({reason_line(error_type(cause), error_text(cause))})"
        what = f"{text}{why}. The handler was not called at {place}"
        remedy = "To go on without unreadable messages,"
    else:
        what = f"the handler failed {message.attempt} time(s) at {place} with {error_type(error)}"
        what += f": {text}" if text else ""
        remedy = "Fix the handler, or"
    again = "the next start delivers this message again"
    reader = message.partition.reader
    if isinstance(reader, SettledReader) and reader.settled(message.raw):
        again = "the handler settled this message itself, by message.raw, so the next start may not deliver it again"
    halted = HandlerHalted(
        f'{name}: {what}. The poison policy is "exit", so everything else was drained and {again}. {remedy} pass '
        'dead_letters=… and leave out poison="exit"'
    )
    halted.place = place
    halted.__cause__ = error
    return halted


def _names(partitions: list[Partition]) -> str:
    more = len(partitions) - _NAMED_LIMIT
    names = ", ".join(str(partition.id) for partition in partitions[:_NAMED_LIMIT])
    return f"{names} and {more} more" if more > 0 else names


def _awaiting(engine: Engine, message: Message, now: float) -> str:
    stopped = engine.stopped.by_head.get(message)
    if stopped is None or message.state != HELD:
        return ""
    return f"; it waits for its next attempt, in {max(0.0, stopped.until - now):.1f} s"


def _named(message: Message, now: float) -> str:
    return (
        f"{message.partition.id} position {message.position}, key {key_hash(message.key)}, attempt {message.attempt}, "
        f"{now - message.received:.1f} s old"
    )
