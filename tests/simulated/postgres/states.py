"""The states of partitions on a server as data: a claim raises the epoch, and a store compares the epoch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from tests.simulated.postgres.server import Session


class StateRow(NamedTuple):
    """The state of a partition.

    Attributes:
        epoch: Epoch of the owner.
        floor: Lowest position that is not finished.
        completed: Finished positions above ``floor``, as half-open runs.
    """

    epoch: int
    floor: int
    completed: tuple[tuple[int, int], ...] = ()


def claim(session: Session, key: Hashable, start: int) -> StateRow:
    """Raise the epoch of a state. A new state begins at ``start``. Raises ``Blocked``."""
    session.lock_row(key)
    before: StateRow | None = session.get(key)
    epoch = session.server.next_epoch()
    row = StateRow(epoch, start) if before is None else before._replace(epoch=epoch)
    session.put(key, row)
    return row


def store(session: Session, key: Hashable, state: StateRow) -> bool:
    """Write a state whose epoch is unchanged, unless its floor would fall. Return whether the store wrote the state.

    Raises ``Blocked``.
    """
    session.lock_row(key)
    before: StateRow | None = session.get(key)
    if before is None or before.epoch != state.epoch:
        return False
    if before.floor > state.floor:
        return False
    session.put(key, state)
    return True
