"""Checks of the events of a source, and of the entries of a store of attempts.

The checks report a violated rule of ``lanes.source`` as a bug of the adapter. Another program may also have changed an
entry of a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from lanes.arguments import kind_of, shown_value
from lanes.attempts import Attempt, AttemptState
from lanes.core.types import Partition
from lanes.errors import ContractError, MessageError
from lanes.source import Delivered

TOKEN_LIMIT: Final = 1 << 63

ATTEMPTS_LIMIT: Final = (1 << 31) - 2
"""Highest number of attempts in a store. The number of the next attempt still fits a column of 32 bits."""

_STATES: Final = get_args(AttemptState)


def check_assigned(name: str, partition: Partition, *, commits: bool) -> None:
    """Check an assignment against the traits of its source.

    Args:
        name: Name of the source.
        partition: The assignment.
        commits: Whether the source commits positions.

    Raises:
        ContractError: The assignment contradicts the traits of the source, or its fencing token is too large for the
            records.
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


def check_delivered(name: str, event: Delivered, *, stopping: bool) -> None:
    """Check a run of messages.

    Args:
        name: Name of the source.
        event: The run.
        stopping: Whether the consumer stops. A stopping consumer releases a newly assigned partition, and the
            source may still deliver messages of that partition.

    Raises:
        ContractError: The run belongs to a partition that was never assigned, or its ``broken`` is not a
            ``MessageError``.
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
                f"broken={type(message.broken).__qualname__}; a message that cannot be read must have a MessageError; "
                "please report this bug of the source"
            )


def check_loaded(name: str, partition: Partition, known: object) -> Mapping[int, Attempt]:
    """Check the entries that a store of attempts has returned. O(entries).

    Args:
        name: Name of the source.
        partition: The assignment of the loaded attempts.
        known: The result of ``lanes.Attempts.load``.

    Returns:
        ``known``.

    Raises:
        ContractError: The result is not a mapping, or an entry is invalid.
    """
    where = f"{name}: the store of attempts returned"
    if not isinstance(known, Mapping):
        raise ContractError(f"{where} {kind_of(known)} for {partition.id}; return a mapping of positions to Attempt")
    for position, attempt in known.items():
        if type(position) is not int or position < 0:
            raise ContractError(
                f"{where} the position {shown_value(position)} for {partition.id}; a position is a whole number from 0"
            )
        fault = _fault(attempt)
        if fault:
            raise ContractError(
                f"{where} {fault} for {partition.id} position {position}; correct or delete this entry of the store"
            )
    return known


def _fault(attempt: object) -> str:
    """Describe the fault of an entry; "" = no fault."""
    if not isinstance(attempt, Attempt):
        return f"{kind_of(attempt)} in place of an Attempt"
    count: object = attempt.attempts
    state: object = attempt.state
    error_type: object = attempt.error_type
    if type(count) is not int or not 1 <= count <= ATTEMPTS_LIMIT:
        return f"attempts={shown_value(count)}, which is no whole number from 1 to {ATTEMPTS_LIMIT},"
    if state not in _STATES:
        return f"state={shown_value(state)}, which is none of {', '.join(_STATES)},"
    if not isinstance(error_type, str):
        return f"error_type={shown_value(error_type)}, which is no text,"
    return ""
