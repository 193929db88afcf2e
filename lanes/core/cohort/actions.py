"""The actions and events of a lease machine, and the results of its actions.

A driver performs one action at a time and returns its result. ``lanes.cohort.keeper`` drives a machine over a
``LeaseStore``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from lanes.core.cohort.ledger import Done


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for an input, or until the time ``until`` (seconds of the clock)."""

    until: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read a key. The result is its ``(value, revision)`` or ``Unknown``."""

    key: str


@dataclass(frozen=True, slots=True)
class Write:
    """Compare and set, as in ``lanes.cohort.leases.LeaseStore``.

    The result is the new revision, ``Refused`` or ``Unknown``.
    It compares the ``revision`` of the key itself, or a ``fence``: another key and the revision that it must have.
    """

    key: str
    value: bytes
    revision: int | None
    ttl: float | None = None
    fence: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class FindConsumers:
    """List the durables, and with ``marked`` the cohort's mark. The result is ``Found`` or ``Unknown``."""

    marked: bool = False


@dataclass(frozen=True, slots=True)
class CreateConsumer:
    """Create a durable that must not exist. The result is None, ``Taken``, ``Overlapping`` or ``Unknown``."""

    epoch: int
    sub: int
    nonce: str
    start: int | None


@dataclass(frozen=True, slots=True)
class DeleteConsumer:
    """Delete a durable. The result is None or ``Unknown``."""

    epoch: int
    sub: int


Action = Wait | Read | Write | FindConsumers | CreateConsumer | DeleteConsumer


class Consumer(NamedTuple):
    """A durable of the partition; see ``lanes.cohort.leases.EpochConsumer``."""

    epoch: int
    sub: int
    nonce: str
    floor: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The durables of the partition in rising order, and the server's clock in milliseconds.

    ``lease`` is the number of seconds in the cohort's mark, if that was asked for and exists.
    """

    consumers: tuple[Consumer, ...]
    server_ms: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """The name is taken by an acquisition with this nonce."""

    nonce: str


class _Answer:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


Refused: Final = _Answer("Refused")
"""The comparison failed; nothing was written."""

Unknown: Final = _Answer("Unknown")
"""No answer came: the action may have happened, may happen later, or never."""

Overlapping: Final = _Answer("Overlapping")
"""Another durable of the partition exists, and the retention allows only one."""


@dataclass(frozen=True, slots=True)
class LeaseOwned:
    """This member owns the partition from now on: pull from the consumer ``(epoch, sub)``.

    ``token`` is the epoch of the acquisition, which handlers get. ``done``: the sequences that must not run again.
    ``again``: this member owned it already (a takeover from itself), so only the consumer is new.
    """

    epoch: int
    sub: int
    token: int
    done: Done
    again: bool


@dataclass(frozen=True, slots=True)
class LeaseRevoked:
    """The plan gives the partition to another member: drain it, then call ``drained``."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The ownership is lost or may be lost: start and send nothing more of the partition."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """A revoked partition is handed over: its ledger is written and its lease is free."""


LeaseEvent = LeaseOwned | LeaseRevoked | LeaseLost | LeaseReleased
