"""The demo's log in PostgreSQL whose members own ranges of the ring: the map, and the pieces that the members own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, LiteralString

from demo.brokers.broker import Left
from demo.brokers.postgres import MEMBERS, PostgresBroker, application_name
from demo.errors import DemoError, NoAnswer
from demo.membership import Member, Snapshot
from lanes.clock import monotonic
from lanes.errors import ConfigError, LanesError
from lanes.ring import SLOTS, Assignment, Range
from lanes_postgres import RangeMap
from lanes_postgres.advisory_locks import key_of
from lanes_postgres.subscription.owned import lock_name

RANGES_EACH: Final = 4
"""Number of ranges of each member at the start."""

# Pieces pass messages of other members a second later, so positions alone say nothing about a piece.
_LEFT: Final[LiteralString] = (
    "SELECT coalesce((SELECT sum(run) FROM {schema}.lanes_log_pending), 0), (SELECT count(*) "
    "FROM {schema}.lanes_ring_pieces AS piece JOIN {schema}.lanes_log_entries AS entry "
    "ON entry.partition = piece.partition AND entry.position + entry.run > piece.floor "
    "JOIN {schema}.lanes_log_messages AS message USING (batch) WHERE entry.position + message.index >= piece.floor "
    "AND CASE WHEN piece.slots IS NULL THEN message.slot IS NULL ELSE message.slot <@ piece.slots END), "
    "coalesce((SELECT sum(floor) FROM (SELECT min(floor) AS floor FROM {schema}.lanes_ring_pieces GROUP BY partition) "
    "AS lowest), 0), (SELECT count(*) FROM {schema}.lanes_ring_pieces)"
)
_PIECES: Final[LiteralString] = (
    "SELECT id, partition, consumer, parent IS NOT NULL FROM {schema}.lanes_ring_pieces ORDER BY id"
)


class RangedBroker(PostgresBroker):
    """A ``PostgresBroker`` with a map of ranges. After ``open`` each of the first members owns some ranges.

    ``partitions`` is the number of pieces at the last look.
    """

    def __init__(self, server: str, name: str, partitions: int, members: int) -> None:
        super().__init__(server, name, partitions)
        self.map = RangeMap(self.log, group=self.durable)
        self._members = members

    async def open(self) -> None:
        """Connect, make the log, and assign the ranges to the members in turn; see ``Broker.open``."""
        await super().open()
        count = RANGES_EACH * self._members
        bounds = [number * SLOTS // count for number in range(count + 1)]
        for number, (lo, after) in enumerate(pairwise(bounds)):
            await self.assign(Range(lo, after - 1), f"member-{number % self._members + 1}")

    async def assign(self, wanted: Range, member: str) -> None:
        """Give a range to a member. Raises ``NoAnswer`` while the server is unreachable."""
        try:
            async with self.asking() as connection:
                await self.map.assign(connection, wanted.lo, wanted.hi, member)
        except ConfigError as error:
            raise DemoError(f"{error}: do not change the map during the demo") from None
        except LanesError as error:
            self.connected = False
            raise NoAnswer(str(error)) from None

    async def owned(self) -> Sequence[Assignment]:
        """Return the owner of each range. Raises ``NoAnswer`` while the server is unreachable."""
        try:
            async with self.asking() as connection:
                return await self.map.ranges(connection)
        except LanesError as error:
            self.connected = False
            raise NoAnswer(str(error)) from None

    async def give_away(self, member: str, others: Sequence[str]) -> None:
        """Assign the ranges of a member to the other members in turn.

        Raises ``NoAnswer`` while the server is unreachable.
        """
        mine = [each.range for each in await self.owned() if each.consumer == member]
        for number, each in enumerate(mine):
            await self.assign(each, others[number % len(others)])

    async def give_part(self, member: str, other: str) -> None:
        """Give the upper half of a member's widest range to another member. Raises ``NoAnswer`` like ``give_away``."""
        mine = [each.range for each in await self.owned() if each.consumer == member]
        widest = max(mine, key=len)
        if len(widest) > 1:
            await self.assign(Range((widest.lo + widest.hi + 1) // 2, widest.hi), other)

    async def left(self) -> Left | None:
        """Return the number of messages at or above the positions of their pieces; see ``Broker.left``."""
        async with self.asking() as connection:
            row = await self.row(connection, _LEFT)
        assert row is not None, "a SELECT of expressions returns a row"
        waiting, above, floors, pieces = row
        return Left(pending=int(waiting) + above, unacknowledged=0, floor=int(floors)) if pieces else None

    async def group(self) -> Snapshot:
        """Return the sessions of the members and their locked pieces; see ``GroupBroker.group``.

        The group is stable if the owner in the map has locked each piece, and no piece drains.
        """
        asked = monotonic()
        prefix = application_name(self.stream, "")
        async with self.asking() as connection:
            rows = await (await connection.execute(MEMBERS, (prefix,))).fetchall()
            pieces = await (await connection.execute(self.query(_PIECES))).fetchall()
        places = {}
        for number, partition, *_ in pieces:
            lock = f"{lock_name(self.stream, self.stream, self.durable, partition)}/{number}"
            places[key_of(lock)] = number, (self.stream, f"{partition}#{number}")
        holders: dict[int, str] = {}
        members = {}
        for name, session, keys in rows:
            member, held = name.removeprefix(prefix), [places[key] for key in keys if key in places]
            members[member] = Member(session, frozenset(place for _, place in held))
            holders |= {number: member for number, _ in held}
        self.partitions = len(pieces)
        settled = bool(pieces) and all(
            not drains and (holders.get(number) == consumer if consumer is not None else number in holders)
            for number, _, consumer, drains in pieces
        )
        return Snapshot(asked, monotonic(), "STABLE" if settled else "MOVING", members, sessions=True)
