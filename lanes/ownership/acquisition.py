"""The acquisition of a partition: its lock, then a higher epoch together with the position of the former owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import anyio

from lanes.clock import Clock, monotonic
from lanes.ownership.locks import Held, Locks
from lanes.ownership.state import State, StateKey, StateStore


class Acquired(NamedTuple):
    """A partition that this process owns.

    Attributes:
        held: The lock of the partition.
        state: The state at the acquisition. Its epoch is above the epoch of every former owner.
    """

    held: Held
    state: State


async def acquire(
    locks: Locks,
    states: StateStore,
    key: StateKey,
    *,
    name: str,
    start: int,
    changed: Callable[[], None],
    clock: Clock = monotonic,
) -> Acquired | None:
    """Acquire a partition if no one holds it. Never waits for another holder.

    The lock comes first, so that no process raises the epoch of a living owner. If the claim fails, or the lock is lost
    meanwhile, the call releases the lock. A cancelled call holds nothing.

    Args:
        locks: The locks, opened and running.
        states: The states.
        key: Name of the state.
        name: Name of the lock.
        start: Floor of a state that does not exist yet.
        changed: See ``Locks.try_acquire``.
        clock: Clock of the deadlines.

    Returns:
        The lock and the state; None = another holder has the lock, or the lock was lost before the claim ended.

    Raises:
        ConfigError: The set-up must be changed.
        SourceError: The locks or the states do not answer.
    """
    held = await locks.try_acquire(name, changed)
    if held is None:
        return None
    try:
        state = await states.claim(key, start)
        # Another process may own the partition, if this one was frozen. It claims again after its store is refused.
        if not held.lost and clock() < held.deadline:
            return Acquired(held, state)
    except BaseException:
        await _release(held)
        raise
    await _release(held)
    return None


async def _release(held: Held) -> None:
    with anyio.CancelScope(shield=True):
        await held.release()
