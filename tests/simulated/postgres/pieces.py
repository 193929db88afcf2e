"""The pieces of ring ranges on a server as data: slots, owners, epochs, drains and positions.

The functions are the steps of ``docs/model/ranges.md``. A function that reads and writes several rows locks all of them
first, so a blocked call has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tests.simulated.postgres.server import Blocked, Session

Runs = tuple[tuple[int, int], ...]
"""Rising half-open runs of slots or positions."""

_KIND = "piece"

_NEVER: Final = 2**63 - 1


class PieceRow(NamedTuple):
    """A piece of a partition: the messages of some slots, or the messages without a key.

    Attributes:
        log: Number of the log.
        group: Name of the group.
        partition: Number of the partition.
        slots: Slots of the piece; ``None`` = the messages without a key.
        consumer: Consumer that the map names; ``None`` = no consumer, or any consumer if ``slots`` is ``None``.
        floor: Lowest position that is not finished.
        epoch: Epoch of the owner; 0 = the piece never had an owner.
        completed: Finished positions above ``floor``.
        parent: Number of the piece whose owner may still handle messages of this piece; ``None`` = no drain.
        parent_epoch: Epoch of the owner that may still handle messages of this piece; ``None`` = no drain.
    """

    log: int
    group: str
    partition: int
    slots: Runs | None
    consumer: str | None
    floor: int
    epoch: int = 0
    completed: Runs = ()
    parent: int | None = None
    parent_epoch: int | None = None

    def has(self, slot: int | None) -> bool:
        """Return whether messages of a slot belong to the piece; ``None`` = messages without a key."""
        if self.slots is None or slot is None:
            return self.slots is None and slot is None
        return any(start <= slot < end for start, end in self.slots)

    def finished(self, position: int) -> bool:
        """Return whether the piece counts a position as finished."""
        return position < self.floor or any(start <= position < end for start, end in self.completed)


class StoredPiece(NamedTuple):
    """The finished positions of a piece, as an owner stores them.

    Attributes:
        piece: Number of the piece.
        epoch: Epoch of the owner that stores.
        floor: Lowest position that is not finished.
        completed: Finished positions above ``floor``.
    """

    piece: int
    epoch: int
    floor: int
    completed: Runs


def key_of(piece: int) -> tuple[str, int]:
    """Return the key of the row of a piece."""
    return _KIND, int(piece)


def pieces_of(session: Session, log: int, group: str) -> list[tuple[int, PieceRow]]:
    """Return the pieces of a group that a session sees, by their numbers."""
    found = ((key[1], row) for key, row in session.rows(_KIND) if (row.log, row.group) == (log, group))
    return sorted(found, key=lambda each: each[0])


def _get(session: Session, piece: int) -> PieceRow | None:
    row: PieceRow | None = session.get(key_of(piece))
    return row


# --- the map


def begin(
    session: Session, log: int, group: str, starts: Sequence[int], parts: Sequence[tuple[Runs | None, str | None]]
) -> None:
    """Make the pieces of each partition, from slots and consumer of each part."""
    for partition, start in enumerate(starts):
        for slots, consumer in parts:
            session.insert(key_of(session.server.next_id()), PieceRow(log, group, partition, slots, consumer, start))


def lock(session: Session, log: int, group: str, lo: int, hi: int) -> int:
    """Lock the pieces with a slot of ``lo`` … ``hi``, and return their number. Raises ``Blocked``."""
    met = _met(session, log, group, lo, hi)
    for piece, _ in met:
        session.lock_row(key_of(piece))
    return len(met)


def copy(session: Session, log: int, group: str, lo: int, hi: int, consumer: str) -> None:
    """Make a piece of each part of a piece in ``lo`` … ``hi``, with the finished messages of the piece and a drain.

    No member has acquired a piece with a drain, so its new part waits for the same former owner.
    """
    for piece, row in _met(session, log, group, lo, hi):
        if _within(row, lo, hi):
            continue
        part = row._replace(slots=_common(row.slots, lo, hi), consumer=consumer, epoch=0)
        if row.parent is None and row.epoch:
            part = part._replace(parent=piece, parent_epoch=row.epoch)
        session.insert(key_of(session.server.next_id()), part)


def cut(session: Session, log: int, group: str, lo: int, hi: int) -> None:
    """Remove the slots ``lo`` … ``hi`` from each piece that has other slots too."""
    for piece, row in _met(session, log, group, lo, hi):
        if not _within(row, lo, hi):
            session.put(key_of(piece), row._replace(slots=_without(row.slots, lo, hi)))


def move(session: Session, log: int, group: str, lo: int, hi: int, consumer: str) -> None:
    """Name another consumer for each piece whose slots are all in ``lo`` … ``hi``."""
    for piece, row in _met(session, log, group, lo, hi):
        if _within(row, lo, hi):
            session.put(key_of(piece), row._replace(consumer=consumer))


def _met(session: Session, log: int, group: str, lo: int, hi: int) -> list[tuple[int, PieceRow]]:
    return [(piece, row) for piece, row in pieces_of(session, log, group) if _common(row.slots, lo, hi)]


def _within(row: PieceRow, lo: int, hi: int) -> bool:
    return not _without(row.slots, lo, hi)


def _common(slots: Runs | None, lo: int, hi: int) -> Runs:
    found = ((max(start, lo), min(end, hi + 1)) for start, end in slots or ())
    return tuple((start, end) for start, end in found if start < end)


def _without(slots: Runs | None, lo: int, hi: int) -> Runs:
    parts = (part for start, end in slots or () for part in ((start, min(end, lo)), (max(start, hi + 1), end)))
    return tuple((start, end) for start, end in parts if start < end)


# --- owners


def look(session: Session, log: int, group: str, consumer: str, owned: Collection[int]) -> list[tuple[int, PieceRow]]:
    """Return the consumer's pieces in the map, the pieces without a key, the ``owned`` pieces and their parts.

    A returned row has a parent only if the owner of the parent may still handle messages of the piece.
    """
    return [
        (piece, row if _drains(session, row) else row._replace(parent=None))
        for piece, row in pieces_of(session, log, group)
        if row.consumer == consumer or row.slots is None or piece in owned or row.parent in owned
    ]


def claim(session: Session, piece: int, consumer: str) -> PieceRow | None:
    """Raise the epoch of a piece that the map names the consumer for, and end the drain of the piece.

    Raises ``Blocked``.

    Args:
        session: Session of the member.
        piece: Number of the piece.
        consumer: Name of the consumer.

    Returns:
        The row; ``None`` = the map names another consumer, or the former owner may still handle messages.
    """
    row = _get(session, piece)
    if row is None or (row.slots is not None and row.consumer != consumer) or _drains(session, row):
        return None
    session.lock_row(key_of(piece))
    epoch = session.server.next_epoch()
    row = row._replace(epoch=epoch, parent=None, parent_epoch=None)
    session.put(key_of(piece), row)
    return row


def _drains(session: Session, row: PieceRow) -> bool:
    """Return whether the owner that the piece was split from may still handle messages of the piece."""
    if row.parent is None:
        return False
    former = _get(session, row.parent)
    # A later owner of the parent has acquired its lock, so the former one has lost it.
    return former is None or row.parent_epoch is None or former.epoch <= row.parent_epoch


def end_drain(session: Session, piece: int, parent: int) -> None:
    """End the drain of a piece, on behalf of the holder of the parent's lock. Raises ``Blocked``."""
    row = _get(session, piece)
    if row is not None and row.parent == parent:
        session.put(key_of(piece), row._replace(parent=None, parent_epoch=None))


