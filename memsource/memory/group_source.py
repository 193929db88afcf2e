"""A source over a ``Group``: one member of it on a real event loop.

``GroupSource`` keeps the contract of ``lanes.source`` for a source that commits one position a partition, on asyncio
and on trio. Several of them on one group share its partitions. What Kafka does by itself, a test does here by a call,
of the group (``rebalance``, ``lose``, ``crash``) or of the source (``fail``, ``block``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import ContractError, SourceError
from lanes.source import Assigned, Delivered, Lost, Progressed, Revoking, SourceEvent, SourceTraits
from memsource.memory.calls import Call
from memsource.memory.group import Group, UnknownMember
from memsource.memory.turns import BATCH, READER, Turns, delivered

__all__ = ["GroupSource"]


class GroupSource(Turns):
    """``member`` of ``group`` as a source: it joins with ``open`` and leaves with ``aclose``.

    ``batch``: messages of one partition delivered at once, at most. ``revoke_timeout``: seconds that ``Revoking``
    gives to drain; the group itself waits for ever, until somebody calls ``lose``. ``hands_over``: whether commits
    keep what is completed above the position.

    A commit of a partition that is no longer owned is made all the same, as Kafka does. When the group does not know
    the member any more, commits fail, and the next ``receive`` reports everything lost and joins again.

    ``calls`` is what was called so far. Every method but those of the contract is plain and does not block.
    """

    def __init__(
        self, group: Group, member: str, *, batch: int = BATCH, revoke_timeout: float = 30.0, hands_over: bool = True
    ) -> None:
        super().__init__(batch)
        self.group = group
        self.member = member
        self._revoke_timeout = revoke_timeout
        self._hands_over = hands_over

    def __repr__(self) -> str:
        return f"<GroupSource {self.member} of {self.group.name}: {len(self._owned)} partitions>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the group; see ``lanes.source.Source.open``."""
        self.calls.append(Call("open"))
        async with self._faults.meet("open"):
            self.group.watch(self._changed)
            self.group.join(self.member)
            return SourceTraits(
                name=f"{self.group.name}/{self.member}",
                system="memory",
                settles="cumulative",
                hands_over=self._hands_over,
            )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit; see ``lanes.source.Source.settle``. Raises ``ContractError`` for a settlement without a floor."""
        self.calls.append(Call("settle", commits=tuple(settlements)))
        async with self._faults.meet("settle"):
            for settlement in settlements:
                self._commit(settlement)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Nothing: there is no timer to keep messages from; see ``lanes.source.Source.extend``."""
        self.calls.append(Call("extend"))
        async with self._faults.meet("extend"):
            pass

    async def release(self, partition: Partition) -> None:
        """Give a partition back to the group; see ``lanes.source.Source.release``."""
        number = partition.id.number
        self.calls.append(Call("release", partition=number))
        async with self._faults.meet("release"):
            if self._owned.get(number) is partition:
                self._forget(number)
                if self.member in self.group.members:
                    self.group.release(self.member, number)

    async def aclose(self) -> None:
        """Leave the group; see ``lanes.source.Source.aclose``."""
        self.calls.append(Call("aclose"))
        async with self._faults.meet("aclose"):
            self.group.unwatch(self._changed)
            self.group.leave(self.member)
            self._forget_all()

    # --- in

    def _next(self, room: Room) -> list[SourceEvent]:
        if self.member not in self.group.members:
            lost = self._forget_all()
            self.group.join(self.member)
            if lost:
                return [Lost(partition, "the group does not know this member any more") for partition in lost]
        # Alone, so that no message comes before the event that its partition begins with.
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
                events.append(Lost(self._forget(number), "the group gave it to another member"))
        return events

    def _take(self, number: int, messages: int, size: int) -> Iterator[Delivered | Progressed]:
        partition, position = self._owned[number], self.group.position(self.member, number)
        records = self.group.fetch(self.member, number, messages, size)
        if records:
            position = records[-1].position + 1
            yield delivered(partition, [(record, None) for record in records])
        if self.group.position(self.member, number) > position:
            yield Progressed(partition, self.group.position(self.member, number))

    def _at_the_end(self) -> bool:
        ends = (self.group.topic.log(number).end for number in self._turns)
        positions = (self.group.position(self.member, number) for number in self._turns)
        return not self.group.rebalancing and all(map(int.__ge__, positions, ends))

    # --- out

    def _commit(self, settlement: Settlement) -> None:
        number = settlement.partition.id.number
        if settlement.floor is None:
            raise ContractError(f"a settlement of partition {number} has no floor, where positions are committed")
        completed = settlement.completed if self._hands_over else ()
        try:
            self.group.commit(self.member, number, settlement.floor, completed)
        except UnknownMember as error:
            self._changed()
            raise SourceError(
                f"position {settlement.floor} of partition {number} was not committed: {error}", retryable=True
            ) from error
