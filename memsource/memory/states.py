"""Partition states in memory: the reference of ``lanes.ownership.StateStore``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from lanes.ownership.state import State, StateChange, StateKey
from memsource.memory.remote import Remote


class MemoryStates(Remote):
    """A store of partition states; see ``lanes.ownership.StateStore``. Processes of a simulation share an object.

    Args:
        call: Async function that simulates the network, such as ``World.io``; None = no network. The store awaits
            ``call`` with the name of the operation and ``seconds`` before each operation. If ``call`` raises, the
            store changes nothing.
        seconds: Seconds that the store passes to ``call``, 0 or more.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
    """

    def __init__(self, call: Callable[[str, float], Awaitable[None]] | None = None, *, seconds: float = 0.0) -> None:
        super().__init__(call, seconds=seconds)
        self._states: dict[StateKey, State] = {}
        self._epoch = 0

    def __repr__(self) -> str:
        return f"<MemoryStates: {len(self._states)} states>"

    def stored(self) -> dict[StateKey, State]:
        """Return all states by name. The call does not block."""
        return dict(sorted(self._states.items()))

    def delete(self, key: StateKey) -> None:
        """Delete a state, as an operator does. Idempotent. The next ``claim`` begins at its ``start``.

        Args:
            key: Name of the state.
        """
        self._states.pop(key, None)

    async def read(self, keys: Sequence[StateKey]) -> Mapping[StateKey, State]:
        """Read states; see ``StateStore.read``.

        Args:
            keys: Names of the states.

        Returns:
            The claimed states by name.
        """
        await self._reach("read states")
        return {key: self._states[key] for key in keys if key in self._states}

    async def claim(self, key: StateKey, start: int) -> State:
        """Increase the epoch of a state and return the state; see ``StateStore.claim``.

        Args:
            key: Name of the state.
            start: Floor of a state that does not exist yet.

        Returns:
            The state with its new epoch.
        """
        await self._reach("claim a state")
        # One number for all states never repeats an epoch, even after a state was deleted.
        self._epoch += 1
        state = self._states[key] = self._states.get(key, State(0, start))._replace(epoch=self._epoch)
        return state

    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        """Write the states whose epochs are unchanged; see ``StateStore.store``.

        Args:
            changes: At most one change for each key.

        Returns:
            One answer for each change; False = another process owns the partition.
        """
        await self._reach("store states")
        return [self._store(key, state) for key, state in changes]

    def _store(self, key: StateKey, state: State) -> bool:
        stored = self._states.get(key)
        if stored is None or stored.epoch != state.epoch:
            return False
        if state.floor >= stored.floor:
            self._states[key] = state._replace(completed=tuple(state.completed))
        return True
