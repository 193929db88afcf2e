"""A source over a ``CohortBroker``: one member of its cohort, with the real membership.

``CohortMemberSource`` keeps the contract of ``lanes.source`` for a source with individual acknowledgements, on asyncio
and on trio. As in the adapter, ``lanes.cohort.owned`` acquires and gives up partitions, so a campaign in the simulator
runs the shipped code. This module only pulls, extends and acknowledges messages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import anyio

from lanes.clock import Clock, monotonic
from lanes.cohort.membership import Membership
from lanes.cohort.owned import OwnedPartition, OwnedPartitions
from lanes.core.cohort.actions import LeaseOwned
from lanes.core.cohort.ledger import Done
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Delivered, SourceEvent, SourceTraits
from memsource.jetstream.cohort_broker import CohortBroker
from memsource.jetstream.epoch_consumers import Durable, MemoryEpochConsumers
from memsource.jetstream.lease_store import MemoryLeaseStore
from memsource.memory.broker import Delivery
from memsource.memory.scripted import READER, Call, ScriptedSource, delivered
from memsource.memory.topic import Record


class Token(NamedTuple):
    """A delivery and its durable. Only this durable accepts the acknowledgement."""

    durable: Durable
    delivery: Delivery


class _PulledPartition(OwnedPartition):
    """An owned partition. During a takeover or a drain, ``durable`` is None and the partition delivers nothing."""

    def __init__(self, number: int, partition: Partition, done: Done) -> None:
        super().__init__(number, partition, done)
        self.durable: Durable | None = None

    def rest(self) -> None:
        self.durable = None


class _Drifting(Membership):
    """A member whose clock is ``pace`` times as fast as the broker's clock. ``deadline`` returns the broker's time."""

    pace = 1.0

    def deadline(self, partition: int) -> float:
        return super().deadline(partition) / self.pace


class Background:
    """A task in the background, on asyncio and on trio.

    Args:
        run: Async function that the task runs.
        changed: Function that the task calls at its end.

    Attributes:
        ended: Event that the task sets at its end.
        failure: Exception that ended the task; None = no exception.
    """

    def __init__(self, run: Callable[[], Awaitable[None]], changed: Callable[[], None]) -> None:
        self.ended = anyio.Event()
        self.failure: Exception | None = None
        self._run = run
        self._changed = changed
        self._scope = anyio.CancelScope()
        # A task without a reference could be collected while it runs.
        self._task: Any
        if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
            self._task = asyncio.get_running_loop().create_task(self._guarded())
        else:
            import trio

            self._task = trio.lowlevel.spawn_system_task(self._guarded)

    def cancel(self) -> None:
        """End the task at once. Idempotent."""
        self._scope.cancel()

    async def _guarded(self) -> None:
        try:
            with self._scope:
                await self._run()
        except Exception as error:
            self.failure = error
        finally:
            self.ended.set()
            self._changed()


class CohortMemberSource(ScriptedSource):
    """The source of a member of the broker's cohort. The member joins with ``open`` and leaves with ``aclose``.

    Args:
        broker: The broker.
        member: Name of the member.
        clock: Clock of the broker, in seconds.
        number: Number that distinguishes members of one name.
        drift: Excess speed of the member's clock; a clock with 0.1 runs 10 % fast.

    Attributes:
        announced: All assignments of the member, by partition number and fencing token.
        released: The assignments that the source has released or reported as lost.
        calls: All calls of the source's methods.
        link: The link to the server.
        membership: The membership of the member.
        number: Number of the source among the sources of the broker.
    """

    def __init__(
        self,
        broker: CohortBroker[CohortMemberSource],
        member: str,
        clock: Clock,
        *,
        number: int = 0,
        drift: float = 0.0,
    ) -> None:
        super().__init__()
        self.broker = broker
        self.member = member
        self.announced: dict[tuple[int, int], Partition] = {}
        self.released: set[Partition] = set()
        self._clock = clock
        self._pace = 1.0 + drift
        self.number = number
        self._random = random.Random(f"member {broker.seed} {number}")
        self.link = broker.link(member, clock)
        self._partitions: OwnedPartitions[_PulledPartition] = OwnedPartitions(
            broker.stream.topic.name,
            READER,
            membership=self._membership,
            make=_PulledPartition,
            follow=self._follow,
            in_flight=broker.in_flight,
            clock=clock,
            wake=self._taken_in,
        )
        self.membership = self._partitions.membership
        self._background: Background | None = None
        self._restarts = broker.restarts

    def _membership(self, *, changed: Callable[[], None]) -> Membership:
        broker, number, settings = self.broker, self.number, self.broker.cohort
        if broker.targets:
            settings = replace(settings, consumer_target=broker.targets[number % len(broker.targets)])
        made = _Drifting(
            MemoryLeaseStore(broker.bucket, self.link),
            MemoryEpochConsumers(broker.stream, self.link, int(broker.cohort.lease)),
            broker.config,
            member=self.member,
            settings=settings,
            changed=changed,
            clock=lambda: self._clock() * self._pace,
            wall=lambda: broker.stream.server_ms(self._clock()) / 1000,
            nonce=lambda: f"{self._random.getrandbits(64):016x}",
            roster=broker.roster_of(self),
        )
        made.pace = self._pace
        return made

    def __repr__(self) -> str:
        return f"<CohortMemberSource {self.member} of {self.broker.stream.topic.name}: {len(self._owned)} partitions>"

    def sever(self) -> None:
        """End the process of the member. Idempotent."""
        self.link.sever()
        self._unwatch()

    def poke(self) -> None:
        """Wake the source, which then checks for changes."""
        self._changed()

    @property
    def alive(self) -> bool:
        """Whether the process of the member runs."""
        return self._background is not None and not self._background.ended.is_set() and not self.link.severed

    # --- lanes.source.Checkpointing

    def checkpoint_within(self, seconds: float) -> None:
        """Set the time within which the member stores a finished message; see ``lanes.source.Checkpointing``."""
        self.membership.checkpoint_within(seconds)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the cohort; see ``lanes.source.Source.open``."""
        self.calls.append(Call("open"))
        broker = self.broker
        async with self._meet_faults("open"):
            self._alive()
            broker.stream.watch(self.poke)
            if broker.hints:
                broker.bucket.watch(self.membership.hint)
            self._restarts = broker.restarts
            self._background = Background(self.membership.run, self._partitions.changed)
        while not self.membership.joined.is_set():
            self._raise_failure()
            await self._change()
        return SourceTraits(
            name=f"{broker.stream.topic.name}/{self.member}",
            system="nats",
            extend_interval=broker.stream.settings.wait(0) / 3,
            max_in_flight=broker.stream.settings.max_ack_pending,
            partitions=len(broker.partitions),
            plans=True,
            remembers=True,
            consumer_target=self.membership.settings.consumer_target,
        )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages, except those of a partition that may be lost; see ``lanes.source.Source.settle``."""
        settled = [(owned, each) for each in settlements if (owned := self._partitions.settled(each)) is not None]
        done = [(owned, message) for owned, each in settled for message in each.messages]
        async with self._meet(Call("settle", deliveries=tuple(_token(message).delivery for _, message in done))):
            self._alive()
            for owned, message in done:
                if self._partitions.leased(message.partition) is owned:
                    self._acknowledge(owned, message)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Restart the ``ack_wait`` of messages; see ``lanes.source.Source.extend``."""
        async with self._meet(Call("extend", deliveries=tuple(_token(message).delivery for message in messages))):
            self._alive()
            for message in messages:
                if self._partitions.leased(message.partition) is not None and not self.link.cut:
                    self.broker.stream.extend(_token(message).durable, message.position, self._clock())

    async def release(self, partition: Partition) -> None:
        """Give a partition back to the cohort; see ``lanes.source.Source.release``."""
        self.calls.append(Call("release", partition=partition.id.number))
        if not self.link.severed:
            await self._partitions.release(partition, self._flush)

    async def aclose(self) -> None:
        """Leave the cohort; see ``lanes.source.Source.aclose``."""
        async with self._meet(Call("aclose")):
            background = self._background
            if background is not None and not self.link.severed:
                self.membership.stop()
                try:
                    while not background.ended.is_set() and self._partitions.leave():
                        await self._change()
                finally:
                    background.cancel()
            self._unwatch()

    # --- in

    def _alive(self) -> None:
        if self.link.severed:
            raise SourceError(f"member {self.member} has crashed; make a new source")

    def _raise_failure(self) -> None:
        background = self._background
        if background is not None and background.failure is not None:
            raise background.failure

    def _next(self, room: Room) -> list[SourceEvent]:
        self._alive()
        self._raise_failure()
        self._partitions.step()
        events = self._told()
        if not events and self._restarts != self.broker.restarts:
            self._restarts = self.broker.restarts
            for owned in list(self._partitions.by_number.values()):
                if owned.durable is not None:
                    self._partitions.take_over(owned)
        # _dealt may find a loss that no event reports yet.
        return events or self._dealt(room) or self._told()

    def _told(self) -> list[SourceEvent]:
        events = self._partitions.next_events()
        for event in events:
            if isinstance(event, Assigned) and self._partitions.of(event.partition) is not None:
                self._turns.append(event.partition.id.number)
        return events

    def _taken_in(self) -> None:
        """Update the owned partitions. The method moves a partition that the member no longer owns to ``released``."""
        for number, partition in list(self._owned.items()):
            if self._partitions.of(partition) is None:
                self.released.add(self._forget(number))
        for number, owned in self._partitions.by_number.items():
            if number not in self._owned:
                self._owned[number] = owned.partition
        self._changed()

    def _follow(self, owned: _PulledPartition, lease: LeaseOwned) -> None:
        owned.begin()
        owned.durable = Durable(owned.number, lease.epoch, lease.sub)
        if not lease.again:
            self.announced[owned.number, lease.token] = owned.partition
            self.broker.owned.append((owned.number, lease.token, self.member))

    async def _flush(self) -> None:
        """Apply the planned faults of ``release``."""
        async with self._meet_faults("release"):
            pass

    def _take(self, number: int, messages: int, size: int) -> Iterator[Delivered]:
        owned = self._partitions.by_number[number]
        if not self.link.cut and owned.durable is not None and self._partitions.leased(owned.partition) is not None:
            records = self._pull(owned, owned.durable, messages, size)
            if records:
                yield delivered(owned.partition, records)

    def _pull(self, owned: _PulledPartition, durable: Durable, messages: int, size: int) -> list[tuple[Record, Token]]:
        """Pull the next messages of the durable, up to a missing delivery, and acknowledge finished messages again."""
        stream = self.broker.stream
        deliveries = stream.pull(durable, messages, size, self._clock())
        if deliveries is None:
            self._partitions.lose(owned, f"its durable {durable} was deleted")
            return []
        run: list[tuple[Record, Token]] = []
        for delivery in deliveries:
            if self.broker.loses_delivery(durable):
                continue
            if not owned.follows(delivery.token):
                self._partitions.take_over(owned)
                break
            record = delivery.record
            if not owned.ledger.delivered(record.position):
                stream.ack(durable, record.position, self._clock())
            else:
                run.append((record, Token(durable, delivery)))
        return run

    def _at_the_end(self) -> bool:
        stream = self.broker.stream
        by_number = self._partitions.by_number
        durables = [by_number[number].durable for number in self._turns]
        if None in durables or not len(durables) == len(by_number) == self.membership.planned:
            return False
        return not any(stream.consumer(durable).waiting for durable in durables if durable and stream.exists(durable))

    # --- out

    def _acknowledge(self, owned: _PulledPartition, message: Message) -> None:
        token = _token(message)
        if not self.link.cut and not self._ack(token) and token.durable == owned.durable:
            self._partitions.lose(owned, f"its durable {token.durable} accepted no acknowledgement")

    def _ack(self, token: Token) -> bool:
        """Acknowledge a message. Returns False for a deleted durable on a link without latency."""
        stream, position = self.broker.stream, token.delivery.record.position
        if self.link.latency:
            at = self._clock() + self.link.latency
            self.broker.later(at, lambda now: stream.ack(token.durable, position, now))
            return True
        return stream.ack(token.durable, position, self._clock())

    def _unwatch(self) -> None:
        self.broker.stream.unwatch(self.poke)
        self.broker.bucket.unwatch(self.membership.hint)


def _token(message: Message) -> Token:
    assert isinstance(message.token, Token)
    return message.token


class CohortPersonality(CohortBroker[CohortMemberSource]):
    """A ``CohortBroker`` that creates the sources of its members; see ``memsource.personality.Personality``."""

    def source(self, member: str, clock: Clock = monotonic) -> CohortMemberSource:
        """Create the source of a new member. An earlier member of this name must have crashed or left."""
        number = len(self.members)
        made = CohortMemberSource(self, member, clock, number=number, drift=self._drifts[number % len(self._drifts)])
        made.link.latency = self._latencies[number % len(self._latencies)]
        self.members.append(made)
        return made
