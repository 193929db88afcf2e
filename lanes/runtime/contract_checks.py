"""Checks of the events of a source: a broken rule of ``lanes.source`` is reported as a bug of the adapter."""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER, Partition
from lanes.errors import ContractError, MessageError
from lanes.source import Delivered

TOKEN_LIMIT: Final = 1 << 63


def check_assigned(name: str, partition: Partition, *, commits: bool) -> None:
    """Raise ``ContractError`` for an assignment that does not fit the way in which source ``name`` settles.

    A fencing token that records cannot hold is refused too. ``commits``: whether the source commits positions.
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
            f"{'by a position' if commits else 'each message by itself'}; please report this bug of the source"
        )
    if commits and partition.deadline != NEVER:
        raise ContractError(
            f"{name}: {partition.id} was assigned with deadline={partition.deadline}, but the source settles by a "
            "position, and only a source that settles each message by itself may have a lease; please report this bug"
        )


def check_delivered(name: str, event: Delivered, *, stopping: bool) -> None:
    """Raise ``ContractError`` for a run that source ``name`` must not deliver.

    ``stopping``: a partition that is assigned during a stop is given back, and its messages may still come.
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
