"""A source over one client of a ``KafkaBroker``. In simulations the source replaces the Kafka adapter.

The source keeps the contract of ``lanes.source`` on asyncio and on trio, and never sleeps. The owner of the broker
calls ``broker.advance``, which wakes the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.core.offset_map import LIMIT, decode, encode
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import SourceError
from lanes.retention import Pace, by_newer
from lanes.source import Assigned, Backlog, Lost, Retention, Revoking, SourceEvent, SourceTraits
from memsource.kafka.broker import KafkaBroker
from memsource.kafka.client import Callback, Client, Commit, KafkaFailure
from memsource.memory.group import Group
from memsource.memory.scripted import BATCH, READER, Call, CommittingSource, floor_of
from memsource.memory.topic import Record

_OF_POLL_INTERVAL: Final = 0.8
"""Share of ``max_poll_interval`` for a drain with its last commit and its release. The remaining 0.2 are a margin."""


class KafkaMemberSource(CommittingSource):
    """The source of a member of the broker's group. ``open`` joins the group, and ``aclose`` leaves it.

    Commit metadata contains the positions completed above the floor. If the metadata is too large for the broker, the
    source leaves out the highest positions. After a loss, the source still commits the partition until the source
    learns of the loss. After a release or ``Lost``, the source commits no position of the partition.

    A waiting ``receive`` polls continuously. Without a waiting ``receive`` the client does not poll. If the consumer
    does not release a partition within the ``timeout`` of its ``Revoking``, the source releases the partition and
    reports ``Lost``.

    ``receive``, ``settle`` and ``aclose`` of a frozen process wait. Calls of a crashed process, except ``aclose``,
    raise ``SourceError`` and change nothing. Methods outside the contract do not block.

    Args:
        broker: The broker.
        member: Name of the member.
        clock: Clock of the process, in seconds.
        batch: Maximum number of messages of one partition in a delivery.
        instance: Id of a static member; None = a dynamic member.

    Attributes:
        broker: The broker.
        member: Name of the member.
        client: The client of the process.
        calls: All calls of the source's methods.
        degraded: Number of commits whose metadata did not hold all completed positions.
    """

    def __init__(
        self,
        broker: KafkaBroker,
        member: str,
        clock: Clock = monotonic,
        *,
        batch: int = BATCH,
        instance: str | None = None,
    ) -> None:
        super().__init__(batch)
        self.broker = broker
        self.member = member
        self.client = Client(member, clock, instance)
        self.degraded = 0
        self._limit = LIMIT
        self._deadlines: dict[int, float] = {}  # of revoked partitions
        self._paces: dict[int, Pace] = {}  # the bytes written to owned partitions
        self._failed: SourceError | None = None
        self._removed = False
        if broker.settings.backlogs:
            # Without this attribute, the source is not ``lanes.source.Backlogged``.
            self.backlog = self._backlog
        if broker.settings.retention_bytes is not None:
            # Without this attribute, the source is not ``lanes.source.Retaining``.
            self.retention = self._retention
        if broker.settings.confirms:
            # Without these attributes, the source is not ``lanes.source.Confirming``.
            self.freeze_limit, self.confirm = self._freeze_limit, self._confirm
        broker.introduce(self.client)

    def __repr__(self) -> str:
        return f"<KafkaMemberSource {self.member} of {self.broker.topic}: {len(self._owned)} partitions>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the group; see ``lanes.source.Source.open``. Raises ``SourceError`` while the broker is down."""
        async with self._meet(Call("open")):
            self._alive()
            self.broker.watch(self._changed)
            try:
                self.broker.join(self.client, self.client.clock())
            except KafkaFailure as failure:
                raise SourceError(f"{self._name} cannot join: {failure}", retryable=True) from failure
            return SourceTraits(
                name=self._name, system="kafka", settles="cumulative", hands_over=self.broker.hands_over
            )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``.

        Raises ``SourceError`` if the client failed permanently, if a partition has no valid position, or if the topic
        was deleted and created again.
        """
        client = self.client
        self.broker.polling(client, client.clock(), on=True)
        try:
            return await super().receive(room)
        finally:
            self.broker.polling(client, client.clock(), on=False)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit; see ``lanes.source.Source.settle``.

        While the broker is down, a commit waits (protocol 848), or fails after ``commit_timeout`` (classic protocol).
        Raises ``ContractError`` for a settlement without a floor. Raises ``SourceError`` if the commit failed, or if a
        partition was released or lost, also during the call.
        """
        async with self._meet(Call("settle", commits=tuple(settlements))):
            await self._reach()
            # No await follows, so a cancelled commit was not sent.
            if settlements:
                self._commit(settlements)

    async def release(self, partition: Partition) -> None:
        """Release a partition; see ``lanes.source.Source.release``.

        The call does not wait. If the broker is down, the client sends the release after the broker's restart. A
        partition that is not revoked stays assigned until ``aclose``, and delivers nothing.
        """
        number = partition.id.number
        async with self._meet(Call("release", partition=number)):
            self._alive()
            if self._owned.get(number) is partition:
                self._forget(number)
                self.broker.release(self.client, number, self.client.clock())

    async def aclose(self) -> None:
        """Leave the group; see ``lanes.source.Source.aclose``. Heartbeats stop at the beginning of the call."""
        self.calls.append(Call("aclose"))
        client = self.client
        if not client.crashed:
            self.broker.begin_close(client, client.clock())
        async with self._meet_faults("aclose"):
            while client.frozen_until is not None and not client.crashed:
                await self._change()
            self.broker.unwatch(self._changed)
            self.broker.end_close(client, client.clock())
            self._forget_all()

    # --- lanes.source.Backlogged

    def _backlog(self, partition: Partition) -> Backlog:
        owned = self.client.partitions.get(partition.id.number)
        if owned is None or owned.partition is not partition:
            return Backlog(None)
        waiting = self.broker.stable_end(partition.id.number) - owned.position
        return Backlog(max(0, waiting), "the broker does not answer" if self.broker.hangs else "")

    # --- lanes.source.Retaining

    def _retention(self, message: Message) -> Retention | None:
        number, limit = message.partition.id.number, self.broker.settings.retention_bytes
        pace = self._paces.get(number)
        if limit is None or pace is None:
            return None
        start = self.broker.log_start(number)
        if message.position < start:
            return Retention(0.0, 1.0, f"its retention, because the log begins at offset {start}")
        pace.note(self.broker.written_bytes(number), self.client.clock())
        newer = self.broker.newer_bytes(number, message.position)
        return by_newer(newer, limit, pace.per_second(), f"retention.bytes={limit}")

    # --- lanes.source.Confirming

    def _freeze_limit(self) -> float:
        settings = self.broker.settings
        return settings.session_timeout - settings.heartbeat_interval - 1.0

    async def _confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        self._alive()
        while not (self.client.running and self.broker.up):
            await self._change()
            self._alive()
        owner, client = self.broker.group.owner, self.client
        if not self.broker.lists(client):
            self._removed = True
            self._changed()
            return []
        return [
            each
            for each in partitions
            if self._owned.get(each.id.number) is each and owner(each.id.number) == client.id
        ]

    # --- events

    def _next(self, room: Room) -> list[SourceEvent]:
        self._alive()
        if not self.client.running:
            return []
        overdue = [number for number, at in self._deadlines.items() if at <= self.client.clock()]
        if overdue:
            return [self._given_up(number, "the partition was not released in time") for number in overdue]
        if self._removed:
            # The client may learn of its removal much later. A member id that was removed never returns to the list, so
            # the partitions come back only by an assignment.
            self._removed = False
            if self._owned:
                return [Lost(self._forget(number), "the group removed this member") for number in list(self._owned)]
        while callbacks := self.broker.poll(self.client, self.client.clock()):
            # Poll without messages: no message may be delivered before the Assigned of its partition.
            events = [event for callback in callbacks for event in self._told(callback)]
            if events:
                return events
        if self._failed is None:
            self._same_topic(self._owned)
        if self._failed is not None:
            raise self._failed
        self._pause(room)
        return self._dealt(room)

    def _told(self, callback: Callback | KafkaFailure) -> Iterator[SourceEvent]:
        if isinstance(callback, KafkaFailure):
            yield from self._told_failure(callback)
        elif callback.kind == "assign":
            for number in callback.partitions:
                if number in self._owned:
                    # The release of the partition was cancelled, and meanwhile the partition was taken and assigned
                    # again.
                    yield Lost(self._forget(number), "the partition was lost and assigned again")
                yield self._assigned(number)
        elif callback.kind == "lost":
            # After the loss of the membership, the client gets no callback for revoked partitions.
            for number in list(self._owned) if self.client.rejoining else callback.partitions:
                yield Lost(self._forget(number), "the group took the partition, or gave it to another member")
        else:
            yield from self._revoking(callback.partitions)

    def _told_failure(self, failure: KafkaFailure) -> Iterator[SourceEvent]:
        if failure.code == "_FATAL":
            self._failed = SourceError(f"{self._name}: the client failed permanently ({failure}); make a new source")
            for number in list(self._owned):
                yield Lost(self._forget(number), str(failure))
        elif failure.code == "_AUTO_OFFSET_RESET":
            self._failed = SourceError(
                f"{self._name}: {failure} in its log; commit a position in the log, or set offset_reset to "
                '"earliest" or "latest"'
            )

    def _assigned(self, number: int) -> Assigned:
        broker, floor = self.broker, self.client.partitions[number].position
        commit = broker.committed(number)
        end = broker.group.topic.log(number).end
        # Metadata of other clients is normal and ignored. Metadata for another floor, after a reset, is ignored too.
        completed = None if commit is None else decode(commit.metadata, floor, max(0, end - floor))
        owned = Partition(broker.place(number), READER, broker.topic_id or "", floor=floor, completed=completed or ())
        self._owned[number] = self.client.partitions[number].partition = owned
        self._paces[number] = Pace()
        self._paces[number].note(broker.written_bytes(number), self.client.clock())
        self._turns.append(number)
        return Assigned(owned)

    def _revoking(self, numbers: Sequence[int]) -> Iterator[SourceEvent]:
        timeout = _OF_POLL_INTERVAL * self.broker.settings.max_poll_interval
        self._same_topic(numbers)
        for number in numbers if self._failed is None else ():
            if self.broker.topic_id is None:
                yield self._given_up(number, "the topic was deleted")
            else:
                # A callback that does not return in time costs the membership.
                self._deadlines[number] = self.client.clock() + timeout
                self.broker.wait_until(self._deadlines[number])
                yield Revoking(self._owned[number], timeout)

    def _given_up(self, number: int, reason: str) -> Lost:
        """Release a partition without a call of ``release``, and return its ``Lost``."""
        lost = Lost(self._forget(number), reason)
        self.broker.release(self.client, number, self.client.clock())
        return lost

    def _same_topic(self, numbers: Sequence[int] | dict[int, Partition]) -> None:
        """End the source of a recreated topic, because its positions mean other messages."""
        now = self.broker.topic_id
        for number in numbers:
            before = self._owned[number].incarnation
            if now is not None and now != before:
                self._failed = self._recreated(before, now)

    def _recreated(self, before: str, now: str) -> SourceError:
        return SourceError(
            f"{self._name}: topic {self.broker.topic} was deleted and created again: its id is {now}, not {before}, "
            "and its positions mean other messages. The source commits nothing more; choose the positions to begin "
            "at, and start again"
        )

    @property
    def _members(self) -> Group:
        return self.broker.group

    def _position(self, number: int) -> int:
        return self.client.partitions[number].position

    def _fetch(self, number: int, messages: int, size: int) -> list[Record]:
        return self.broker.fetch(self.client, number, messages, size)

    def _pause(self, room: Room) -> None:
        """Pause exactly the paused partitions of ``room``. A former assignment may have left a partition paused."""
        for number, partition in self._owned.items():
            if (partition in room.paused) != (number in self.client.paused):
                if partition in room.paused:
                    self.client.pause(number)
                else:
                    self.client.resume(number)

    # --- commits and releases

    async def _reach(self) -> None:
        """Wait until process and broker run.

        A classic client raises ``SourceError`` after ``commit_timeout`` without a broker.
        """
        broker, client, deadline = self.broker, self.client, None
        while True:
            self._alive()
            if client.running:
                if broker.up:
                    return
                now = client.clock()
                if broker.settings.protocol != "848" and deadline is None:
                    deadline = now + broker.settings.commit_timeout
                    broker.wait_until(deadline)
                if deadline is not None and now >= deadline:
                    what = "the broker is down, so nothing was committed; start the broker"
                    raise SourceError(f"{self._name}: {what}", retryable=True)
            await self._change()

    def _commit(self, settlements: Sequence[Settlement]) -> None:
        commits = {}
        for settlement in settlements:
            number, floor = settlement.partition.id.number, floor_of(settlement)
            before, now = settlement.partition.incarnation, self.broker.topic_id
            if now is not None and now != before:
                raise self._recreated(before, now)
            if self._owned.get(number) is not settlement.partition:
                # The partition may have been lost while this call waited, before the call was cancelled.
                gone = f"{self._name}: partition {number} was released or lost, so the source commits it no more"
                raise self._failed or SourceError(gone, retryable=True)
            commits[number] = Commit(floor, self._metadata(settlement, floor))
        try:
            self.broker.commit(self.client, commits, self.client.clock())
        except KafkaFailure as failure:
            if failure.code == "OFFSET_METADATA_TOO_LARGE" and self._limit:
                # The broker accepts less metadata than by default: later commits hand over fewer positions.
                self._limit //= 2
                return self._commit(settlements)
            self._changed()  # receive must check whether the membership is lost
            raise SourceError(
                f"{self._name}: partitions {sorted(commits)} were not committed: {failure}",
                retryable=failure.code != "_FATAL",
            ) from failure
        return None

    def _metadata(self, settlement: Settlement, floor: int) -> str:
        if not self.broker.hands_over:
            return ""
        text = encode(floor, settlement.completed, self._limit)
        if settlement.completed:
            kept = decode(text, floor, 1 << 63) or [(floor, floor)]
            self.degraded += kept[-1][1] < settlement.completed[-1][1]
        return text

    # --- inside

    @property
    def _name(self) -> str:
        return f"{self.broker.topic}/{self.member}"

    def _alive(self) -> None:
        if self.client.crashed:
            raise SourceError(f"{self._name}: its process has crashed; make a new source")

    def _forget(self, number: int) -> Partition:
        self._deadlines.pop(number, None)
        self._paces.pop(number, None)
        return super()._forget(number)


class KafkaPersonality(KafkaBroker):
    """A ``KafkaBroker`` that makes the sources of its members; see ``memsource.personality.Personality``."""

    def source(self, member: str, clock: Clock = monotonic) -> KafkaMemberSource:
        """Make the source of a new member, in its own process. ``KafkaMemberSource`` has further settings."""
        return KafkaMemberSource(self, member, clock)
