"""Defines the verdicts of an audit, one for each promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AUDITED: Final = (
    "PerKeyOrder",
    "NoOverlap",
    "ExclusiveOwner",
    "AtLeastOnce",
    "NoCommitPastUnfinished",
    "DeadLetterBeforeSettle",
)
"""Checkers of an audit, in the order of its verdicts. ``lanes check`` has these checkers and more."""

WITNESSES: Final = 5
"""Maximum number of violations, and of reasons of a kind, that a verdict names. The findings contain all violations."""

CAUSES: Final = ("held", "settled", "late", "retry", "takeover", "repeat")
"""Causes of repeated messages, see ``Audit.duplicates``."""

AuditStatus = Literal["held", "violated", "unproven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditVerdict:
    """The verdict of an audit on one promise.

    Attributes:
        name: Name of the checker.
        status: ``"held"``, ``"violated"``, or ``"unproven"``: the audit found no violation, but violations are
            possible.
        checked: Number of checks.
        violations: Number of violations.
        witnesses: The first violations.
        reasons: Reasons why more violations are possible.
    """

    name: str
    status: AuditStatus
    checked: int
    violations: int = 0
    witnesses: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
