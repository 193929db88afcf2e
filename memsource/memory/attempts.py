"""A store of attempts in memory, for one process or for all processes of a simulation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from lanes.attempts import Attempt
from lanes.core.types import Message, Partition, PartitionId
from memsource.memory.remote import Remote


class MemoryAttempts(Remote):
    """A store of attempts; see ``lanes.Attempts``. Consumers that share an instance share the attempts.

    The store ignores a write whose fencing token is lower than the token of the stored attempt.

    Args:
        call: Async function that simulates the network, such as ``World.io``; None = no network. The store awaits
            ``call`` with the name of the operation and ``seconds`` before each read or write. If ``call`` raises, the
            store changes nothing.
        seconds: Seconds that the store passes to ``call``, 0 or more.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
    """

    def __init__(self, call: Callable[[str, float], Awaitable[None]] | None = None, *, seconds: float = 0.0) -> None:
        super().__init__(call, seconds=seconds)
        self._rows: dict[tuple[PartitionId, str], dict[int, tuple[Attempt, int]]] = {}

    def kept(self) -> dict[PartitionId, dict[int, Attempt]]:
        """Return all attempts, by partition and position. The call does not block."""
        return {
            partition: {position: attempt for position, (attempt, _) in sorted(rows.items())}
            for (partition, _), rows in sorted(self._rows.items())
            if rows
        }

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        """Read the attempts of a partition.

        Args:
            partition: The partition.

        Returns:
            The attempts by position.
        """
        await self._reach("load attempts")
        return {position: attempt for position, (attempt, _) in self._of(partition).items()}

    async def keep(self, message: Message, attempt: Attempt) -> None:
        """Store the attempt of a message, unless the stored attempt is later or belongs to a newer owner.

        Args:
            message: The message.
            attempt: The attempt of the message.
        """
        await self._reach("keep an attempt")
        rows, token = self._of(message.partition), message.partition.fencing_token or 0
        before = rows.get(message.position)
        if before is None or (before[0].attempts <= attempt.attempts and before[1] <= token):
            rows[message.position] = attempt, token

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        """Delete the attempts of finished messages.

        Args:
            partition: The partition.
            positions: Positions of the messages. The store ignores unknown positions.
        """
        await self._reach("drop attempts")
        rows, token = self._of(partition), partition.fencing_token or 0
        for position in positions:
            if position in rows and rows[position][1] <= token:
                del rows[position]

    def _of(self, partition: Partition) -> dict[int, tuple[Attempt, int]]:
        return self._rows.setdefault((partition.id.whole, partition.incarnation), {})
