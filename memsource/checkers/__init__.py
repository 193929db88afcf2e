"""The promises, each as a checker over a history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from memsource.checkers.commits import NoCommitPastUnfinished
from memsource.checkers.delivery import AtLeastOnce
from memsource.checkers.flow import BoundedInFlight
from memsource.checkers.order import PerKeyOrder
from memsource.checkers.overlap import NoOverlap
from memsource.checkers.settlement import DeadLetterBeforeSettle, NoSettleBeforeEnd
from memsource.checkers.verdict import Checker, Handler, Status, Verdict
from memsource.history import Segment
from memsource.timeline import Timeline

__all__ = [
    "CHECKERS",
    "AtLeastOnce",
    "BoundedInFlight",
    "Checker",
    "DeadLetterBeforeSettle",
    "NoCommitPastUnfinished",
    "NoOverlap",
    "NoSettleBeforeEnd",
    "PerKeyOrder",
    "Status",
    "Verdict",
    "check",
    "feed",
]

CHECKERS: Final[tuple[Callable[[Timeline], Checker], ...]] = (
    PerKeyOrder,
    NoOverlap,
    AtLeastOnce,
    BoundedInFlight,
    DeadLetterBeforeSettle,
    NoSettleBeforeEnd,
    NoCommitPastUnfinished,
)
"""All of them, in the order of a report."""


def check(segments: Sequence[Segment], checkers: Sequence[Callable[[Timeline], Checker]] = CHECKERS) -> list[Verdict]:
    """One verdict of each checker on these segments. Pure; one pass over the rows for all checkers."""
    timeline = Timeline(segments)
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
