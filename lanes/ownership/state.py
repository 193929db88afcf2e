"""The contract of a store of partition states.

A state contains the position of a subscription in a partition, and the epoch. The *epoch* of a state is the number of
its last acquisition. Each new owner of a partition increases the epoch before it reads the position. The store then
refuses every write of a former owner. If the loss of a lock stays undetected, messages may therefore run again, but the
former owner changes no position.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lanes.core.types import PartitionId
from lanes.errors import SourceError


class StateKey(NamedTuple):
    """The name of a state.

    Attributes:
        subscription: Name of the subscription, 1 to 200 characters without zero bytes.
        partition: Name and number of the partition.
        incarnation: Name that distinguishes a recreated log from the former one; "" = the source has none.
    """

    subscription: str
    partition: PartitionId
    incarnation: str = ""


class State(NamedTuple):
    """The state of a partition.

    Attributes:
        epoch: Number of the last acquisition, 1 … 2⁶³−1.
        floor: The next position to read, 0 … 2⁶³−1. Every lower position is finished.
        completed: The finished positions above the floor, as half-open runs in ascending order.
    """

    epoch: int
    floor: int
    completed: Sequence[tuple[int, int]] = ()


class StateChange(NamedTuple):
    """A new state of a partition, written by its owner.

    Attributes:
        key: Name of the state.
        state: The new state, with the epoch that ``claim`` returned to this owner.
    """

    key: StateKey
    state: State


class Fenced(SourceError):
    """Error of a write by a former owner: another process has acquired the partition, and the store wrote nothing.

    Not retryable.
    """


class StateLocked(SourceError):
    """Error of a claim: an open transaction locks the state, and the claim changed nothing.

    A later claim may succeed. Retryable.

    Args:
        message: The text of the error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class StateStore(Protocol):
    """The states of partitions, in any store with an atomic compare-and-set.

    One event loop makes all calls. Several calls may run at once. Every read returns the last write that the store
    confirmed to any process. A cancelled call takes effect completely or not at all. A call sends no request after it
    has ended.

    Every method raises ``SourceError`` if the store does not answer or refuses the call, with ``retryable=True`` if the
    same call may succeed later. Every method raises ``ConfigError`` for a fault that an operator must correct.
    """

    async def read(self, keys: Sequence[StateKey]) -> Mapping[StateKey, State]:
        """Read states. Changes nothing.

        Args:
            keys: Names of the states.

        Returns:
            The states by name. The result omits states that no owner has claimed.
        """

    async def claim(self, key: StateKey, start: int) -> State:
        """Increase the epoch of a state in one atomic step, and return the state.

        The write is durable when the call returns.

        After the call, the store refuses every change of a former owner. Call this method only while this process holds
        the lock of the partition. A repeated call increases the epoch again. Epochs of a key never repeat, even after
        an operator has deleted the state. If a former owner has an open transaction, which may never end, the claim
        raises ``StateLocked`` without a long wait.

        Args:
            key: Name of the state.
            start: Floor of a state that does not exist yet. The call has no effect if the state exists.

        Returns:
            The state with its new epoch, and with the last floor and completed positions of the former owner.

        Raises:
            StateLocked: A transaction or another call holds the state. Repeat the claim later.
        """

    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        """Write states if their epochs are unchanged. The write is durable when the call returns. Idempotent.

        The store compares the epoch of each change with the stored epoch, and never replaces the stored epoch. The
        positions of a state never decrease. The store ignores a change below the stored floor, without an error,
        because the store may receive two calls in the opposite order.

        Args:
            changes: The new states, at most one for each key. The changes are independent of each other.

        Returns:
            A result for each change, in order. False = another process owns the partition, because the state is missing
            or has another epoch; the store wrote nothing.
        """


@runtime_checkable
class StoresInTransaction(Protocol):
    """An optional interface of a state store that can write in a transaction of the caller, together with effects."""

    def store_in(self, connection: Any, change: StateChange) -> Awaitable[None] | None:
        """Write a state as ``StateStore.store`` does, in the open transaction of the caller.

        The row of the state stays locked until the transaction ends. While the row is locked, each ``claim`` raises
        ``StateLocked``.
        The transaction of a former owner therefore ends before the next ``claim`` returns, or is refused.

        Args:
            connection: The caller's connection. The connection belongs to the driver of the store.
            change: The change.

        Returns:
            Nothing; awaitable for an asynchronous connection.

        Raises:
            Fenced: The state is missing or has another epoch. Do not catch the exception in the transaction block, so
                that the database rolls back the effects.
            ConfigError: The connection has no open transaction, or a table or permission is missing.
            SourceError: The store did not answer or refused the write.
        """
