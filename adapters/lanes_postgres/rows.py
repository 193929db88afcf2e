"""Which row of the tables a message is, as a pure function of it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from blake3 import blake3

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, MessageError

By = Literal["key", "message"]

LEAST: Final = -(1 << 63)
MOST: Final = (1 << 63) - 1

# A domain of its own (BLAKE3 specification, "Modes"): 32 bytes, so that two keys of anybody's choice share a row only
# after about 2^128 tries.
_KEY: Final = blake3(derive_key_context="lanes-runtime postgres v1: position of a key")


class Row(NamedTuple):
    """``key``: 32 bytes of digest, or the 8 bytes of the position of a message that stands for itself.

    ``epoch``: the fencing token of the partition; None = it has none that rises across processes. ``incarnation``: of
    the topic; "" = not known. ``letter``: the message is a dead letter that is handled again.
    """

    topic: str
    incarnation: str
    partition: int
    key: bytes
    position: int
    epoch: int | None
    letter: bool

    @property
    def place(self) -> str:
        """For people; without the key."""
        return f"{self.topic}/{self.partition} position {self.position}"


def row_of(message: Message, by: By) -> Row:
    """The row of a message.

    Raises ``ConfigError`` for messages of a key that are in no order, and ``MessageError`` for one that no row can
    hold: a position or a token beyond 64 bits.
    """
    partition, key, position = message.partition, message.key, message.position
    where = partition.id
    letter = isinstance(message.raw, DeadLetter)
    # A letter tells the epoch of the assignment that it was given up in, which is over.
    epoch = None if letter else partition.fencing_token
    for name, number in (("position", position), ("fencing token", epoch or 0), ("partition", where.number)):
        if not LEAST <= number <= MOST:
            raise MessageError(f"{where} position {position}: the {name} is beyond 64 bits, and no row can hold it")
    if "\0" in where.source:
        raise ConfigError(f"the topic {where.source!r} has a zero byte, which PostgreSQL cannot keep: rename it")
    if by == "message" or key is None:
        digest = position.to_bytes(8, "big", signed=True)
    elif message.lane is None:
        raise ConfigError(
            f'{where} position {position} has a key, but no order: with order="none" a later message of a key would '
            'make an earlier one pass for done; use Positions(…, by="message"), or another order'
        )
    else:
        hasher = _KEY.copy()
        hasher.update(key)
        digest = hasher.digest(length=32)
    return Row(where.source, partition.incarnation, where.number, digest, position, epoch, letter)
