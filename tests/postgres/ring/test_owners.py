"""The owner of a message among the pieces of a read, and the parts that a piece loses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from lanes.core.types import Partition, PieceId
from lanes.ring import SLOTS, Range, slot
from lanes_postgres.log.reading import READER, StoredMessage
from lanes_postgres.ring.slots import Slots
from lanes_postgres.subscription.owned_piece import OwnedPiece, Owners

KEYS = [b"key %d" % number for number in range(200)]


def piece_of(number: int, slots: Slots | None, partition_number: int = 0) -> OwnedPiece:
    partition = Partition(PieceId("orders", partition_number, number), READER, floor=0)
    return OwnedPiece(
        number=partition_number,
        partition=partition,
        held=cast(Any, None),
        key=cast(Any, None),
        epoch=1,
        floor=0,
        read=len(KEYS),
        since=0.0,
        slots=slots,
    )


@st.composite
def divided(draw: st.DrawFn) -> list[Slots]:
    """Sets of slots that do not overlap, and together have all slots."""
    ends = sorted(draw(st.sets(st.sampled_from([slot(key) for key in KEYS]), min_size=1, max_size=8)) - {0})
    bounds = [0, *ends, SLOTS]
    ranges = [Range(lo, after - 1) for lo, after in pairwise(bounds)]
    sets = [draw(st.integers(0, 3)) for _ in ranges]
    found = [Slots.of([each for each, number in zip(ranges, sets, strict=True) if number == one]) for one in range(4)]
    return [each for each in found if each]


@given(divided(), st.booleans())
def test_each_message_of_a_read_has_the_piece_of_its_slot(parts: list[Slots], keyless: bool) -> None:
    pieces = [piece_of(number, slots) for number, slots in enumerate(parts[1:], start=1)]
    pieces += [piece_of(9, None)] if keyless else []
    owners = Owners(pieces)
    for key in [*KEYS, None]:
        assert [each for each in pieces if each.has(key)] == [each for each in [owners.of(key)] if each is not None]


@given(divided())
def test_a_piece_loses_a_part_for_each_next_owner(parts: list[Slots]) -> None:
    """A part of an unknown owner moves with the other parts.

    Each part begins at its first message that was not delivered.
    """
    piece = piece_of(1, Slots(((0, SLOTS),)))
    waiting = [StoredMessage(number, key, "s", None, b"", 0.0) for number, key in enumerate(KEYS)]
    piece.waiting.extend(waiting[50:])
    stays, *known = parts
    moved = piece.cut(stays, known[:2])
    first = moved[: len(known[:2])]
    assert [[key for key in KEYS if slot(key) in each.slots] for each in first] == [
        [key for key in KEYS if slot(key) in each] for each in known[:2]
    ]
    assert all((sum(slot(key) in each.slots for each in moved) == 1) == (slot(key) not in stays) for key in KEYS)
    for each in moved:
        positions = [message.position for message in waiting[50:] if slot(message.key or b"") in each.slots]
        assert each.below == min(positions, default=len(KEYS))
    kept = [message.position for message in waiting[50:] if slot(message.key or b"") in stays]
    assert [message.position for message in piece.waiting] == kept
    assert (piece.moved, piece.slots) == (moved, stays)
    assert piece.cut(stays, known) == []
    assert piece.moved == moved, "the parts of an earlier cut still wait for their hand-over"