# --- positions


def lock_free(session: Session, pieces: Iterable[int]) -> list[int]:
    """Lock the pieces that no other transaction has locked, and return them."""
    free = []
    for piece in pieces:
        with suppress(Blocked):
            session.lock_row(key_of(piece))
            free.append(piece)
    return free


def store(session: Session, changes: Sequence[StoredPiece]) -> list[int]:
    """Write positions of pieces with an unchanged epoch, and return the changed pieces. Raises ``Blocked``."""
    for each in changes:
        session.lock_row(key_of(each.piece))
    stored = []
    for each in changes:
        row = _get(session, each.piece)
        if row is None or row.epoch != each.epoch:
            continue
        if row.floor < each.floor or (row.floor == each.floor and row.completed != each.completed):
            session.put(key_of(each.piece), row._replace(floor=each.floor, completed=each.completed))
            stored.append(each.piece)
    return stored


class Unowned(NamedTuple):
    """The messages that one look finds in a piece without an owner.

    Attributes:
        piece: Number of the piece.
        floor: Lowest position of the piece that is not finished.
        until: Position after the last position that the look has read.
        first: Position of the first message; ``None`` = the look found no message.
        messages: Number of messages.
    """

    piece: int
    floor: int
    until: int
    first: int | None
    messages: int


