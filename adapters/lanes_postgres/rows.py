"""Computes the table row of a message. Pure."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from blake3 import blake3

from lanes.arguments import kind_of
from lanes.core.types import Message
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, MessageError

By = Literal["key", "message"]

LEAST: Final = -(1 << 63)
MOST: Final = (1 << 63) - 1

# The hash has a separate domain (BLAKE3 specification, "Modes"). With 32 bytes, an attacker needs about 2^128 attempts
# to find two keys with the same row.
_KEY: Final = blake3(derive_key_context="lanes-runtime postgres v1: position of a key")


class Row(NamedTuple):
    """The table row of one message.

    Attributes:
        topic: Name of the topic.
        incarnation: Incarnation of the topic; "" = unknown.
        partition: Number of the partition.
        key: Digest of the key, 32 bytes. For a message without a key, and with ``by="message"``, the field contains the
            position in 8 bytes.
        position: Position of the message.
        epoch: Fencing token of the partition, which rises across processes; None = no token, or a dead letter.
        dead_letter: Whether the message is a replayed dead letter.
    """

    topic: str
    incarnation: str
    partition: int
    key: bytes
    position: int
    epoch: int | None
    dead_letter: bool

    @property
    def place(self) -> str:
        """Return topic, partition and position as text, without the key."""
        return f"{self.topic}/{self.partition} position {self.position}"


def row_of(message: Message, by: By) -> Row:
    """Return the row of a message.

    Raises ``ConfigError`` if the row of a message with ``order="none"`` would also mark earlier messages of its key as
    done. Raises ``ConfigError`` also for a topic name with a zero byte, and for an object that is no message. Raises
    ``MessageError`` for a number beyond 64 bits.
    """
    if not isinstance(message, Message):
        raise ConfigError(
            f"the second argument is {kind_of(message)}: pass the connection first, then one Message; once_all and "
            "claim_all take a list of messages"
        )
    partition, key, position = message.partition, message.key, message.position
    where = partition.id
    dead_letter = isinstance(message.raw, DeadLetter)
    # A dead letter has the epoch of a former assignment, so its row needs no epoch.
    epoch = None if dead_letter else partition.fencing_token
    for name, number in (("position", position), ("fencing token", epoch or 0), ("partition", where.number)):
        if not LEAST <= number <= MOST:
            raise MessageError(
                f"{where} position {position}: the {name} {number} is beyond 64 bits, so no row "
                f"can hold it; correct the source, which sets the {name}"
            )
    if "\0" in where.source:
        raise ConfigError(f"the topic {where.source!r} has a zero byte, which PostgreSQL cannot store; rename it")
    if by == "message" or key is None:
        digest = position.to_bytes(8, "big", signed=True)
    elif message.lane is None:
        raise ConfigError(
            f'{where} position {position} has a key, but order="none" would let a later message of the key hide an '
            'earlier message; use Positions(…, by="message"), or another order'
        )
    else:
        hasher = _KEY.copy()
        hasher.update(key)
        digest = hasher.digest(length=32)
    return Row(where.source, partition.incarnation, where.number, digest, position, epoch, dead_letter)
