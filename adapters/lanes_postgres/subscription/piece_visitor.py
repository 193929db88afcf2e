"""Runs the task of a member with ranges. The task follows the map: it acquires pieces, and releases moved pieces."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from lanes.clock import monotonic
from lanes.core.types import PieceId
from lanes.errors import LanesError, SourceError
from lanes.ownership import StateKey, StateLocked, acquire
from lanes.source import RevokingPart
from lanes_postgres.errors import is_about_statement
from lanes_postgres.ring.finished_attempts import BEGINNING, drop_finished
from lanes_postgres.ring.pieces import RING, PieceError, PieceRow, Pieces, RowLocked
from lanes_postgres.ring.reading import FoundSlots, WantedSlots, fetch
from lanes_postgres.ring.slots import MovedSlots, Slots
from lanes_postgres.ring.unowned import look_at_unowned
from lanes_postgres.subscription.owned import Owned, lock_name
from lanes_postgres.subscription.owned_piece import OwnedPiece, Owners
from lanes_postgres.subscription.visitor import LONGEST_COOL, TOLD, TRIES, Visitor
from lanes_postgres.subscription.visits import Hold, acquirable, given_up, waits

log = logging.getLogger("lanes.postgres")

_AT_ONCE: Final = 4
"""Number of partitions whose pieces a member acquires concurrently. Each concurrent claim needs a separate connection.
"""

_HANDS_OVER_WITHIN: Final = 4.0
_HAND_OVER_AGAIN: Final = 0.1
"""Seconds during which a release retries the hand-over of a part with a locked row, and the pause before each retry.
"""

_COUNT_EVERY: Final = 10.0
"""Seconds between two counts of the messages in slots without an owner, and between two deletions of attempts."""

_NOT_RAISED: Final = "the position of slots without an owner is not raised, so the log keeps their messages"

LONGEST_PAUSE: Final = 60.0
"""Maximum seconds for which a member skips a piece with a fault. The first pause is 1 s, and each later pause is
longer.
"""

_SCAN: Final = 5_000
"""Maximum number of positions that one read examines."""

_LEAST: Final = 50
"""Minimum limit of the messages that one read may return."""

_CHUNK: Final = 500
"""Minimum number of messages that a request reads, if the log has enough messages. A request examines hundreds of
pieces.
"""


class Fault(NamedTuple):
    """A fault of one piece. The member skips the piece for some time.

    Attributes:
        text: The error.
        pause: Seconds for which the member skips the piece.
        until: Time at which the member tries to acquire the piece again.
    """

    text: str
    pause: float
    until: float


@dataclass(eq=False, repr=False, kw_only=True)
class PieceVisitor(Visitor):
    """Acquires pieces and reads their messages; see ``Visitor``. ``docs/model/ranges.md`` describes the protocol.

    The members share the pieces without a key like whole partitions. The map decides the owners of all other pieces.

    Attributes:
        pieces: Database access to the pieces of the group.
        consumer: Name of the consumer in the map.
        unowned: Number of messages in slots without an owner, at the last count. ``None`` = no count yet.
    """

    pieces: Pieces
    consumer: str
    unowned: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counted_at = -math.inf
        # The share of the messages that had the requested slots, in the last reads.
        self._found = 1.0
        self._tried = 0
        self._attempts_after = BEGINNING
        self._faults: dict[int, Fault] = {}
        # Time of the first claim that found the row of a piece locked.
        self._locked_since: dict[int, float] = {}
        self._no_claims = ""
        self._not_raised = ""
        self._mapped = True

    def _told(self, backend: int, payload: str) -> None:
        super()._told(backend, payload)
        if payload == RING:
            # React to this member's own notifications too, because a piece that it has handed over may return to it.
            self._looked_at = -math.inf

    # --- ownership

    async def _share(self, connection: AsyncConnection[Any]) -> None:
        """Acquire and give up pieces by the map, and share the pieces without a key with the other members."""
        try:
            if self._silent:
                await self._speak_again()
        except SourceError as error:
            if not error.retryable:
                raise
        await self._exchange(connection, len(self._keyless()))
        await self._count(connection)
        rows = await self.pieces.look(connection, list(self.owned))
        self._follow(rows)
        self._note_map(rows)
        mine = {row.id for row in rows if row.slots is None or row.consumer == self.consumer}
        self._faults = {piece: fault for piece, fault in self._faults.items() if piece in mine}
        self._locked_since = {piece: since for piece, since in self._locked_since.items() if piece in mine}
        if not self._silent:
            await self._acquire_pieces(connection, rows)
        keyless = self._keyless()
        self._waits = waits(len(keyless), self.tables.partitions, len(self._others))
        now = monotonic()
        holds = {unit: Hold(each.since, each.got_on()) for unit, each in keyless.items() if not each.revoked}
        for unit in given_up(holds, now, self.time_budget, self.tables.partitions, self._others):
            self.revoke(self.owned[unit])

    def _note_map(self, rows: Sequence[PieceRow]) -> None:
        """Log a warning if the map gives this consumer no slots, because its name may be misspelt."""
        mapped, self._mapped = self._mapped, any(row.consumer == self.consumer for row in rows)
        if mapped and not self._mapped:
            log.warning(
                "%s: the map gives consumer %r no slots, so it handles only messages without a key; correct the name, "
                "or assign slots by `lanes ring assign`",
                self.name,
                self.consumer,
            )

    async def _acquire_pieces(self, connection: AsyncConnection[Any], rows: Sequence[PieceRow]) -> None:
        self._acquiring = True
        try:
            await self._acquire_mapped(rows)
            for row in self._free(rows):
                if not acquirable(len(self._keyless()), self.tables.partitions, self._others):
                    break
                await self._attempt(row)
            self._no_claims = ""
        except SourceError as error:
            if not error.retryable:
                raise
            await self._fall_silent(connection)
            # If the member gets no connection for a claim, it continues to read its pieces.
            if not self._no_claims:
                log.warning(
                    "%s: cannot acquire pieces (%s); the member keeps its pieces and tries again", self.name, error
                )
            self._no_claims = f"cannot acquire pieces ({error}); the member keeps its pieces and tries again"
        finally:
            self._acquiring = False
            self.wake()

    async def _acquire_mapped(self, rows: Sequence[PieceRow]) -> None:
        """Acquire the pieces that the map gives to this member, in several partitions at once.

        The member claims the pieces of one partition in sequence, because the claim of a parent ends the drain of its
        parts.
        """
        partitions: dict[int, list[PieceRow]] = {}
        for row in rows:
            if row.slots is not None and row.consumer == self.consumer and row.id not in self.owned:
                partitions.setdefault(row.partition, []).append(row)
        left = list(partitions.values())

        async def work() -> None:
            try:
                while left:
                    for row in left.pop(0):
                        await self._attempt(row)
            except BaseException:
                left.clear()
                raise

        # A cancellation reaches each call once. psycopg cancels a statement at the server, and a second cancellation
        # would interrupt this call and log a warning.
        calls = [asyncio.create_task(work()) for _ in range(min(_AT_ONCE, len(left)))]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        for failure in ended:
            # All calls failed for the same reason, so raise only one error.
            if failure is not None:
                raise failure

    def _free(self, rows: Sequence[PieceRow]) -> list[PieceRow]:
        """Return the pieces without a key to try.

        If members report that they own all pieces, return only a few pieces, a different selection in each call.
        """
        free = [row for row in rows if row.slots is None and row.id not in self.owned]
        if free and sum(member.owned for member in self._others) + len(self._keyless()) >= self.tables.partitions:
            # The row of a killed member is outdated.
            self._tried = (self._tried + TRIES) % len(free)
            free = (free[self._tried :] + free[: self._tried])[:TRIES]
        return free

    async def _count(self, connection: AsyncConnection[Any]) -> None:
        """Count the messages in slots without an owner when a count is due, and log a warning about such messages.

        The call also deletes attempts that a killed owner has left.
        """
        now = monotonic()
        if now < self._counted_at + _COUNT_EVERY:
            return
        self._counted_at, before = now, self.unowned
        tables = self.tables
        place = tables.schema, tables.log
        try:
            self._attempts_after = await drop_finished(
                connection, *place, self.log_name, self.incarnation, self.subscription, self._attempts_after
            )
        except LanesError as error:
            if not is_about_statement(error):
                raise
            log.info("%s: the attempts of finished messages are not deleted for now: %s", self.name, error)
        self.unowned, refused = await look_at_unowned(connection, *place, self.subscription, self._ends)
        if refused and not self._not_raised:
            log.warning("%s: %s: %s", self.name, _NOT_RAISED, refused)
        self._not_raised = refused and f"{_NOT_RAISED}: {refused}; correct its row in lanes_ring_pieces"
        if self.unowned and not before:
            log.warning("%s: %s", self.name, self.finding())

    def findings(self) -> list[str]:
        """Return texts about faults that a person must correct."""
        waiting = [fault.text for fault in self._faults.values()]
        owned = [each.finding() for each in self._owned_pieces().values()]
        return [text for text in (self.finding(), self._not_raised, self._no_claims, *waiting, *owned) if text]

    def finding(self) -> str:
        """Return a text about messages in slots without an owner; empty without such messages."""
        if not self.unowned:
            return ""
        place = f"--log {self.log_name!a} --group {self.subscription!a}"
        return (
            f"{self.unowned:,} messages or more wait in slots without an owner; see `lanes ring status {place}`, and "
            "assign the slots by `lanes ring assign`"
        )

    def _keyless(self) -> dict[int, OwnedPiece]:
        return {unit: each for unit, each in self._owned_pieces().items() if each.slots is None}

    def _owned_pieces(self) -> dict[int, OwnedPiece]:
        return {unit: each for unit, each in self.owned.items() if isinstance(each, OwnedPiece)}

    def _follow(self, rows: Sequence[PieceRow]) -> None:
        """Release the pieces, and the parts of pieces, that the map assigns to other members."""
        owned = self._owned_pieces()
        parts: dict[int, list[Slots]] = {}
        for row in rows:
            if row.parent is not None and row.slots is not None:
                parts.setdefault(row.parent, []).append(row.slots)
        for row in rows:
            piece = owned.get(row.id)
            if piece is None or piece.over:
                continue
            if row.epoch != piece.epoch:
                self.lose(piece, "another process owns the piece")
            elif row.slots is not None and not piece.revoked:
                if row.consumer != self.consumer:
                    self.revoke(piece)
                elif row.slots != piece.slots:
                    moved = piece.cut(row.slots, parts.get(row.id, []))
                    self._events += [RevokingPart(piece.partition, part) for part in moved]

    async def hand_over(self, owned: OwnedPiece, moved: MovedSlots) -> None:
        """Pass the stored position of a piece to the next owners of its parts.

        Raises ``SourceError``, which is retryable after a fault of a row.
        """
        try:
            await self._hand_over(owned, moved)
        except PieceError as error:
            # No other process could hand over the part, so this member retries.
            owned.kept = str(error)
            raise SourceError(str(error), retryable=True) from error
        owned.kept = ""

    async def _hand_over(self, owned: OwnedPiece, moved: MovedSlots) -> None:
        if moved in owned.moved:
            await self.pieces.hand_over(owned.unit, owned.epoch, moved)
            # A concurrent release may have handed over the part.
            owned.moved = [each for each in owned.moved if each is not moved]

    async def release(self, owned: Owned) -> None:
        """Hand over all parts of a drained piece, and release its lock. Idempotent. Raises ``SourceError``."""
        assert isinstance(owned, OwnedPiece), "a member with ranges owns pieces"
        owned.over = True
        owned.rest()
        until = monotonic() + _HANDS_OVER_WITHIN
        try:
            for moved in list(owned.moved):
                await self._confined(owned, partial(self._hand_over, owned, moved), until)
            # The owner may not have learned of a split yet, so copy its last position to all pieces that wait for it.
            await self._confined(owned, partial(self.pieces.hand_over_all, owned.unit, owned.epoch), until)
            await owned.held.release()
            with suppress(SourceError):  # The other members also find the piece at their next read of the map.
                await self.pieces.notify()
        finally:
            # The consumer owns the piece until this call ends, so this member must not acquire the piece earlier. Do
            # not retry a failed call. The lock is released, so the next owners begin as after a crash.
            if self._end(owned):
                self._let_go(owned)

    async def _confined(self, owned: Owned, hand_over: Callable[[], Awaitable[None]], until: float) -> None:
        """Hand over a part of a released piece.

        A fault of its row may delay the other parts, but only until ``until``.
        """
        while True:
            try:
                return await hand_over()
            except PieceError as error:
                if not error.retryable or monotonic() >= until:
                    self._skip(owned.unit, owned.number, error)
                    return None
            await asyncio.sleep(_HAND_OVER_AGAIN)

    async def _attempt(self, row: PieceRow) -> None:
        """Try to acquire a piece. A fault of its row does not delay other pieces."""
        fault = self._faults.get(row.id)
        if fault is not None and monotonic() < fault.until:
            return
        try:
            await self._try_piece(row)
        except RowLocked as error:
            now = monotonic()
            if now >= self._locked_since.setdefault(row.id, now) + TOLD:
                self._skip(row.id, row.partition, error, LONGEST_COOL, "end that transaction")
            return
        except PieceError as error:
            self._skip(row.id, row.partition, error)
            return
        # Another member may own the piece.
        self._faults.pop(row.id, None)
        self._locked_since.pop(row.id, None)

    def _skip(
        self,
        piece: int,
        number: int,
        error: Exception,
        longest: float | None = None,
        remedy: str = "correct its row in lanes_ring_pieces",
    ) -> None:
        """Skip a piece with a fault, longer at each repetition, and at most ``longest`` seconds."""
        former = self._faults.get(piece)
        pause = 1.0 if former is None else min(2 * former.pause, LONGEST_PAUSE if longest is None else longest)
        text = f"the messages of piece {piece} of partition {number} wait: {error}; {remedy}"
        self._faults[piece] = Fault(text, pause, monotonic() + pause)
        if former is None:
            log.warning("%s: %s", self.name, text)

    async def _try_piece(self, row: PieceRow) -> None:
        if row.id in self.owned:
            return
        # The members share the pieces without a key, so do not acquire such a piece again at once. The other pieces
        # follow the map, and may return at once.
        if row.slots is None and monotonic() < self._cool.get(row.id, 0.0):
            return
        if row.parent is not None and row.parent not in self.owned:
            await self._end_drain(row, row.parent)
            return
        key = StateKey(self.subscription, PieceId(self.log_name, row.partition, row.id), self.incarnation)
        name = self._lock_of(row.partition, row.id)
        try:
            changed = partial(self.lock_changed, row.id)
            acquired = await acquire(self.locks, self.pieces, key, name=name, start=0, changed=changed)
        except RowLocked:
            raise
        except StateLocked:
            return  # The map has changed meanwhile, or the former owner drains the piece.
        if acquired is None:
            return
        piece = OwnedPiece.begin(key, *acquired, self._ends[row.partition])
        piece.slots, piece.told = self.pieces.claimed.pop(row.id), piece.floor
        self.own(piece)

    async def _end_drain(self, row: PieceRow, parent: int) -> None:
        """End the drain of a piece whose former owner has lost the lock, for example after a crash."""
        held = await self.locks.try_acquire(self._lock_of(row.partition, parent), lambda: None)
        if held is None:
            return
        try:
            if not held.lost and monotonic() < held.deadline:
                await self.pieces.end_drain(row.id, parent)
        finally:
            await held.release()

    def _lock_of(self, number: int, piece: int) -> str:
        return f"{lock_name(self.tables.schema, self.log_name, self.subscription, number)}/{piece}"

    # --- reads

    def _reading(self) -> tuple[Mapping[int, Owned], int]:
        """Return no partitions, because the reads of ``Visitor`` cannot select slots."""
        return {}, 0

    async def _read(self, connection: AsyncConnection[Any]) -> None:
        """Read messages for the room of the last ``receive``. Pieces with the same next position share a read."""
        paused = self.room.paused
        reading = [
            piece
            for piece in self._owned_pieces().values()
            if not piece.revoked and not piece.over and piece.partition not in paused
        ]
        left = self.room.messages - sum(len(piece.waiting) for piece in reading)
        if left <= 0 or self.room.bytes <= 0:
            return
        left = min(max(left, _CHUNK), self._within_bytes())
        groups: dict[tuple[int, int], list[OwnedPiece]] = {}
        for piece in reading:
            if piece.end > piece.read:
                groups.setdefault((piece.number, piece.read), []).append(piece)
        if not groups:
            return
        lowest: dict[int, int] = {}
        backlog = 0.0
        for (number, read), pieces in groups.items():
            lowest[number] = min(lowest.get(number, read), read)
            backlog += self._found * (pieces[0].end - read)
        works = await self._works(connection, lowest, ordered=backlog > left)
        turns = {work.partition: turn for turn, work in enumerate(works)}
        order = sorted((place for place in groups if place[0] in turns), key=lambda place: (turns[place[0]], place[1]))
        # Most positions have messages of other members, so a request examines more positions than the room for
        # messages.
        wanted: list[WantedSlots] = []
        expected = 0.0
        for number, read in order:
            if expected >= left:
                break
            end = min(groups[number, read][0].end, read + _SCAN)
            share = self._found * (end - read)
            most = min(left, max(_LEAST, math.ceil(4 * share)))
            wanted.append(_wanted(number, read, end, most, groups[number, read]))
            expected += share
        self._order = [piece.unit for place in order for piece in groups[place]]
        found = await fetch(connection, self.tables, wanted)
        self.check_owned()
        looked = sum(result.read - each.start for each, result in zip(wanted, found, strict=True))
        count = sum(len(result.messages) for result in found)
        self._found = min(1.0, max(count / max(1, looked), self._found / 2, 1 / _SCAN))
        for each, result in zip(wanted, found, strict=True):
            await self._deal(connection, each, result, groups[each.partition, each.start])
        self.wake()

    async def _deal(
        self, connection: AsyncConnection[Any], wanted: WantedSlots, found: FoundSlots, pieces: Sequence[OwnedPiece]
    ) -> None:
        mine = []
        for piece in pieces:
            if piece.over or piece.revoked or piece.read != wanted.start:
                continue
            if wanted.start < found.first:
                if not piece.waiting:
                    await self._trimmed(connection, piece)
                continue
            piece.read = found.read
            mine.append(piece)
        owners = Owners(mine)
        count = size = 0
        for message in found.messages:
            owner = owners.of(message.key)
            if owner is not None:
                owner.waiting.append(message)
                count += 1
                size += message.size
        if count:
            self._bytes_each = max(1.0, size / count, self._bytes_each / 2)


def _wanted(number: int, read: int, end: int, most: int, pieces: Sequence[OwnedPiece]) -> WantedSlots:
    runs = sorted(run for piece in pieces if piece.slots is not None for run in piece.slots.runs)
    keyless = any(piece.slots is None for piece in pieces)
    return WantedSlots(number, read, end, most, Slots(tuple(runs)), keyless)
