"""A source of one member of a ``Group``, on a real event loop.

``GroupSource`` keeps the contract of ``lanes.source`` for a source that commits one position for each partition, on
asyncio and on trio. Several sources share the partitions of one group. A test triggers the events that a real broker
causes: ``rebalance``, ``lose`` and ``crash`` of the group, ``fail`` and ``block`` of the source.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanes.arguments import check_flag, check_seconds, check_text, kind_of
from lanes.core.types import Partition, PartitionId, Room, Settlement
from lanes.errors import ConfigError, SourceError
from lanes.source import Assigned, Lost, Revoking, SourceEvent, SourceTraits
from memsource.memory.group import Group, UnknownMember
from memsource.memory.scripted import BATCH, READER, Call, CommittingSource, floor_of
from memsource.memory.topic import Record


class GroupSource(CommittingSource):
    """The source of a member of a group. ``open`` joins the group, and ``aclose`` leaves the group.

    As in Kafka, a commit of a partition that the member no longer owns succeeds. After the group has removed the
    member, commits fail. The next ``receive`` then reports all partitions as lost and joins the group again.

    Methods outside the contract of ``lanes.source.Source`` do not block.

    Args:
        group: The group.
        member: Name of the member.
        batch: Maximum number of messages of one partition in a delivery, 1 or more.
        revoke_timeout: Seconds that ``Revoking`` grants for a drain. The group ignores this time; a test may call
            ``lose``.
        hands_over: Whether commits include the positions completed above the floor.

    Attributes:
        calls: All calls of the source's methods.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
    """

    def __init__(
        self, group: Group, member: str, *, batch: int = BATCH, revoke_timeout: float = 30.0, hands_over: bool = True
    ) -> None:
        super().__init__(batch)
        if not isinstance(group, Group):
            raise ConfigError(f"group is {kind_of(group)}: pass a memsource.Group(…)")
        check_text("member", member)
        check_seconds("revoke_timeout", revoke_timeout, 0.0)
        check_flag("hands_over", hands_over)
        self.group = group
        self.member = member
        self._revoke_timeout = revoke_timeout
        self._hands_over = hands_over

    def __repr__(self) -> str:
        return f"<GroupSource {self.member} of {self.group.name}: {len(self._owned)} partitions>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the group; see ``lanes.source.Source.open``."""
        async with self._meet(Call("open")):
            self.group.watch(self._changed)
            self.group.join(self.member)
            return SourceTraits(
                name=f"{self.group.name}/{self.member}",
                system="memory",
                settles="cumulative",
                hands_over=self._hands_over,
            )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit positions; see ``lanes.source.Source.settle``.

        Args:
            settlements: The settlements.

        Raises:
            ContractError: A settlement has no floor.
            SourceError: The group has removed the member.
        """
        async with self._meet(Call("settle", commits=tuple(settlements))):
            for settlement in settlements:
                self._commit(settlement)

    async def release(self, partition: Partition) -> None:
        """Give a partition back to the group; see ``lanes.source.Source.release``.

        Args:
            partition: The partition.
        """
        number = partition.id.number
        async with self._meet(Call("release", partition=number)):
            if self._owned.get(number) is partition:
                self._forget(number)
                if self.member in self.group.members:
                    self.group.release(self.member, number)

    async def aclose(self) -> None:
        """Leave the group; see ``lanes.source.Source.aclose``."""
        async with self._meet(Call("aclose")):
            self.group.unwatch(self._changed)
            self.group.leave(self.member)
            self._forget_all()

    # --- in

    def _next(self, room: Room) -> list[SourceEvent]:
        if self.member not in self.group.members:
            lost = self._forget_all()
            self.group.join(self.member)
            if lost:
                return [Lost(partition, "the group has removed this member") for partition in lost]
        # Return notices without messages, because no message may precede the Assigned of its partition.
        return self._noticed() or self._dealt(room)

    def _noticed(self) -> list[SourceEvent]:
        events: list[SourceEvent] = []
        for kind, number in self.group.poll(self.member):
            if kind == "assigned":
                offset, completed = self.group.committed(number)
                owned = Partition(PartitionId(self.group.name, number), READER, floor=offset, completed=completed)
                self._owned[number] = owned
                self._turns.append(number)
                events.append(Assigned(owned))
            elif kind == "revoking":
                events.append(Revoking(self._owned[number], self._revoke_timeout))
            else:
                events.append(Lost(self._forget(number), "the group took the partition from this member"))
        return events

    @property
    def _members(self) -> Group:
        return self.group

    def _position(self, number: int) -> int:
        return self.group.position(self.member, number)

    def _fetch(self, number: int, messages: int, size: int) -> list[Record]:
        return self.group.fetch(self.member, number, messages, size)

    # --- out

    def _commit(self, settlement: Settlement) -> None:
        number, floor = settlement.partition.id.number, floor_of(settlement)
        completed = settlement.completed if self._hands_over else ()
        try:
            self.group.commit(self.member, number, floor, completed)
        except UnknownMember as error:
            self._changed()
            raise SourceError(
                f"position {floor} of partition {number} was not committed: {error}", retryable=True
            ) from error
