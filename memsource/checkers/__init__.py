"""The checkers of histories. Each checker judges by a history whether the run kept one promise.

``docs/checkers.md`` maps each invariant to its checker. The numbers in the docstrings of this package are the numbers
of the invariants in ``docs/checkers.md``.

Reading order: ``verdict``, ``checker``, ``assignments``, ``deadlines``; ``order``, ``overlap``, ``owners``,
``outcomes``; ``settlement``, ``outputs``, ``commits``, ``redelivery``, ``repeats``, ``stranded``, ``slots``;
``retries``, ``progress``, ``bounds``, ``drains``; ``report`` (text and exit status of ``lanes check``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from memsource.checkers.bounds import (
    BoundedBytes,
    BoundedInFlight,
    MaxAhead,
    PartitionBudgets,
    PauseAtBounds,
    StallNamed,
)
from memsource.checkers.checker import Checker, Handler
from memsource.checkers.commits import (
    CommitsInTime,
    CommitsRise,
    NoCommitAfterRevoke,
    NoCommitPastUnfinished,
    OneCommitAtATime,
    UnknownCommitRepeated,
)
from memsource.checkers.deadlines import MARGIN
from memsource.checkers.drains import DrainInTime, DrainStartsNothing, DrainWaitsForRunning, HandedOverAfterDrain
from memsource.checkers.order import PerKeyOrder
from memsource.checkers.outcomes import DeliveredThenStarted, OneTerminalOutcome, ZombiesDoNotCount
from memsource.checkers.outputs import OutputOrder, OutputsAtLeastOnce
from memsource.checkers.overlap import NoOverlap
from memsource.checkers.owners import ExclusiveOwner, KeptWorkGoesOn
from memsource.checkers.progress import LaneProgress, PartitionTurns
from memsource.checkers.redelivery import KeptAlive, RedeliveryNotRun
from memsource.checkers.repeats import BoundedRepeats, NoDuplicateCleanly, OrderAcrossAssignments
from memsource.checkers.retries import AttemptsCount, RetryHoldsLane
from memsource.checkers.settlement import AtLeastOnce, DeadLetterBeforeSettle, NoSettleBeforeEnd
from memsource.checkers.slots import DrainBeforeFeed, ExclusiveSlot, SlotOwner, UnownedNeverFed
from memsource.checkers.stranded import NothingStranded
from memsource.checkers.verdict import Status, Verdict
from memsource.history.outputs import VisibleOutput
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
    "DrainBeforeFeed",
    "DrainInTime",
    "DrainStartsNothing",
    "DrainWaitsForRunning",
    "ExclusiveOwner",
    "ExclusiveSlot",
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
    "NothingStranded",
    "OneCommitAtATime",
    "OneTerminalOutcome",
    "OrderAcrossAssignments",
    "OutputOrder",
    "OutputsAtLeastOnce",
    "PartitionBudgets",
    "PartitionTurns",
    "PauseAtBounds",
    "PerKeyOrder",
    "RedeliveryNotRun",
    "RetryHoldsLane",
    "SlotOwner",
    "StallNamed",
    "Status",
    "UnknownCommitRepeated",
    "UnownedNeverFed",
    "Verdict",
    "ZombiesDoNotCount",
    "check",
    "checkers_within",
    "feed",
]

MakeChecker = Callable[[Timeline], Checker]
"""A function that makes the checker of one promise for a timeline."""

TIMED: Final = (
    CommitsInTime,
    UnknownCommitRepeated,
    KeptAlive,
    DrainInTime,
    DrainWaitsForRunning,
)
"""The checkers that judge deadlines. Their argument ``margin`` is the seconds by which an action may be late."""

CHECKERS: Final[tuple[MakeChecker, ...]] = (
    # Order and exclusion
    PerKeyOrder,
    NoOverlap,
    OrderAcrossAssignments,
    DeliveredThenStarted,
    LaneProgress,
    PartitionTurns,
    ExclusiveOwner,
    # Settling
    AtLeastOnce,
    NoSettleBeforeEnd,
    OneTerminalOutcome,
    ZombiesDoNotCount,
    RedeliveryNotRun,
    KeptAlive,
    # Publishing
    OutputsAtLeastOnce,
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
    PartitionBudgets,
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
    # Ranges
    ExclusiveSlot,
    DrainBeforeFeed,
)
"""All checkers, in the order of a report."""


def checkers_within(margin: float) -> tuple[MakeChecker, ...]:
    """Return a maker for each checker, and give the checkers of deadlines a margin.

    A small margin is enough in virtual time.

    Args:
        margin: Seconds by which an action may be late, 0 or more.

    Returns:
        The makers of the checkers, in the order of ``CHECKERS``.
    """
    return tuple(partial(make, margin=margin) if make in TIMED else make for make in CHECKERS)


def check(
    segments: Sequence[Segment],
    checkers: Sequence[MakeChecker] = CHECKERS,
    *,
    taken: Collection[tuple[str, str, int]] = (),
    outputs: Sequence[VisibleOutput] | None = None,
) -> list[Verdict]:
    """Judge a history with these checkers, in one pass over its rows. Pure.

    Args:
        segments: Segments of the history, in any order.
        checkers: Makers of the checkers to run; all by default.
        taken: Assignments that the broker took away, as (member, partition, number). See ``Timeline``.
        outputs: Outputs that the broker shows to readers. ``None`` = the visible outputs are unknown.

    Returns:
        One verdict for each checker, in the order of ``checkers``.
    """
    timeline = Timeline(segments, taken=taken, outputs=outputs)
    made = [make(timeline) for make in checkers]
    feed(timeline, made)
    return [checker.verdict() for checker in made]


def feed(timeline: Timeline, checkers: Sequence[Checker]) -> None:
    """Pass each row to the checkers that ask for its event.

    Args:
        timeline: Rows of the history, in order.
        checkers: Checkers that have seen no row yet.
    """
    takers: dict[str, list[Handler]] = defaultdict(list)
    for checker in checkers:
        for event, handler in checker.handlers().items():
            takers[event].append(handler)
    for event, segment, row in timeline:
        for handler in takers.get(event, ()):
            handler(segment, row)
