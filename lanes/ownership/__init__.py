"""Ownership of partitions for a store that assigns no owners: locks, states, and the acquisition of both.

A ``Locks`` object decides which process may handle a partition. A ``StateStore`` stores the position of the partition,
and refuses writes of a former owner. Reading order: ``state``, ``locks``, ``acquisition``, ``held_lock``, ``local``,
``lease_locks``.
"""

from __future__ import annotations

from lanes.ownership.acquisition import Acquired, acquire
from lanes.ownership.held_lock import HeldLock, check_lock_name
from lanes.ownership.lease_locks import LeaseLocks
from lanes.ownership.local import LocalLocks
from lanes.ownership.locks import Held, Locks
from lanes.ownership.state import Fenced, State, StateChange, StateKey, StateLocked, StateStore, StoresInTransaction

__all__ = [
    "Acquired",
    "Fenced",
    "Held",
    "HeldLock",
    "LeaseLocks",
    "LocalLocks",
    "Locks",
    "State",
    "StateChange",
    "StateKey",
    "StateLocked",
    "StateStore",
    "StoresInTransaction",
    "acquire",
    "check_lock_name",
]
