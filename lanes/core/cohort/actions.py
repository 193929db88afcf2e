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
    """Wait for an input, or until the clock shows ``until`` seconds."""

    until: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read a key of the lease store. The result is the key's ``(value, revision)`` or ``Unknown``."""

    key: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write a key of the lease store by compare-and-set, as in ``lanes.cohort.leases.LeaseStore``.

    The result is the new revision, ``Refused`` or ``Unknown``.

    Attributes:
        key: The key.
        value: The new value.
        revision: Revision that the key must have, 0 = no entry. ``None`` = the write has a fence instead.
        ttl: Seconds until the entry expires. ``None`` = never.
        fence: Another key and its required revision.
    """

    key: str
    value: bytes
    revision: int | None
    ttl: float | None = None
    fence: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class FindConsumers:
    """List the durables of the partition. The result is ``Found`` or ``Unknown``.

    Attributes:
        marked: Whether to read also the cohort's mark; see ``lanes.cohort.leases.EpochConsumers.mark``.
    """

    marked: bool = False


@dataclass(frozen=True, slots=True)
class CreateConsumer:
    """Create a durable that must not exist. The result is ``None``, ``Taken``, ``Overlapping`` or ``Unknown``."""

    epoch: int
    sub: int
    nonce: str
    start: int | None


@dataclass(frozen=True, slots=True)
class DeleteConsumer:
    """Delete a durable. The result is ``None`` or ``Unknown``."""

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
    """The durables of the partition, as listed by the server.

    Attributes:
        consumers: The durables, sorted by epoch and sub-number.
        server_ms: The server's clock in milliseconds.
        lease: Seconds of the lease in the cohort's mark. 0 = the mark is missing, or was not requested.
    """

    consumers: tuple[Consumer, ...]
    server_ms: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """Another acquisition, with this nonce, has created a durable of the same name."""

    nonce: str


class _Answer:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


Refused: Final = _Answer("Refused")
"""The comparison failed, and the write changed nothing."""

Unknown: Final = _Answer("Unknown")
"""No answer arrived. The server may have performed the action, or may perform it later or never."""

Overlapping: Final = _Answer("Overlapping")
"""Another durable of the partition exists, and the retention allows only one durable."""


@dataclass(frozen=True, slots=True)
class LeaseOwned:
    """This member has acquired the partition. Pull from the consumer ``(epoch, sub)``.

    Attributes:
        epoch: Epoch of the consumer.
        sub: Sub-number of the consumer.
        token: Epoch of the acquisition, which handlers receive as fencing token.
        done: The sequences that must not run again.
        again: Whether this member already owned the partition. If so, only the consumer is new.
    """

    epoch: int
    sub: int
    token: int
    done: Done
    again: bool


@dataclass(frozen=True, slots=True)
class LeaseRevoked:
    """The plan moves the partition to another member, or this member stops.

    The driver drains the partition, and then calls ``drained``.
    """


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The member has lost the ownership, or may have lost it.

    Start no handler and send no request for the partition.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """The member has stored the ledger of a revoked partition, and has released its lease."""


LeaseEvent = LeaseOwned | LeaseRevoked | LeaseLost | LeaseReleased