def unowned(
    session: Session,
    log: int,
    group: str,
    slot_of: Callable[[bytes], int],
    look: int | None = None,
    ends: Sequence[int] | None = None,
) -> list[Unowned]:
    """Return the messages in slots without an owner.

    Args:
        session: The session that asks.
        log: Number of the log.
        group: Name of the group.
        slot_of: Function that returns the slot of a key.
        look: Number of positions to look at for each piece; ``None`` = all.
        ends: The end of each partition; ``None`` = unknown.

    Returns:
        The messages of each piece.
    """
    found = []
    for number, piece in pieces_of(session, log, group):
        if piece.slots is None or piece.consumer is not None:
            continue
        bounds = [] if look is None else [piece.floor + look]
        until = min(bounds + ([] if ends is None else [ends[piece.partition]]), default=_NEVER)
        rows = session.server.log.rows(piece.partition).items()
        positions = [
            position
            for position, row in rows
            if piece.floor <= position < until and row.key is not None and piece.has(slot_of(row.key))
        ]
        found.append(Unowned(number, piece.floor, until, min(positions, default=None), len(positions)))
    return found


def pass_over(session: Session, floors: Iterable[tuple[int, int]]) -> None:
    """Raise the positions of pieces without an owner, except pieces that another transaction changes."""
    for piece, floor in floors:
        row = _get(session, piece)
        if row is not None and row.consumer is None and row.floor < floor:
            with suppress(Blocked):
                session.put(key_of(piece), row._replace(floor=floor))


def epochs(session: Session, pieces: Iterable[int]) -> list[tuple[int, int]]:
    """Return the epochs of pieces, as (piece, epoch)."""
    found = ((piece, _get(session, piece)) for piece in pieces)
    return [(piece, row.epoch) for piece, row in found if row is not None]


def hand_over(session: Session, piece: int, epoch: int, slots: Runs, below: int) -> None:
    """Copy the position of a piece to the parts whose slots have all moved, and end their drains. Raises ``Blocked``.

    From the position ``below`` on, a part keeps its own finished messages, because the owner has passed them.
    """
    owner = _get(session, piece)
    parts = [
        (part, row)
        for part, row in _drained_by(session, piece, epoch)
        if row.slots is not None and all(any(lo <= start and end <= hi for lo, hi in slots) for start, end in row.slots)
    ]
    for part, _ in parts:
        session.lock_row(key_of(part))
    for part, row in parts:
        assert owner is not None, "an owner with this epoch exists"
        own = ((start, min(end, below)) for start, end in owner.completed)
        kept = ((max(start, below), end) for start, end in row.completed)
        floor, completed = min(owner.floor, below), _joined([*own, *kept])
        row = row._replace(floor=floor, completed=completed, parent=None, parent_epoch=None)
        session.put(key_of(part), row)


def hand_over_all(session: Session, owned: Sequence[tuple[int, int]]) -> None:
    """Copy the positions of drained pieces to all pieces with their drains, and end the drains. Raises ``Blocked``."""
    found = [(piece, part) for piece, epoch in owned for part, _ in _drained_by(session, piece, epoch)]
    for _, part in found:
        session.lock_row(key_of(part))
    for piece, part in found:
        owner, row = _get(session, piece), _get(session, part)
        assert owner is not None and row is not None, "no piece is deleted"
        row = row._replace(floor=owner.floor, completed=owner.completed, parent=None, parent_epoch=None)
        session.put(key_of(part), row)


def _drained_by(session: Session, piece: int, epoch: int) -> Iterator[tuple[int, PieceRow]]:
    owner = _get(session, piece)
    if owner is None or owner.epoch != epoch:
        return
    for part, row in pieces_of(session, owner.log, owner.group):
        if (row.parent, row.parent_epoch) == (piece, epoch):
            yield part, row


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return runs in order, without empty ones. Overlapping or adjacent runs become one run."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted((start, end) for start, end in runs if start < end):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(joined)
