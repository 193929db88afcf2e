"""The tools around a run of ``lanes``: a broker in memory to run it on, its history read back, its promises checked.

The suite that every source passes is in ``memsource.contract``.
"""

from __future__ import annotations

from memsource.broker import MemoryBroker
from memsource.checkers import (
    CHECKERS,
    AtLeastOnce,
    BoundedInFlight,
    Checker,
    DeadLetterBeforeSettle,
    NoCommitPastUnfinished,
    NoOverlap,
    NoSettleBeforeEnd,
    PerKeyOrder,
    Verdict,
    check,
)
from memsource.group import Group
from memsource.group_source import GroupSource
from memsource.history import Gap, HistoryError, Segment, read, read_bytes
from memsource.report import Checked, Counts, check_files, counts, exit_status, render
from memsource.rows import Row
from memsource.source import MemoryDeadLetters, MemorySource
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
    "Group",
    "GroupSource",
    "HistoryError",
    "MemoryBroker",
    "MemoryDeadLetters",
    "MemorySource",
    "NoCommitPastUnfinished",
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
