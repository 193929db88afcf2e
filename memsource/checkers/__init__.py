"""The promises, each as a checker over a history. ``docs/checkers.md`` maps each invariant to its checker.

Reading order: ``verdict``, ``report``, ``assignments``, ``deadlines``; ``order``, ``overlap``, ``owners``,
``outcomes``, ``delivery``; ``settlement``, ``commits``, ``commit_times``, ``redelivery``, ``repeats``, ``crashes``;
``retries``, ``progress``, ``ahead``, ``flow``, ``pauses``, ``drains``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from memsource.checkers.ahead import MaxAhead, StallNamed
from memsource.checkers.commit_times import CommitsInTime, UnknownCommitRepeated
from memsource.checkers.commits import CommitsRise, NoCommitAfterRevoke, NoCommitPastUnfinished, OneCommitAtATime
from memsource.checkers.crashes import BoundedRepeats
from memsource.checkers.deadlines import MARGIN
from memsource.checkers.delivery import AtLeastOnce
from memsource.checkers.drains import DrainInTime, DrainStartsNothing, DrainWaitsForRunning, HandedOverAfterDrain
from memsource.checkers.flow import BoundedBytes, BoundedInFlight
from memsource.checkers.order import PerKeyOrder
from memsource.checkers.outcomes import DeliveredThenStarted, OneTerminalOutcome, ZombiesDoNotCount
from memsource.checkers.overlap import NoOverlap
from memsource.checkers.owners import ExclusiveOwner, KeptWorkGoesOn
from memsource.checkers.pauses import PauseAtBounds
from memsource.checkers.progress import LaneProgress
from memsource.checkers.redelivery import KeptAlive, RedeliveryNotRun
from memsource.checkers.repeats import NoDuplicateCleanly, OrderAcrossAssignments
from memsource.checkers.retries import AttemptsCount, RetryHoldsLane
from memsource.checkers.settlement import DeadLetterBeforeSettle, NoSettleBeforeEnd
from memsource.checkers.verdict import Checker, Handler, Status, Verdict
from memsource.history.reader import Segment
from memsource.history.timeline import Timeline

__all__ = [
    "CHECKERS",
    "MARGIN",
    "TIMED",
    "AtLeastOnce",
    "AttemptsCount",
    "BoundedBytes",
    "BoundedInFlight",
    "BoundedRepeats",
    "Checker",
    "CommitsInTime",
    "CommitsRise",
    "DeadLetterBeforeSettle",
    "DeliveredThenStarted",
    "DrainInTime",
    "DrainStartsNothing",
    "DrainWaitsForRunning",
    "ExclusiveOwner",
    "HandedOverAfterDrain",
    "KeptAlive",
    "KeptWorkGoesOn",
    "LaneProgress",
    "MakeChecker",
    "MaxAhead",
    "NoCommitAfterRevoke",
    "NoCommitPastUnfinished",
    "NoDuplicateCleanly",
    "NoOverlap",
    "NoSettleBeforeEnd",
    "OneCommitAtATime",
    "OneTerminalOutcome",
    "OrderAcrossAssignments",
    "PauseAtBounds",
    "PerKeyOrder",
    "RedeliveryNotRun",
    "RetryHoldsLane",
    "StallNamed",
    "Status",
    "UnknownCommitRepeated",
    "Verdict",
    "ZombiesDoNotCount",
    "check",
    "checkers_within",
    "feed",
]

MakeChecker = Callable[[Timeline], Checker]
"""Makes the checker of one promise for what a history tells."""

TIMED: Final = (
    CommitsInTime,
    UnknownCommitRepeated,
    KeptAlive,
    DrainInTime,
    DrainWaitsForRunning,
)
"""Those that judge deadlines, and take a ``margin``: seconds by which something may be late."""

CHECKERS: Final[tuple[MakeChecker, ...]] = (
    # Order and exclusion
    PerKeyOrder,
    NoOverlap,
    OrderAcrossAssignments,
    DeliveredThenStarted,
    LaneProgress,
    ExclusiveOwner,
    # Settling
    AtLeastOnce,
    NoSettleBeforeEnd,
    OneTerminalOutcome,
    ZombiesDoNotCount,
    RedeliveryNotRun,
    KeptAlive,
    # Committing
    NoCommitPastUnfinished,
    CommitsRise,
    OneCommitAtATime,
    NoCommitAfterRevoke,
    CommitsInTime,
    UnknownCommitRepeated,
    # Bounds
    BoundedInFlight,
    BoundedBytes,
    MaxAhead,
    StallNamed,
    PauseAtBounds,
    # Failing
    AttemptsCount,
    RetryHoldsLane,
    DeadLetterBeforeSettle,
    # Handing over
    DrainStartsNothing,
    DrainWaitsForRunning,
    DrainInTime,
    HandedOverAfterDrain,
    KeptWorkGoesOn,
    NoDuplicateCleanly,
)
"""All of them, in the order of a report."""


def checkers_within(margin: float) -> tuple[MakeChecker, ...]:
    """All of them, where nothing may be late by more than ``margin`` seconds, 0 or more: for virtual time."""
    return tuple(partial(make, margin=margin) if make in TIMED else make for make in CHECKERS)


def check(
    segments: Sequence[Segment],
    checkers: Sequence[MakeChecker] = CHECKERS,
    *,
    taken: Collection[tuple[str, str, int]] = (),
) -> list[Verdict]:
    """One verdict of each checker on these segments; ``taken``: see ``Timeline``. Pure; one pass over the rows for all
    checkers."""
    timeline = Timeline(segments, taken=taken)
    made = [make(timeline) for make in checkers]
    feed(timeline, made)
    return [checker.verdict() for checker in made]


def feed(timeline: Timeline, checkers: Sequence[Checker]) -> None:
    """Show every row to the checkers that ask for its event."""
    takers: dict[str, list[Handler]] = defaultdict(list)
    for checker in checkers:
        for event, handler in checker.handlers().items():
            takers[event].append(handler)
    for event, segment, row in timeline:
        for handler in takers.get(event, ()):
            handler(segment, row)
