"""Scripts of the statements that ``lanes_postgres`` makes, for the simulated server and for a real server.

A script plays on a ``Stage`` and returns its observations, which must be equal on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import psycopg

from lanes.core.ring import slot
from lanes.core.types import PartitionId, PieceId
from lanes.errors import ConfigError
from lanes.ownership import Fenced, State, StateChange, StateKey, StateLocked
from lanes_postgres import Log, PostgresStates, RangeMap
from lanes_postgres.advisory_locks import _TRY, _UNLOCK, _UNLOCK_ALL, _VERIFY
from lanes_postgres.lock_session import _PREPARE
from lanes_postgres.log.reading import LogTables, Wanted
from lanes_postgres.log.sequencer import sequencing
from lanes_postgres.ring.pieces import _STORE, PieceRow, Pieces
from lanes_postgres.ring.reading import WantedSlots, fetch
from lanes_postgres.ring.slots import MovedSlots, Slots
from lanes_postgres.ring.unowned import count_unowned, look_at_unowned
from lanes_postgres.steps import compose, compose_names, perform_async
from lanes_postgres.subscription.members import _LEAVE, _MEMBERS
from lanes_postgres.subscription.starts import _FIND, decide_starts
from lanes_postgres.subscription.visitor import _CHANNEL
from lanes_postgres.transactions import alone_async
from tests.simulated.postgres.statements import LOG, SCHEMA

Seen = list[Any]
Commit = Callable[[], Awaitable[None]]

KEY: Final = StateKey("billing", PartitionId(LOG, 0), "1")
OTHER: Final = StateKey("billing", PartitionId(LOG, 1), "1")
KEY_OF_1: Final = b"1"
"""The key of the messages in partition 1."""

TABLES: Final = LogTables(SCHEMA, 1, 2)
LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=UTC)
NEVER: Final = datetime(2100, 1, 1, tzinfo=UTC)


class Stage(Protocol):
    """A log of two partitions, on a simulated or a real server. Connections have autocommit."""

    async def connect(self) -> Any:
        """Open a connection."""

    async def append(self, partition: int, *values: bytes) -> None:
        """Append messages in a transaction."""

    async def late(self, partition: int, *values: bytes) -> tuple[Commit, Commit]:
        """Append messages in a transaction that has taken its ticket.

        Return the functions that commit the transaction and roll it back.
        """


Script = Callable[[Stage], Coroutine[Any, Any, Seen]]


@asynccontextmanager
async def two(stage: Stage) -> Any:
    """Two connections, which the end of the block closes."""
    one, other = await stage.connect(), await stage.connect()
    try:
        yield one, other
    finally:
        await one.close()
        await other.close()


def _states(connection: Any) -> PostgresStates:
    @asynccontextmanager
    async def lend() -> Any:
        yield connection

    return PostgresStates(lend, schema=SCHEMA)


def _without_epoch(state: State) -> tuple[Any, ...]:
    return state.floor, [tuple(run) for run in state.completed]


async def _row(connection: Any, query: Any, *parameters: Any) -> Any:
    return await (await connection.execute(query, parameters or None)).fetchone()


# --- states


async def a_store_compares_the_epoch_and_no_floor_falls(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        first, second = _states(one), _states(other)
        seen.append(dict(await first.read([KEY])))
        begun = await first.claim(KEY, 5)
        seen.append(_without_epoch(begun))
        seen.append(await first.store([StateChange(KEY, State(begun.epoch, 8, [(9, 11), (12, 13)]))]))
        seen.append(await first.store([StateChange(KEY, State(begun.epoch, 7, []))]))
        again = await second.claim(KEY, 5)
        seen += [again.epoch > begun.epoch, _without_epoch(again)]
        changes = [StateChange(KEY, State(begun.epoch, 20, [])), StateChange(OTHER, State(1, 3, []))]
        seen.append(await first.store(changes))
        seen.append({key: _without_epoch(state) for key, state in (await first.read([OTHER, KEY])).items()})
    return seen


async def a_claim_is_refused_beside_a_transaction_that_has_stored(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        first, second = _states(one), _states(other)
        begun = await first.claim(KEY, 0)
        async with one.transaction():
            await first.store_in(one, StateChange(KEY, State(begun.epoch, 4, [])))
            try:
                await second.claim(KEY, 0)
            except StateLocked:
                seen.append("locked")
        seen.append(_without_epoch(await second.claim(KEY, 0)))
        try:
            async with one.transaction():
                await first.store_in(one, StateChange(KEY, State(begun.epoch, 9, [])))
        except Fenced:
            seen.append("fenced")
        seen.append(_without_epoch((await second.read([KEY]))[KEY]))
    return seen


# --- locks


async def a_lock_belongs_to_one_session(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        # A session that takes its lock twice would have to free it twice. The adapter never does.
        for connection, query in (
            (one, _TRY),
            (other, _TRY),
            (other, _UNLOCK),
            (one, _UNLOCK),
            (one, _UNLOCK),
            (other, _TRY),
            (one, _TRY),
        ):
            seen.append((await _row(connection, query, 7))[0])
        await _row(other, _UNLOCK_ALL)
        seen.append((await _row(one, _TRY, 7))[0])
        pid, _, locks = await _row(one, _VERIFY)
        seen += [pid == one.pgconn.backend_pid, locks]
        await one.close()
        async with asyncio.timeout(20):
            while not (await _row(other, _TRY, 7))[0]:  # noqa: ASYNC110  # no event tells the end of a session
                await asyncio.sleep(0.01)
        seen.append("free after the end of its session")
    return seen


async def an_idle_session_ends_with_its_locks(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        shown, standby, pid = await _row(one, _PREPARE, "500ms")
        seen += [shown, standby, pid == one.pgconn.backend_pid, (await _row(one, _TRY, 8))[0]]
        await asyncio.sleep(0.3)
        seen.append((await _row(one, _VERIFY))[1:])
        await asyncio.sleep(0.3)
        seen.append((await _row(other, _TRY, 8))[0])
        await asyncio.sleep(0.6)
        seen.append((await _row(other, _TRY, 8))[0])
        try:
            await _row(one, _VERIFY)
        except psycopg.OperationalError:
            seen.append("ended")
        seen.append(one.closed)
    return seen


# --- the log


async def _read_all(connection: Any) -> Seen:
    found = await TABLES.fetch(connection, [Wanted(0, 0, 10), Wanted(1, 0, 10)])
    return [(number, [(each.position, each.value) for each in rows]) for number, rows in sorted(found.items())]


async def positions_follow_the_tickets_and_a_late_commit_is_not_passed(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        await stage.append(0, b"a", b"b")
        commit, _ = await stage.late(0, b"late")
        _, roll_back = await stage.late(0, b"gone")
        await stage.append(0, b"c")
        await stage.append(1, b"x")
        seen.append(await perform_async(one, sequencing(SCHEMA), "script"))
        seen += [await TABLES.ends(one), await _read_all(one)]
        seen.append(await perform_async(other, sequencing(SCHEMA), "script"))
        await commit()
        seen.append(await perform_async(other, sequencing(SCHEMA), "script"))
        await roll_back()
        await stage.append(1, b"y")
        seen.append(await perform_async(one, sequencing(SCHEMA), "script"))
        seen += [await TABLES.ends(one), await TABLES.firsts(one), await _read_all(other)]
        seen.append(sorted((await TABLES.oldest(one, {0: 2, 1: 2})).keys()))
        seen += [dict(await TABLES.since(one, LONG_AGO)), dict(await TABLES.since(one, NEVER))]
        found = await TABLES.fetch(one, [Wanted(0, 1, 2), Wanted(1, 5, 1)])
        seen.append([(each.position, each.value, each.key, each.subject, each.headers) for each in found[0]])
        seen.append(sorted(found))
    return seen


async def a_visit_reads_the_messages_that_fit(stage: Stage) -> Seen:
    seen: Seen = []

    async def visit(connection: Any, starts: dict[int, int], room: int) -> None:
        done, ends, found = await TABLES.visit(connection, starts, room)
        seen.append(
            (done, ends, [(number, [(each.position, each.value) for each in rows]) for number, rows in found.items()])
        )

    async with two(stage) as (one, other):
        await visit(one, {0: 0, 1: 0}, 10)
        await stage.append(0, b"a", b"b")
        await stage.append(1, b"x")
        await stage.append(0, b"c")
        await visit(one, {0: 0, 1: 0}, 3)
        await visit(other, {0: 0, 1: 0}, 4)
        await visit(other, {1: 0, 0: 1}, 4)
        await visit(one, {0: 2}, 1)
        await visit(one, {0: 3, 1: 1}, 4)
        commit, _ = await stage.late(0, b"late")
        await stage.append(0, b"d")
        await visit(one, {0: 3}, 4)
        await commit()
        await visit(one, {0: 4}, 4)
    return seen


async def the_sequencer_notifies_the_readers(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        (channel,) = await _row(one, compose_names(_CHANNEL, SCHEMA))
        one.add_notify_handler(lambda notify: seen.append(notify.pid == other.pgconn.backend_pid))
        await one.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))
        await stage.append(0, b"a")
        await perform_async(other, sequencing(SCHEMA), "script")
        await perform_async(other, sequencing(SCHEMA), "script")
        await asyncio.sleep(0.1)
        await TABLES.ends(one)
        await one.execute("UNLISTEN *")
        await stage.append(0, b"b")
        await perform_async(other, sequencing(SCHEMA), "script")
        await asyncio.sleep(0.1)
        seen.append(await TABLES.ends(one))
    return seen


# --- subscriptions


async def new_members_decide_once_where_they_begin(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        await stage.append(1, b"x", b"y")
        both = await asyncio.gather(
            decide_starts(one, TABLES, "billing", "next", "script"),
            decide_starts(other, TABLES, "billing", "beginning", "script"),
        )
        seen.append(both[0] == both[1])
        await stage.append(0, b"a")
        seen.append(await decide_starts(one, TABLES, "billing", "next", "script") == both[0])
        seen.append(await decide_starts(one, TABLES, "mail", "next", "script"))
        seen.append(await decide_starts(one, TABLES, "audit", LONG_AGO, "script"))
        seen.append(await decide_starts(one, TABLES, "none", NEVER, "script"))
        seen.append(tuple(await _row(one, compose(_FIND, SCHEMA), 1, "mail")))
    return seen


async def members_see_the_living_others(stage: Stage) -> Seen:
    async with two(stage) as (one, other):

        async def tell(connection: Any, member: str, owned: int, waits: bool) -> Seen:
            parameters = {
                "log": 1, "subscription": "billing", "member": member, "owned": owned, "waits": waits, "stale": 3.0,
                "consumer": None,
            }  # fmt: skip
            return list(await (await connection.execute(compose(_MEMBERS, SCHEMA), parameters)).fetchall())

        seen = [await tell(one, "m-1", 2, False), await tell(other, "m-2", 0, True), await tell(one, "m-1", 1, False)]
        await one.execute(compose(_LEAVE, SCHEMA), (1, "billing", "m-1"))
        return [*seen, await tell(other, "m-2", 0, True)]


# --- ranges


class _Consumer:
    """A consumer of the map of the group ``billing``, on one connection."""

    def __init__(self, connection: Any, name: str) -> None:
        @asynccontextmanager
        async def lend() -> Any:
            yield connection

        self.connection = connection
        self.map = RangeMap(Log(LOG, schema=SCHEMA), group="billing")
        self.pieces = Pieces(lend, SCHEMA, 1, "billing", name, "script")
        self.name = name

    async def begin(self) -> None:
        """Make the pieces at position 5 of both partitions."""
        await alone_async(self.connection, self.map.beginning([5, 5]), "script")

    async def assign(self, lo: int, hi: int, consumer: str) -> bool:
        changed: bool = await self.map.assign(self.connection, lo, hi, consumer)
        return changed

    async def look(self) -> list[PieceRow]:
        return await self.pieces.look(self.connection, [])

    async def see(self) -> Seen:
        """Return the pieces of partition 0 as the consumer sees them, without numbers that servers choose."""
        rows = [row for row in await self.look() if row.partition == 0]
        return sorted(
            (str(row.slots), row.consumer or "", row.epoch > 0, row.parent is not None, row.floor) for row in rows
        )

    async def piece(self, slots: str) -> PieceRow:
        return next(row for row in await self.look() if row.partition == 0 and str(row.slots) == slots)

    async def claim(self, slots: str) -> Any:
        """Claim a piece. Return its state, or that the claim is refused."""
        row = await self.piece(slots)
        key = StateKey("billing", PieceId(LOG, 0, row.id), "1")
        try:
            return await self.pieces.claim(key, 0)
        except StateLocked:
            return "refused"

    async def store(self, piece: int, epoch: int, floor: int, *completed: tuple[int, int]) -> object:
        key = StateKey("billing", PieceId(LOG, 0, piece), "1")
        (stored,) = await self.pieces.store([StateChange(key, State(epoch, floor, completed))])
        return stored


async def a_split_copies_the_finished_messages_and_waits_for_the_owner(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        a, b = _Consumer(one, "a"), _Consumer(other, "b")
        seen.append(await a.assign(0, 99, "a"))
        await a.begin()
        await b.begin()
        seen += [await a.see(), await b.see()]
        whole = await a.piece("{[0,100)}")
        state = await a.claim("{[0,100)}")
        seen += [_without_epoch(state), await a.store(whole.id, state.epoch, 7, (8, 9))]
        seen.append(await a.assign(40, 99, "b"))
        seen += [await a.see(), await b.see(), await b.claim("{[40,100)}")]
        # The owner has finished more messages, and has stopped to read the part at position 12.
        seen.append(await a.store(whole.id, state.epoch, 9, (10, 11), (11, 12), (14, 15)))
        await a.pieces.hand_over(whole.id, state.epoch, MovedSlots(Slots(((30, 60),)), 12))
        seen.append(await b.claim("{[40,100)}"))
        await a.pieces.hand_over(whole.id, state.epoch, MovedSlots(Slots(((40, 100),)), 12))
        taken = await b.claim("{[40,100)}")
        seen += [_without_epoch(taken), taken.epoch > state.epoch, await b.see()]
        seen += [await a.store(whole.id, state.epoch - 1, 50), await a.store(whole.id, state.epoch, 9, (10, 11))]
        seen.append(await a.assign(100, 65_535, "b"))
        seen += [await b.see(), await a.see()]
    return seen


async def a_later_owner_of_the_parent_ends_a_drain(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        a, b = _Consumer(one, "a"), _Consumer(other, "b")
        await a.assign(0, 65_535, "a")
        await a.begin()
        first = await a.claim("{[0,65536)}")
        whole = await a.piece("{[0,65536)}")
        await a.store(whole.id, first.epoch, 6)
        await a.assign(0, 9, "b")
        # The second part waits for the owner of the first parent too.
        await b.assign(0, 4, "a")
        seen += [await a.see(), await b.see(), await a.claim("{[0,5)}"), await b.claim("{[5,10)}")]
        part = await b.piece("{[5,10)}")
        assert part.parent is not None
        await b.pieces.end_drain(part.id, part.parent + 1)
        seen.append(await b.claim("{[5,10)}"))
        await b.pieces.end_drain(part.id, part.parent)
        seen.append(_without_epoch(await b.claim("{[5,10)}")))
        again = await a.claim("{[10,65536)}")
        seen += [again.epoch > first.epoch, _without_epoch(await a.claim("{[0,5)}")), await a.see()]
        seen.append(await a.claim("None") != "refused")
    return seen


async def a_release_hands_all_parts_over(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        a, b = _Consumer(one, "a"), _Consumer(other, "b")
        await a.assign(0, 65_535, "a")
        await a.begin()
        state = await a.claim("{[0,65536)}")
        whole = await a.piece("{[0,65536)}")
        await a.assign(10, 19, "b")
        await a.assign(30, 39, "b")
        await a.store(whole.id, state.epoch, 8, (9, 12))
        await a.pieces.hand_over_all(whole.id, state.epoch - 1)
        seen.append(await b.claim("{[10,20)}"))
        await a.pieces.hand_over_all(whole.id, state.epoch)
        seen += [_without_epoch(await b.claim("{[10,20)}")), _without_epoch(await b.claim("{[30,40)}"))]
        try:
            await b.assign(15, 35, "a")
        except ConfigError:
            seen.append("straddles")
        seen += [(each.range.lo, each.range.hi, each.consumer) for each in await a.map.ranges(one)]
        seen += [(event.number, event.range.lo, event.range.hi) for event in await a.map.history(one)]
    return seen


async def a_claim_fails_beside_a_transaction_with_the_row(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        a, b = _Consumer(one, "a"), _Consumer(other, "a")
        await a.assign(0, 65_535, "a")
        await a.begin()
        state = await a.claim("{[0,65536)}")
        async with one.transaction():
            row = await a.piece("{[0,65536)}")
            await one.execute(compose(_STORE, SCHEMA), ([row.id], [state.epoch], [9], ["{}"]))
            seen.append(await b.claim("{[0,65536)}"))
        seen.append(_without_epoch(await b.claim("{[0,65536)}")))
    return seen


async def members_read_the_messages_of_their_slots(stage: Stage) -> Seen:
    seen: Seen = []
    async with two(stage) as (one, other):
        await stage.append(0, b"a", b"b", b"c")
        await stage.append(1, b"x")
        await perform_async(one, sequencing(SCHEMA), "script")
        every, none = Slots(((0, 65_536),)), Slots()
        for number, start, end, most, slots in (
            (0, 0, 9, 2, every),
            (0, 1, 2, 9, every),
            (0, 0, 9, 9, none),
            (1, 0, 9, 9, Slots(((0, slot(KEY_OF_1)), (slot(KEY_OF_1) + 1, 65_536)))),
            (1, 0, 9, 9, Slots(((slot(KEY_OF_1), slot(KEY_OF_1) + 1),))),
        ):
            (found,) = await fetch(other, TABLES, [WantedSlots(number, start, end, most, slots, True)])
            seen.append((found.first, [(each.position, each.value) for each in found.messages], found.read))
        map_ = _Consumer(one, "a")
        await map_.assign(slot(KEY_OF_1), slot(KEY_OF_1), "a")
        await alone_async(one, map_.map.beginning([1, 0]), "script")
        seen.append(await count_unowned(one, SCHEMA, 1, "billing"))
        seen += [await look_at_unowned(one, SCHEMA, 1, "billing", [3, 1]) for _ in range(2)]
    return seen


SCRIPTS: Final[tuple[Script, ...]] = (
    a_store_compares_the_epoch_and_no_floor_falls,
    a_claim_is_refused_beside_a_transaction_that_has_stored,
    a_lock_belongs_to_one_session,
    an_idle_session_ends_with_its_locks,
    positions_follow_the_tickets_and_a_late_commit_is_not_passed,
    a_visit_reads_the_messages_that_fit,
    the_sequencer_notifies_the_readers,
    new_members_decide_once_where_they_begin,
    members_see_the_living_others,
    a_split_copies_the_finished_messages_and_waits_for_the_owner,
    a_later_owner_of_the_parent_ends_a_drain,
    a_release_hands_all_parts_over,
    a_claim_fails_beside_a_transaction_with_the_row,
    members_read_the_messages_of_their_slots,
)
