"""The broker of a run with ranges: an operator moves and splits the ranges of the members while they work."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final

from psycopg import AsyncConnection

from lanes.clock import Clock, monotonic
from lanes.core.ring import SLOTS, slot
from lanes.core.ring_map import Assignment, Range, RingMap
from lanes.core.types import Message, Partition, PieceId, Room, Settlement
from lanes.errors import ConfigError, SourceError
from lanes.source import Revoking, SourceEvent, SourceTraits
from lanes_postgres import Log, RangeMap
from lanes_postgres.advisory_locks import key_of
from lanes_postgres.subscription.owned import Owned, lock_name
from lanes_postgres.transactions import alone_async
from memsource.adapters.choices import Choice
from memsource.adapters.world import AdapterWorld
from memsource.checkers.slots import SlotOwner
from memsource.memory.topic import Record
from tests.simulated.postgres.broker import PostgresBroker
from tests.simulated.postgres.client import SimConnection
from tests.simulated.postgres.member import SUBSCRIPTION, SimulatedMember, unit_of
from tests.simulated.postgres.pieces import PieceRow
from tests.simulated.postgres.pieces import key_of as piece_key
from tests.simulated.postgres.server import Blocked, Session
from tests.simulated.postgres.statements import LOG, SCHEMA

OTHER_GROUP: Final = "audit"
"""A group of the same consumers with another map. No process is a member of it."""

CONSUMERS: Final = ("a", "b", "c", "d")

_CALLS: Final = (
    "connect",
    "look",
    "read",
    "members",
    "lock",
    "unlock",
    "verify",
    "pieces",
    "claim",
    "end drain",
    "hand over",
    "store",
    "commit",
    "letter",
)

_PAUSES: Final = (0.0, 0.05, 0.3, 1.0, 3.0)
"""Seconds between two changes of the map."""

_TURN: Final = 0.5
"""Seconds between two looks of the operator after its changes."""

_STANDBY: Final = 0.1
"""Share of the processes that take the name of a running one."""

_HELD: Final = 0.4
"""Share of the runs in which a person locks rows."""

_REFUSED: Final = 0.4
"""Share of the runs in which a trigger refuses changes of rows."""

_HOLDS: Final = (0.3, 1.0, 3.0, 6.0, 12.0)
"""Seconds for which a row is locked, and seconds before the next lock."""

_KEYS: Final = 12
"""The keys of the traffic, whose slots are the ends of ranges."""


class RangedMember(SimulatedMember):
    """A member that owns ranges."""

    def __init__(self, broker: RangedBroker, member: str, consumer: str, lease: float, **arguments: Any) -> None:
        self.consumer = consumer
        super().__init__(broker, member, lease, **arguments, ranges=broker.map.member(consumer))
        self._ranged = broker

    async def open(self) -> SourceTraits:
        traits = await super().open()
        visitor = self._visitor
        lose = visitor.lose

        def judged(owned: Owned, reason: str) -> None:
            self._ranged.losing(self, owned)
            lose(owned, reason)

        setattr(visitor, "lose", judged)  # noqa: B010 - mypy forbids to assign to a method
        return traits

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await super().receive(room)
        for event in events:
            if isinstance(event, Revoking):
                self._ranged.revoking(self, event.partition)
        return events


class RangedBroker(PostgresBroker):
    """A log whose members own ranges of slots.

    Attributes:
        map: The map of the members' group.
        owners: The assignments of the map, with the time from which each one holds.
        claims: Time of each claim, by the name of the piece and the epoch.
    """

    all_calls = _CALLS

    def __init__(self, rng: Random, *, writes: bool, late: bool) -> None:
        super().__init__(rng, writes=writes, late=late)
        log = Log(LOG, schema=SCHEMA)
        self.map = RangeMap(log, group=SUBSCRIPTION)
        self.owners: list[SlotOwner] = []
        self.claims: dict[tuple[str, int], float] = {}
        self._ring = RingMap()
        self._other = RangeMap(log, group=OTHER_GROUP)
        self._changes = rng.choice([3, 6, 12, 25])
        self._first = rng.choice(["before", "before", "after"])
        self._pause = rng.choice(_PAUSES)
        # Ends of ranges at the slots of keys show an end that is left out.
        ends = {slot(f"key-{number}") for number in range(_KEYS)}
        self._ends = sorted(
            {0, SLOTS - 1, SLOTS // 2, *ends, *(each + 1 for each in ends), *(each - 1 for each in ends)}
        )
        # These draws change no other draw of the run.
        self._person = Random(repr((self._changes, self._pause, self._lease, self._arguments, sorted(self._faulty))))
        self._since: dict[str, float] = {}
        self._moved: set[tuple[int, int]] = set()
        self._done: set[tuple[int, int]] = set()

    def bind(self, world: AdapterWorld) -> None:
        super().bind(world)
        world.start(self._operate)
        if self._person.random() < _HELD:
            world.start(self._hold_rows)
        self._refusing = Random(repr((self._changes, sorted(self._faulty), "refusals")))
        if self._refusing.random() < _REFUSED:
            world.start(self._refuse_rows)

    # --- a person in psql

    async def _hold_rows(self) -> None:
        """Lock the row of a piece in a transaction that stays open, again and again."""
        assert self._world is not None, "bind comes first"
        person = self._person
        while True:
            await asyncio.sleep(person.choice(_HOLDS))
            if not self._world.faulty:
                return
            pieces = self._pieces()
            if not pieces or not self.server.up:
                continue
            session = self.server.connect("person", self.now)
            session.begin()
            with suppress(Blocked):
                session.lock_row(piece_key(person.choice(pieces)[0]))
                await asyncio.sleep(person.choice(_HOLDS))
            self.server.terminate(session)

    async def _refuse_rows(self) -> None:
        """Let a trigger refuse the changes of the row of a piece for some time, again and again."""
        assert self._world is not None, "bind comes first"
        while True:
            await asyncio.sleep(self._refusing.choice(_HOLDS))
            if not self._world.faulty:
                return
            if pieces := self._pieces():
                key = piece_key(self._refusing.choice(pieces)[0])
                self.server.refused.add(key)
                await asyncio.sleep(self._refusing.choice(_HOLDS))
                self.server.refused.discard(key)

    # --- the operator

    async def _operate(self) -> None:
        """Change the map at random, and then give the ranges of processes that have gone to others."""
        if self._first == "after":
            await asyncio.sleep(self._rng.choice([0.5, 2.0, 5.0]))
        await self._perform(self._begin_other)
        for _ in range(self._rng.randint(1, 4)):
            await self._perform(self._change)
        while True:
            assert self._world is not None, "bind comes first"
            pause = self._rng.choice((self._pause, *_PAUSES))
            await asyncio.sleep(pause if self._changes and self._world.faulty else _TURN)
            if self._changes and self._world.faulty:
                self._changes -= 1
                await self._perform(self._change)
            await self._perform(self._mend)

    async def _perform(self, act: Any) -> None:
        """Act on a new connection. An operator tries again later."""
        try:
            connection = await SimConnection.connect("operator")
            try:
                await act(connection)
            finally:
                await connection.close()
        except (SourceError, OSError):
            await asyncio.sleep(_TURN)
        except Exception as error:
            # The errors of psycopg.
            if type(error).__module__.partition(".")[0] != "psycopg":
                raise
            await asyncio.sleep(_TURN)

    async def _begin_other(self, connection: AsyncConnection[Any]) -> None:
        for range_, consumer in ((Range(0, SLOTS // 3), "b"), (Range(SLOTS // 3 + 1, SLOTS - 1), "a")):
            await self._other.assign(connection, range_.lo, range_.hi, consumer)
        await alone_async(connection, self._other.beginning([0 for _ in self.partitions]), "operator")

    async def _change(self, connection: AsyncConnection[Any]) -> None:
        ring = RingMap(tuple(await self.map.ranges(connection)))
        rng = self._rng
        what = rng.choice(["move", "move", "part", "part", "part", "split", "free", "free", "straddle", "again"])
        consumer = rng.choice(CONSUMERS[: max(2, len(self._names()))])
        if not ring.owned or (what == "free" and ring.unowned()):
            free = rng.choice(ring.unowned())
            await self._assign(connection, rng.choice([free, self._part(free)]), consumer)
            return
        range_, owner = rng.choice(ring.owned)
        if what == "split" and len(range_) > 1:
            at = next((end for end in rng.sample(self._ends, len(self._ends)) if range_.lo < end <= range_.hi), None)
            if at is not None:
                await self.map.split(connection, at, consumer)
        elif what == "straddle":
            met = self._part(Range(0, SLOTS - 1))
            try:
                await self._assign(connection, met, consumer)
            except ConfigError:
                if list(ring.owned) != list(await self.map.ranges(connection)):
                    self.find("RefusedChangesNothing", f"a refused assignment of {met} to {consumer} changed the map")
        elif what == "again":
            if await self.map.assign(connection, range_.lo, range_.hi, owner):
                self.find("SameOwnerChangesNothing", f"{range_} of {owner} was assigned again, and the map changed")
        else:
            await self._assign(connection, self._part(range_) if what == "part" else range_, consumer)

    def _part(self, range_: Range) -> Range:
        ends = [each for each in self._ends if each in range_] or [range_.lo, range_.hi]
        lo, hi = sorted(self._rng.choices(ends, k=2))
        return Range(lo, hi)

    async def _mend(self, connection: AsyncConnection[Any]) -> None:
        """Give unowned slots to a living process, and after some time also the ranges of names without a process."""
        assert self._world is not None, "bind comes first"
        names, now = self._names(), self.now
        for name in names:
            self._since.pop(name, None)
        if not names:
            return
        ring = RingMap(tuple(await self.map.ranges(connection)))
        over = not self._world.faulty
        for range_ in ring.unowned() if over else []:
            await self._assign(connection, range_, self._rng.choice(names))
        for range_, owner in ring.owned:
            if owner not in names and now >= self._since.setdefault(owner, now) + (0.0 if over else 8.0):
                await self._assign(connection, range_, self._rng.choice(names))

    async def _assign(self, connection: AsyncConnection[Any], range_: Range, consumer: str) -> None:
        await self.map.assign(connection, range_.lo, range_.hi, consumer)

    def _names(self) -> list[str]:
        """The names of the living processes."""
        return sorted({each.consumer for each in self._living()})

    def _living(self) -> list[RangedMember]:
        found = []
        for member in self.members:
            worker = self.worker(member.member)
            if (
                isinstance(member, RangedMember)
                and worker is not None
                and not worker.gone
                and not worker.ended.is_set()
            ):
                found.append(member)
        return found

    # --- members

    def consumers(self) -> dict[str, str]:
        """Return the consumer of each process."""
        found = {each.member: each.consumer for each in self.members if isinstance(each, RangedMember)}
        assert len(found) == len(self.members), "each process has a name of its own"
        return found

    def source(self, member: str, clock: Clock = monotonic) -> RangedMember:
        used = [each.consumer for each in self._living()]
        free = [name for name in CONSUMERS if name not in used]
        name = free[0] if free and not (used and self._rng.random() < _STANDBY) else self._rng.choice(used)
        made = RangedMember(self, member, name, self._lease, **self._arguments)
        self.members.append(made)
        return made

    def _fate(self, member: str, call: str) -> Choice:
        return Choice("deliver") if not member else super()._fate(member, call)

    # --- judgements

    def _pieces(self) -> list[tuple[int, PieceRow]]:
        rows = self.server.rows.items()
        return [
            (key[1], row)
            for key, row in rows
            if isinstance(key, tuple) and key[0] == "piece" and row.group == SUBSCRIPTION
        ]

    def piece_of(self, record: Record) -> int:
        found = self._piece_of(record.partition, record.key)
        return 0 if found is None else found[0]

    def _piece_of(self, partition: int, key: bytes | None) -> tuple[int, PieceRow] | None:
        number = None if key is None else slot(key)
        return next((each for each in self._pieces() if each[1].partition == partition and each[1].has(number)), None)

    def _is_finished(self, record: Record) -> bool:
        found = self._piece_of(record.partition, record.key)
        return found is not None and found[1].finished(record.position)

    def _lock_key(self, partition: Partition) -> int:
        name = lock_name(SCHEMA, LOG, SUBSCRIPTION, partition.id.number)
        return key_of(f"{name}/{partition.id.piece}")

    def on_started(self, member: str, message: Message) -> None:
        """Judge the start of a handler: the piece of its slot is the member's, or waits for the member."""
        source, partition = self._source(member), message.partition
        if source is None or source.owned.get(unit_of(partition)) is not partition:
            return
        found = self._piece_of(partition.id.number, message.key)
        if found is None:
            return
        super().on_started(member, message)
        piece, row = found
        mine = partition.id.piece, partition.fencing_token
        what = f"{member} starts position {message.position} of {partition.id}"
        owner = None if message.key is None else self._ring.find(slot(message.key))
        if row.slots is not None and row.consumer != (None if owner is None else owner.consumer):
            self.find(
                "MapNamesOwners", f"{what}, whose slot {slot(message.key or b'')} has {owner} in the map, and {row}"
            )
        if row.slots is not None and row.consumer is None:
            self.find("OwnedSlotsOnly", f"{what}, whose slot nobody owns")
        if not self._aware(member, source):
            return
        if mine not in ((piece, row.epoch), (row.parent, row.parent_epoch)):
            self.find("OwnerOfItsSlot", f"{what} under epoch {mine[1]}, and its slot is in piece {piece}: {row}")
        if (partition.id.number, message.position) in self._done:
            self.find("SettledStaysSettled", f"{what}, which an owner of its slot has settled before")

    def revoking(self, member: RangedMember, partition: Partition) -> None:
        """Judge that a member gives a whole piece up: the map has named another consumer for all of its slots."""
        piece, row = partition.id.piece, self.server.rows[piece_key(partition.id.piece)]
        if row.slots is not None and (piece, partition.fencing_token) not in self._moved:
            self.find(
                "OnlyMovedSlotsWait", f"{member.member} gives up {partition.id}, which the map leaves to it: {row}"
            )

    def losing(self, member: RangedMember, owned: Owned) -> None:
        """Judge that a member loses a piece without a drain: its lock or its epoch has gone."""
        row = self.server.rows[piece_key(owned.partition.id.piece)]
        if not owned.over and not owned.lost() and row.epoch == owned.epoch:
            self.find("OnlyLostIsLost", f"{member.member} gives up {owned.partition.id} at once, and owns it: {row}")

    def on_settled(self, settlements: Sequence[Settlement]) -> None:
        """Judge confirmed positions: the piece has them, unless a newer owner has claimed it."""
        for settlement in settlements:
            partition = settlement.partition
            row: PieceRow | None = self.server.rows.get(piece_key(partition.id.piece))
            if settlement.floor is None or row is None or row.epoch != partition.fencing_token:
                continue
            if partition.deadline > self.now and row.floor < settlement.floor:
                what = f"{partition.id} is confirmed at {settlement.floor}, and stored at {row.floor}"
                self.find("ConfirmedIsStored", what)

    def _stored(self, session: Session, key: Hashable, before: Any, after: Any) -> None:
        """Judge a change of a piece, and note a change of the map."""
        super()._stored(session, key, before, after)
        assert isinstance(key, tuple)
        if key[:3] == ("assignment", 1, SUBSCRIPTION):
            _, lo, hi, consumer, *_ = after
            self.owners.append(SlotOwner(self.now, lo, hi, consumer))
            self._ring = self._ring.assign(Assignment(Range(lo, hi), consumer))
        if key[0] != "piece" or before is None or after is None or after.group != SUBSCRIPTION:
            return
        mine = [
            position
            for position, message in self.server.log.rows(after.partition).items()
            if before.has(number := None if message.key is None else slot(message.key)) and after.has(number)
        ]
        # An owner may leave out finished messages of other slots.
        missing = [each for each in mine if before.finished(each) and not after.finished(each)]
        if missing:
            what = f"{session.owner} takes the finished positions {missing} out of piece {key[1]}: {before} -> {after}"
            self.find("PositionsRise", what)
        if after.consumer != before.consumer:
            self._moved.add((key[1], before.epoch))
        self._done.update((after.partition, each) for each in mine if after.finished(each))
        if after.epoch > before.epoch:
            self.claims[str(PieceId(LOG, after.partition, key[1])), after.epoch] = self.now
        if after.epoch < before.epoch:
            self.find("EpochsRise", f"{session.owner} gives piece {key[1]} epoch {after.epoch} after {before.epoch}")
