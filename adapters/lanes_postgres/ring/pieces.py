"""Stores the pieces of a group: slots, owners, epochs, drains and positions; see docs/model/ranges.md."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import tuple_row
from psycopg.types.numeric import Int4, Int8

from lanes.core.ring_map import Range, RingMap
from lanes.errors import SourceError
from lanes.ownership import State, StateChange, StateKey, StateLocked
from lanes_postgres.attempts import Connect
from lanes_postgres.cancellation import cancelled_once
from lanes_postgres.errors import is_about_statement, lanes_error
from lanes_postgres.ring.shared_calls import SharedCalls
from lanes_postgres.ring.slots import MovedSlots, Slots
from lanes_postgres.states import array_of, runs_of
from lanes_postgres.steps import Result, Statement, Steps, compose, compose_names
from lanes_postgres.transactions import alone_async

RING: Final = "ring"
"""Payload of the notification that makes the members read the rows of the pieces."""

_NOTIFY: Final[LiteralString] = "SELECT pg_notify('lanes_log_' || '{schema}.lanes_log_pending'::regclass::oid, 'ring')"

# The timeout for a row is shorter than the timeout for the map, because other hand-overs wait for the map meanwhile.
_GROUP_LOCK: Final[LiteralString] = (
    "SELECT pg_advisory_xact_lock(hashtextextended(%s, %s)), set_config('lock_timeout', %s, true)"
)
_BEGUN: Final[LiteralString] = (
    "SELECT EXISTS (SELECT FROM {schema}.lanes_ring_pieces WHERE log = %s AND subscription = %s)"
)
_BEGIN: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_ring_pieces (log, subscription, partition, slots, consumer, floor) "
    "SELECT %s, %s, number - 1, piece.slots::int4multirange, piece.consumer, floor "
    "FROM unnest(%s::bigint[]) WITH ORDINALITY AS start (floor, number), "
    "unnest(%s::text[], %s::text[]) AS piece (slots, consumer)"
)
# Lock the rows, so that no owner stores a position between the copy and the change of the slots. All statements lock
# rows in the same order.
_LOCK: Final[LiteralString] = (
    "SELECT count(*) FROM (SELECT FROM {schema}.lanes_ring_pieces WHERE log = %s AND subscription = %s "
    "AND slots && int4range(%s, %s, '[]') ORDER BY id FOR UPDATE) AS locked"
)
_COPY: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_ring_pieces "
    "(log, subscription, partition, slots, consumer, floor, completed, parent, parent_epoch) "
    "SELECT log, subscription, partition, slots * int4multirange(int4range(%(lo)s, %(hi)s, '[]')), %(consumer)s, "
    # No member has acquired a piece with a drain, so its new part waits for the same owner.
    "floor, completed, CASE WHEN parent IS NOT NULL THEN parent WHEN epoch > 0 THEN id END, "
    "CASE WHEN parent IS NOT NULL THEN parent_epoch WHEN epoch > 0 THEN epoch END "
    "FROM {schema}.lanes_ring_pieces WHERE log = %(log)s AND subscription = %(group)s "
    "AND slots && int4range(%(lo)s, %(hi)s, '[]') AND NOT slots <@ int4range(%(lo)s, %(hi)s, '[]')"
)
_CUT: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces SET slots = slots - int4multirange(int4range(%(lo)s, %(hi)s, '[]')) "
    "WHERE log = %(log)s AND subscription = %(group)s "
    "AND slots && int4range(%(lo)s, %(hi)s, '[]') AND NOT slots <@ int4range(%(lo)s, %(hi)s, '[]')"
)
_MOVE: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces SET consumer = %(consumer)s WHERE log = %(log)s AND subscription = %(group)s "
    "AND slots <@ int4range(%(lo)s, %(hi)s, '[]')"
)
# If a later owner has acquired the lock of the parent, the former owner has lost this lock.
_DRAINED: Final[LiteralString] = (
    "EXISTS (SELECT FROM {schema}.lanes_ring_pieces AS former WHERE former.id = piece.parent "
    "AND former.epoch > piece.parent_epoch)"
)
_LOOK: Final[LiteralString] = (
    "SELECT id, partition, slots::text, consumer, epoch, CASE WHEN NOT " + _DRAINED + " THEN parent END, floor "
    "FROM {schema}.lanes_ring_pieces AS piece WHERE log = %s AND subscription = %s AND "
    "(consumer = %s OR slots IS NULL OR ARRAY[id, parent] && %s::bigint[]) ORDER BY id"
)
# A statement must see all earlier commits, even if the database has a stricter default isolation.
_READ_COMMITTED: Final[LiteralString] = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
# A process that is frozen in a transaction would keep the locks of rows and of the map, and other members would wait.
BOUNDED: Final[LiteralString] = _READ_COMMITTED + "; SET LOCAL idle_in_transaction_session_timeout TO '5s'"
TRIES: Final[LiteralString] = BOUNDED + "; SET LOCAL lock_timeout TO '10ms'"
# An open transaction of a person may lock the row of one piece.
_STORES: Final[LiteralString] = BOUNDED + "; SET LOCAL lock_timeout TO '1s'"
_HANDS_OVER: Final[LiteralString] = BOUNDED + "; SET LOCAL lock_timeout TO '5s'"
_PART_WAIT: Final = "200ms"
"""Maximum time for which a hand-over waits for the row of a part."""

_CLAIMS: Final[LiteralString] = TRIES + "; SET LOCAL synchronous_commit TO on"
_CLAIM: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces AS piece SET epoch = nextval('{schema}.lanes_ring_epochs'), parent = NULL, "
    "parent_epoch = NULL WHERE id = %s AND (slots IS NULL OR consumer = %s) "
    "AND (parent IS NULL OR " + _DRAINED + ") RETURNING epoch, floor, completed::text, slots::text"
)
_END_DRAIN: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces SET parent = NULL, parent_epoch = NULL WHERE id = %s AND parent = %s"
)
# An assignment locks the same rows. Both statements lock the rows in the order of their numbers, which prevents a
# deadlock.
_STORE: Final[LiteralString] = (
    "WITH new AS MATERIALIZED (SELECT kept.id, start.floor, start.completed::bigint[] "
    "FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::text[]) AS start (id, epoch, floor, completed) "
    "JOIN {schema}.lanes_ring_pieces AS kept USING (id, epoch) WHERE kept.floor < start.floor "
    "OR kept.floor = start.floor AND kept.completed <> start.completed::bigint[] "
    "ORDER BY kept.id FOR NO KEY UPDATE OF kept), "
    "stored AS (UPDATE {schema}.lanes_ring_pieces AS kept SET floor = new.floor, completed = new.completed, "
    "stored = clock_timestamp() FROM new WHERE kept.id = new.id RETURNING kept.id) SELECT array_agg(id) FROM stored"
)
_LOCK_FREE: Final[LiteralString] = (
    "SELECT array_agg(id) FROM (SELECT id FROM {schema}.lanes_ring_pieces WHERE id = ANY(%s::bigint[]) ORDER BY id "
    "FOR NO KEY UPDATE SKIP LOCKED) AS free"
)
_EPOCHS: Final[LiteralString] = (
    "SELECT array_agg(id), array_agg(epoch) FROM {schema}.lanes_ring_pieces WHERE id = ANY(%s::bigint[])"
)
_HAND_OVER_ALL: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces AS part SET floor = piece.floor, completed = piece.completed, parent = NULL, "
    "parent_epoch = NULL FROM {schema}.lanes_ring_pieces AS piece "
    "JOIN unnest(%s::bigint[], %s::bigint[]) AS owned (id, epoch) USING (id, epoch) "
    "WHERE part.parent = piece.id AND part.parent_epoch = piece.epoch"
)
_HAND_OVER: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces AS part SET floor = least(piece.floor, %(below)s), completed = ARRAY("
    # The array ``completed`` contains the start of each finished range at an odd index, and its end at the next index.
    # The owner has read all messages below the bound, so its ranges apply there. Above the bound, the part keeps the
    # ranges that the owner received from an earlier owner.
    "SELECT bound FROM unnest((SELECT coalesce(range_agg(run), '{{}}') FROM ("
    "SELECT int8range(piece.completed[n], least(piece.completed[n + 1], %(below)s)) AS run "
    "FROM generate_series(1, cardinality(piece.completed), 2) AS n WHERE piece.completed[n] < %(below)s UNION ALL "
    "SELECT int8range(greatest(part.completed[n], %(below)s), part.completed[n + 1]) "
    "FROM generate_series(1, cardinality(part.completed), 2) AS n WHERE part.completed[n + 1] > %(below)s) AS runs)) "
    "AS run, LATERAL (VALUES (lower(run)), (upper(run))) AS bounds (bound) ORDER BY bound), "
    "parent = NULL, parent_epoch = NULL "
    "FROM {schema}.lanes_ring_pieces AS piece WHERE piece.id = %(id)s AND piece.epoch = %(epoch)s "
    "AND part.parent = %(id)s AND part.parent_epoch = %(epoch)s AND part.slots <@ %(slots)s::int4multirange"
)


class PieceError(SourceError):
    """Error: the server refuses a statement about one piece, or its row is unreadable. Other pieces may succeed."""


class RowLocked(StateLocked):
    """Error: a transaction locks the row of a piece."""


class PieceRow(NamedTuple):
    """The database row of a piece.

    Attributes:
        id: Number of the piece.
        partition: Number of the partition of the piece.
        slots: Slots of the piece. ``None`` = the messages without a key.
        consumer: Owner of the slots in the map. ``None`` = no owner. For messages without a key, ``None`` = any owner.
        epoch: Number of the last acquisition of the piece; 0 = never acquired.
        parent: Number of the parent piece, whose owner may still handle messages of this piece; ``None`` = no drain.
        floor: Stored position of the piece.
    """

    id: int
    partition: int
    slots: Slots | None
    consumer: str | None
    epoch: int
    parent: int | None
    floor: int


def locking(schema: str, log: int, group: str, rows: str = "5s") -> Steps[None]:
    """Block other changes of a group's map, and hand-overs, until the transaction ends.

    ``rows`` limits the time that each later statement of the transaction waits for a row.
    """
    yield Statement(_GROUP_LOCK.encode(), (f"lanes ring {schema}/{group}", Int4(log), rows))


def has_begun(schema: str, log: int, group: str) -> Steps[bool]:
    """Return whether a group has pieces."""
    found = yield Statement(compose(_BEGUN, schema), (Int4(log), group))
    assert found is not None, "a SELECT of an expression returns a row"
    return bool(found[0])


def beginning(schema: str, log: int, group: str, ring: RingMap, starts: Sequence[int]) -> Steps[None]:
    """Create the pieces of each partition: the owned ranges, the unowned slots, and the messages without a key."""
    pieces: list[tuple[str | None, str | None]] = [(str(Slots.of([each.range])), each.consumer) for each in ring.owned]
    if unowned := ring.unowned():
        pieces.append((str(Slots.of(unowned)), None))
    pieces.append((None, None))
    slots, consumers = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    yield Statement(compose(_BEGIN, schema), (Int4(log), group, list(starts), slots, consumers))


def assigning(schema: str, log: int, group: str, wanted: Range, consumer: str) -> Steps[None]:
    """Give the slots of a range to a consumer, in all pieces.

    A moved part of a piece becomes a new piece with a drain.
    """
    yield Statement(compose(_LOCK, schema), (Int4(log), group, Int4(wanted.lo), Int4(wanted.hi)))
    place = {"log": Int4(log), "group": group, "lo": Int4(wanted.lo), "hi": Int4(wanted.hi), "consumer": consumer}
    for step in (_COPY, _CUT, _MOVE):
        yield Statement(compose(step, schema), place)  # type: ignore[arg-type]
    yield Statement(compose_names(_NOTIFY, schema), ())


class Pieces:
    """The pieces that one consumer of a group may own. Needs asyncio.

    The methods raise ``SourceError`` if the database does not answer, and ``PieceError`` if the database refuses a
    statement.

    Args:
        connect: Function that returns a context manager with a connection.
        schema: Schema of the tables.
        log: Number of the log.
        group: Name of the group.
        consumer: Name of the consumer.
        name: Name of the source, for errors.
    """

    def __init__(self, connect: Connect, schema: str, log: int, group: str, consumer: str, name: str) -> None:
        self._connect = connect
        self._schema = schema
        self._place = (log, group)
        self._consumer = consumer
        self._name = name
        self.claimed: dict[int, Slots | None] = {}
        # Share these calls, because each call needs a connection, and a member may release hundreds of pieces at once.
        turn = asyncio.Lock()
        self._parts: SharedCalls[dict[str, object]] = SharedCalls(turn, self._hand_over_parts)
        self._drained: SharedCalls[tuple[int, int]] = SharedCalls(turn, self._hand_over_drained)
        self._notices: SharedCalls[None] = SharedCalls(turn, self._notify_once)

    def __repr__(self) -> str:
        return f"<Pieces of {self._consumer!r} of {self._name}>"

    async def look(self, connection: AsyncConnection[Any], owned: Sequence[int]) -> list[PieceRow]:
        """Return the consumer's pieces by the map, the pieces without a key, the ``owned`` pieces, and their parts."""
        async with connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(compose(_LOOK, self._schema), (*self._place, self._consumer, list(owned)))
            return [
                PieceRow(id_, number, None if slots is None else Slots.parse(slots), *rest)
                for id_, number, slots, *rest in await cursor.fetchall()
            ]

    async def claim(self, key: StateKey, start: int) -> State:
        """Raise the epoch of a piece and return its state; see ``lanes.ownership.StateStore.claim``.

        Args:
            key: Key of the state, whose partition id names the piece.
            start: Ignored, because the piece exists.

        Returns:
            The state. The attribute ``claimed`` contains the slots of the piece at the time of the claim.

        Raises:
            StateLocked: The map names another consumer, the former owner may still handle messages of the piece, or a
                transaction holds the row.
        """
        return await self._trying(key.partition.piece, self._claiming(key.partition.piece))

    def _claiming(self, piece: int) -> Steps[State]:
        yield Statement(_CLAIMS.encode())
        found = yield Statement(compose_names(_CLAIM, self._schema), (Int8(piece), self._consumer))
        if found is None:
            raise StateLocked(f"{self._name}: piece {piece} belongs to another consumer, or its former owner drains it")
        epoch, floor, completed, slots = found
        try:
            runs = runs_of(completed)
        except ValueError:
            # The transaction changes nothing, so the piece keeps its former epoch.
            raise PieceError(
                f"{self._name}: piece {piece} has the finished positions {completed}, which are no runs"
            ) from None
        self.claimed[piece] = None if slots is None else Slots.parse(slots)
        return State(epoch, floor, runs)

    async def end_drain(self, piece: int, parent: int) -> None:
        """End the drain of a piece.

        The caller has the lock of the parent piece, so the former owner has lost this lock.

        Raises ``StateLocked`` if a transaction holds the row.
        """
        await self._trying(piece, self._ending_drain(piece, parent))

    def _ending_drain(self, piece: int, parent: int) -> Steps[None]:
        yield Statement(TRIES.encode())
        yield Statement(compose(_END_DRAIN, self._schema), (Int8(piece), Int8(parent)))
        yield from self._notifying()

    async def _trying(self, piece: int, steps: Steps[Result]) -> Result:
        try:
            return await self._perform(steps)
        except PieceError as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise RowLocked(f"{self._name}: a transaction holds the row of piece {piece}") from error
            raise

    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool | PieceError]:
        """Write the states of pieces whose epochs are unchanged; see ``lanes.ownership.StateStore.store``.

        If the server refuses a state, the call still writes the other states.

        Args:
            changes: At most one change for each piece.

        Returns:
            One answer for each change. ``False`` = another process has acquired the piece. An error = the server
            refuses the state, or a transaction holds the row.

        Raises:
            SourceError: The database does not answer, or another transaction locks the table. The call has stored no
                state.
        """
        return await self._stored(changes, all_rows=True)

    async def _stored(self, changes: Sequence[StateChange], *, all_rows: bool) -> list[bool | PieceError]:
        """Write states together, except states whose rows a transaction locks.

        After a refusal, write the states in halves.
        """
        try:
            return await self._perform(self._storing(changes, all_rows=all_rows))
        except PieceError as error:
            if all_rows and isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                await self._check_table(changes)
                return await self._stored(changes, all_rows=False)
            if len(changes) == 1:
                return [error]
        half = len(changes) // 2
        first = await self._stored(changes[:half], all_rows=all_rows)
        return first + await self._stored(changes[half:], all_rows=all_rows)

    async def _check_table(self, changes: Sequence[StateChange]) -> None:
        """Raise ``SourceError`` if a transaction locks the whole table.

        No other process can acquire a piece meanwhile.
        """
        try:
            await self._perform(self._finding_free([change.key.partition.piece for change in changes]))
        except PieceError as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise SourceError(
                    f"{self._name}: a transaction locks the table lanes_ring_pieces, and no position is stored until "
                    "its end",
                    retryable=True,
                ) from error
            raise

    def _finding_free(self, pieces: list[int]) -> Steps[set[int]]:
        """Lock the rows of pieces that no other transaction locks, and return the numbers of these pieces."""
        yield Statement(_STORES.encode())
        found = yield Statement(compose(_LOCK_FREE, self._schema), (pieces,))
        return set((found and found[0]) or ())

    def _storing(self, changes: Sequence[StateChange], *, all_rows: bool) -> Steps[list[bool | PieceError]]:
        free = {change.key.partition.piece for change in changes}
        if all_rows:
            yield Statement(_STORES.encode())
        else:
            free = yield from self._finding_free(list(free))
        done = yield from self._storing_free([each for each in changes if each.key.partition.piece in free])
        return [done.get(each.key.partition.piece) or self._not_stored(each, free) for each in changes]

    def _not_stored(self, change: StateChange, free: Collection[int]) -> bool | PieceError:
        piece = change.key.partition.piece
        if piece in free:
            return False
        return PieceError(f"{self._name}: a transaction holds the row of piece {piece}", retryable=True)

    def _storing_free(self, changes: Sequence[StateChange]) -> Steps[dict[int, bool]]:
        ordered = sorted(changes, key=lambda change: change.key.partition.piece)
        ids = [change.key.partition.piece for change in ordered]
        epochs, floors = [each.state.epoch for each in ordered], [each.state.floor for each in ordered]
        runs = [array_of(each.state.completed) for each in ordered]
        found = yield Statement(compose(_STORE, self._schema), (ids, epochs, floors, runs))
        stored = set((found and found[0]) or ())
        if len(stored) == len(changes):
            return dict.fromkeys(ids, True)
        # The row already has the position, or another process has acquired the piece.
        known = yield Statement(compose(_EPOCHS, self._schema), (ids,))
        assert known is not None, "an aggregate returns a row"
        now = dict(zip(known[0] or (), known[1] or (), strict=True))
        return {piece: piece in stored or now.get(piece) == epoch for piece, epoch in zip(ids, epochs, strict=True)}

    async def hand_over(self, piece: int, epoch: int, moved: MovedSlots) -> None:
        """Copy the stored position of a piece to the parts that have moved, and end their drains.

        The call hands over only pieces whose slots have all moved. Concurrent calls share a transaction, because the
        handlers of a moved range often end together.
        """
        await self._parts(
            {"id": Int8(piece), "epoch": Int8(epoch), "slots": str(moved.slots), "below": Int8(moved.below)}
        )

    async def _hand_over_parts(self, places: Sequence[dict[str, object]]) -> None:
        await self._perform(self._handing_over(_HAND_OVER, places))

    async def hand_over_all(self, piece: int, epoch: int) -> None:
        """Copy the stored position of a drained piece to all pieces that wait for its drain, and end their drains.

        The owner has not learned of the split of these pieces, and has delivered their messages up to its own position.
        Concurrent calls share a statement, because a stopping member releases all of its pieces at the same time.
        """
        await self._drained((piece, epoch))

    async def _hand_over_drained(self, drained: Sequence[tuple[int, int]]) -> None:
        pieces, epochs = [piece for piece, _ in drained], [epoch for _, epoch in drained]
        await self._perform(self._handing_over(_HAND_OVER_ALL, [(pieces, epochs)]))

    def _handing_over(self, text: LiteralString, parameters: Sequence[Any]) -> Steps[None]:
        # Block assignments. A concurrent split of a part would create a piece that the UPDATE does not see, and the
        # drain of this piece would never end.
        yield Statement(_HANDS_OVER.encode())
        yield from locking(self._schema, *self._place, rows=_PART_WAIT)
        for each in parameters:
            yield Statement(compose(text, self._schema), each)
        yield from self._notifying()

    async def notify(self) -> None:
        """Notify all members that a piece may be free. Concurrent calls share a statement."""
        await self._notices(None)

    async def _notify_once(self, notices: Sequence[None]) -> None:
        await self._perform(self._notifying())

    def _notifying(self) -> Steps[None]:
        yield Statement(compose_names(_NOTIFY, self._schema), ())

    async def _perform(self, steps: Steps[Result]) -> Result:
        return await cancelled_once(self._on_connection(steps))

    async def _on_connection(self, steps: Steps[Result]) -> Result:
        try:
            async with self._connect() as connection:
                return await alone_async(connection, steps, self._name)
        except psycopg.Error as error:
            raise lanes_error(self._name, error) from error
        except PieceError:
            raise
        except SourceError as error:
            if not is_about_statement(error):
                raise
            raise PieceError(str(error), retryable=error.retryable) from error.__cause__
