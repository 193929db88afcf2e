"""Checks of the events of a source. A broken rule of ``lanes.source`` is reported as a bug of the adapter."""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER, Partition
from lanes.errors import ContractError, MessageError
from lanes.source import Delivered

TOKEN_LIMIT: Final = 1 << 63


def check_assigned(name: str, partition: Partition, *, commits: bool) -> None:
    """Check an assignment against the traits of its source.

    Args:
        name: Name of the source.
        partition: The assignment.
        commits: Whether the source commits positions.

    Raises:
        ContractError: The assignment does not fit the source, or records cannot hold its fencing token.
    """
    token = partition.fencing_token
    if token is not None and not 0 <= token < TOKEN_LIMIT:
        raise ContractError(
            f"{name}: {partition.id} was assigned with fencing_token={token}, but histories, dead letters and tables "
            "hold 0 … 2⁶³−1; please report this bug of the source"
        )
    if (partition.floor is not None) != commits:
        raise ContractError(
            f"{name}: {partition.id} was assigned with floor={partition.floor}, but the source settles "
            f"{'by a position' if commits else 'each message individually'}; please report this bug of the source"
        )
    if commits and partition.deadline != NEVER:
        raise ContractError(
            f"{name}: {partition.id} was assigned with deadline={partition.deadline}, but the source settles by a "
            "position, and only a source that settles each message individually may have a lease; please report "
            "this bug of the source"
        )


def check_delivered(name: str, event: Delivered, *, stopping: bool) -> None:
    """Check a run of messages.

    Args:
        name: Name of the source.
        event: The run.
        stopping: Whether the consumer stops. A stopping consumer releases a newly assigned partition, and the
            source may still deliver messages of that partition.

    Raises:
        ContractError: The run belongs to a partition that was never assigned, or its ``broken`` is no ``MessageError``.
    """
    if not event.partition.assignment and not stopping:
        raise ContractError(
            f"{name} delivered messages of {event.partition.id}, which was never assigned; please report this "
            "bug of the source"
        )
    for message in event.run:
        if message.broken is not None and not isinstance(message.broken, MessageError):
            raise ContractError(
                f"{name} delivered {message.partition.id} position {message.position} with "
                f"broken={type(message.broken).__qualname__}; a message that cannot be read must have a MessageError"
            )
