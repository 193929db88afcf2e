"""Verdicts of an audit, one for each promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["AUDITED", "CAUSES", "WITNESSES", "AuditStatus", "AuditVerdict"]

AUDITED: Final = (
    "PerKeyOrder",
    "NoOverlap",
    "ExclusiveOwner",
    "AtLeastOnce",
    "NoCommitPastUnfinished",
    "DeadLetterBeforeSettle",
)
"""The checkers that an audit has, in its order. They are those of ``lanes check``."""

WITNESSES: Final = 5
"""Violations that a verdict names, and reasons of a kind; all violations are among the findings."""

CAUSES: Final = ("held", "settled", "late", "retry", "takeover", "repeat")
"""Why a message came again; see ``audit_settling.duplicates``."""

AuditStatus = Literal["held", "violated", "unproven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """What the audit says of one promise.

    ``violated``: ``violations`` were found, the first of which are in ``witnesses``; ``unproven``: none, but
    ``reasons`` say why there may be some; ``held``: it was kept, ``checked`` times.
    """

    name: str
    status: AuditStatus
    checked: int
    violations: int = 0
    witnesses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
