"""What the machine of a cohort partition asks for, one thing at a time, and what it is told.

Whoever drives it performs an action and gives back its result; ``lanes.cohort.membership`` does, over a ``LeaseStore``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from lanes.core.cohort.ledger import Done

__all__ = [
    "Action",
    "Consumer",
    "CreateConsumer",
    "DeleteConsumer",
    "FindConsumers",
    "Found",
    "LeaseEvent",
    "LeaseLost",
    "LeaseOwned",
    "LeaseReleased",
    "LeaseRevoked",
    "Overlapping",
    "Read",
    "Refused",
    "Taken",
    "Unknown",
    "Wait",
    "Write",
]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before ``until`` (seconds of the clock; infinity = for ever), or an input comes."""

    until: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read a key; the result is its ``(value, revision)``, or ``Unknown``."""

    key: str


@dataclass(frozen=True, slots=True)
class Write:
    """Compare and set; the result is the new revision, ``Refused`` or ``Unknown``. See
    ``lanes.cohort.leases.LeaseStore``.

    Either with a ``revision``, that of the key itself, or with a ``fence``: another key and the revision it must have.
    """

    key: str
    value: bytes
    revision: int | None
    ttl: float | None = None
    fence: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class FindConsumers:
    """Which durables the partition has; the result is ``Found`` or ``Unknown``. ``marked``: and the cohort's mark."""

    marked: bool = False


@dataclass(frozen=True, slots=True)
class CreateConsumer:
    """Create strictly; the result is None, ``Taken``, ``Overlapping`` or ``Unknown``."""

    epoch: int
    sub: int
    nonce: str
    start: int | None


@dataclass(frozen=True, slots=True)
class DeleteConsumer:
    """Delete; the result is None or ``Unknown``."""

    epoch: int
    sub: int


Action = Wait | Read | Write | FindConsumers | CreateConsumer | DeleteConsumer


class Consumer(NamedTuple):
    """A durable that was found; see ``lanes.cohort.leases.EpochConsumer``."""

    epoch: int
    sub: int
    nonce: str
    floor: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The durables of the partition, rising, and the server's clock in milliseconds. ``lease``: seconds, what the mark
    of the cohort tells, where that was asked for and there is one."""

    consumers: tuple[Consumer, ...]
    server_ms: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """The name is taken, by an acquisition with this nonce."""

    nonce: str


class _Answer:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


Refused: Final = _Answer("Refused")
"""The compare-and-set did not hold; nothing was written."""

Unknown: Final = _Answer("Unknown")
"""No answer: it may have happened, may happen later, or never."""

Overlapping: Final = _Answer("Overlapping")
"""Another durable of the partition is there, and the retention allows one only."""


@dataclass(frozen=True, slots=True)
class LeaseOwned:
    """The partition is this member's from now on: pull from the consumer ``(epoch, sub)``.

    ``token``: the acquisition's epoch, what handlers get. ``done``: what is not to run again. ``again``: it was
    this member's already (a takeover from itself): what is held and runs stays, only the consumer is new.
    """

    epoch: int
    sub: int
    token: int
    done: Done
    again: bool


@dataclass(frozen=True, slots=True)
class LeaseRevoked:
    """The plan gives the partition to somebody else: drain it, then call ``drained``."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The partition is not this member's any more, or cannot be shown to be: nothing of it may start or be sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """What was revoked and drained is handed over: its ledger is written and its lease is free."""


LeaseEvent = LeaseOwned | LeaseRevoked | LeaseLost | LeaseReleased
