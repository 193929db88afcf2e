"""The tools around a run of ``lanes``: read its history, and check the promises over it."""

from __future__ import annotations

from memsource.checkers import (
    CHECKERS,
    AtLeastOnce,
    BoundedInFlight,
    Checker,
    DeadLetterBeforeSettle,
    NoOverlap,
    NoSettleBeforeEnd,
    PerKeyOrder,
    Verdict,
    check,
)
from memsource.history import Gap, HistoryError, Segment, read, read_bytes
from memsource.report import Checked, Counts, check_files, counts, exit_status, render
from memsource.rows import Row
from memsource.timeline import Timeline

__all__ = [
    "CHECKERS",
    "AtLeastOnce",
    "BoundedInFlight",
    "Checked",
    "Checker",
    "Counts",
    "DeadLetterBeforeSettle",
    "Gap",
    "HistoryError",
    "NoOverlap",
    "NoSettleBeforeEnd",
    "PerKeyOrder",
    "Row",
    "Segment",
    "Timeline",
    "Verdict",
    "check",
    "check_files",
    "counts",
    "exit_status",
    "read",
    "read_bytes",
    "render",
]
