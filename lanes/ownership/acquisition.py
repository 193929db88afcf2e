"""The acquisition of a partition: its lock, then a higher epoch together with the position of the former owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import anyio

from lanes.clock import Clock, monotonic
from lanes.ownership.locks import Held, Locks
from lanes.ownership.state import State, StateKey


class Acquired(NamedTuple):
    """A partition that this process owns.

    Attributes:
        held: The lock of the partition.
        state: The state at the acquisition. The state's epoch is above the epoch of every former owner.
    """

    held: Held
    state: State


class Claims(Protocol):
    """The part of a ``StateStore`` that an acquisition needs."""

    async def claim(self, key: StateKey, start: int) -> State:
        """Increase the epoch of a state, and return the state; see ``StateStore.claim``.

        Args:
            key: Name of the state.
            start: Floor of a state that does not exist yet.

        Returns:
            The state with its new epoch.
        """


async def acquire(
    locks: Locks,
    states: Claims,
    key: StateKey,
    *,
    name: str,
    start: int,
    changed: Callable[[], None],
    clock: Clock = monotonic,
) -> Acquired | None:
    """Acquire a partition whose lock is free.

    The call never waits for another holder. The call first acquires the lock, and then claims the state. If the lock is
    lost or its deadline passes, the call cancels the claim, for example while the claim waits for a connection. The
    store may still perform a claim that the process has already sent. Only in this case does the call increase the
    epoch of another process that now owns the partition. This owner claims the state again after the store has refused
    its write.

    If the claim fails, or the lock is lost during the claim, the call releases the lock. A cancelled call releases its
    lock.

    Args:
        locks: The locks, opened and running.
        states: The states.
        key: Name of the state.
        name: Name of the lock.
        start: Floor of a state that does not exist yet.
        changed: See ``Locks.try_acquire``.
        clock: Clock of the deadlines.

    Returns:
        The lock and the state; None = another holder has the lock, or the process lost the lock before the end of the
        claim.

    Raises:
        StateLocked: A transaction of the former owner is still open. Acquire the partition later.
        ConfigError: The set-up of the locks or of the store is invalid.
        SourceError: The locks or the states do not answer.
    """
    claim = _Claim(changed, clock)
    held = await locks.try_acquire(name, claim.changed)
    if held is None:
        return None
    try:
        state = await claim.perform(states, key, start, held)
    except BaseException:
        await _release(held)
        raise
    if state is not None:
        return Acquired(held, state)
    await _release(held)
    return None


class _Claim:
    """A claim that ends, at the latest, when its lock is lost or expires."""

    def __init__(self, changed: Callable[[], None], clock: Clock) -> None:
        self._changed = changed
        self._clock = clock
        self._scope = anyio.CancelScope()
        self._held: Held | None = None

    def changed(self) -> None:
        """Move the deadline of the claim to the deadline of the lock, and call the caller's function."""
        self._bound()
        self._changed()

    async def perform(self, states: Claims, key: StateKey, start: int, held: Held) -> State | None:
        """Return the claimed state; None = the process lost the lock before the end of the claim."""
        if not self._holds(held):
            return None
        state = None
        self._held = held
        try:
            with self._scope:
                self._bound()
                state = await states.claim(key, start)
        finally:
            self._held = None
        # Another process may own the partition, if this one was frozen.
        return state if self._holds(held) else None

    def _holds(self, held: Held) -> bool:
        return not held.lost and self._clock() < held.deadline

    def _bound(self) -> None:
        if self._held is None:
            return
        if self._held.lost:
            self._scope.cancel()
        else:
            self._scope.deadline = anyio.current_time() + self._held.deadline - self._clock()


async def _release(held: Held) -> None:
    with anyio.CancelScope(shield=True):
        await held.release()
