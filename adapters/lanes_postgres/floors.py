"""Claims messages by partition. One statement stores the position of a subscription in the transaction of the effect.

The statement writes the row of ``PostgresStates`` at which the next owner continues. The transaction locks the row, so
no other process acquires the partition before the transaction ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final, LiteralString, NamedTuple

from psycopg.types.numeric import Int8

from lanes.core.types import WHOLE_PARTITION, Message, PartitionId
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError
from lanes.ownership import Fenced
from lanes_postgres.claims import Claims
from lanes_postgres.rows import row_of
from lanes_postgres.states import array_of, runs_of
from lanes_postgres.steps import Statement, Steps, compose

_OF: Final[LiteralString] = " WHERE subscription = %s AND source = %s AND partition = %s AND incarnation = %s "
_ADVANCE: Final[LiteralString] = (
    "UPDATE {schema}.lanes_states SET floor = %s, stored = clock_timestamp()" + _OF + "AND epoch = %s AND floor <= %s "
    "AND completed = '{{}}' RETURNING 1"
)
_LOCK: Final[LiteralString] = (
    "SELECT epoch, floor, completed::text FROM {schema}.lanes_states" + _OF + "FOR NO KEY UPDATE"
)
_SET: Final[LiteralString] = (
    "UPDATE {schema}.lanes_states SET floor = %s, completed = %s::bigint[], stored = clock_timestamp()" + _OF
)


class _Owned(NamedTuple):
    """A partition, and the epoch of its owner."""

    partition: PartitionId
    incarnation: str
    epoch: int


class FloorClaims:
    """The claims of one subscription in one schema, by partition. Immutable; performs no I/O.

    A replayed dead letter is below the position of its partition. ``claims`` therefore stores a separate row for the
    dead letter.
    """

    def __init__(self, subscription: str, schema: str, claims: Claims) -> None:
        self._subscription = subscription
        self._where = f"subscription {subscription!r} in the schema {schema!r}"
        self._claims = claims
        self._advance = compose(_ADVANCE, schema)
        self._lock = compose(_LOCK, schema)
        self._set = compose(_SET, schema)

    def one(self, message: Message) -> Steps[bool]:
        """Return whether a message may have its effect now; False = the message has already had its effect."""
        if isinstance(message.raw, DeadLetter):
            return (yield from self._claims.one(message, row_of(message, "message")))
        owned, position = self._owned(message), message.position
        place = self._place(owned)
        found = yield Statement(self._advance, (Int8(position + 1), *place, Int8(owned.epoch), Int8(position)))
        return found is not None or bool((yield from self._locked(owned, [message])))

    def all(self, messages: Sequence[Message]) -> Steps[list[Message]]:
        """Return the messages that may have their effect now, in the given order."""
        fresh: set[Message] = set()
        letters = [each for each in messages if isinstance(each.raw, DeadLetter)]
        others = [each for each in messages if not isinstance(each.raw, DeadLetter)]
        # All transactions lock the rows in the same order, which prevents deadlocks.
        for owned, run in groupby(sorted(others, key=_in_order), self._owned):
            fresh.update((yield from self._locked(owned, list(run))))
        if letters:
            fresh.update((yield from self._claims.all(letters, [row_of(each, "message") for each in letters])))
        return [each for each in messages if each in fresh]

    def _locked(self, owned: _Owned, run: Sequence[Message]) -> Steps[list[Message]]:
        """Lock the row of a partition, and advance its position past the given messages, which must be in order."""
        place = self._place(owned)
        found = yield Statement(self._lock, place)
        if found is None:
            raise ConfigError(
                f"{self._where}: no position of {owned.partition} is stored, so Positions cannot move the position; "
                "give Positions the subscription, the database and the schema of the PostgresSource. After the drop "
                "of a subscription, start its consumers again"
            )
        epoch, floor, text = found
        if epoch != owned.epoch:
            raise Fenced(
                f"{self._where}: {owned.partition} was acquired with epoch {owned.epoch}, but its state now has epoch "
                f"{epoch}; another process handles the message"
            )
        completed = runs_of(text)
        fresh = [
            each
            for each in run
            if each.position >= floor and not any(start <= each.position < end for start, end in completed)
        ]
        if fresh:
            after = fresh[-1].position + 1
            # The position is within a finished range, so the source continues after this range.
            after = max([after, *(end for start, end in completed if start <= after)])
            above = [bounds for bounds in completed if bounds[0] > after]
            yield Statement(self._set, (Int8(after), array_of(above), *place))
        return fresh

    def _owned(self, message: Message) -> _Owned:
        partition = message.partition
        if partition.fencing_token is None:
            raise ConfigError(
                f'{partition.id} position {message.position} has no epoch, and Positions(…, by="partition") moves the '
                'position of a PostgresSource; use by="key" on another source'
            )
        if message.lane != WHOLE_PARTITION:
            raise ConfigError(
                f'{partition.id} position {message.position}: Positions(…, by="partition") would pass unfinished '
                'messages of other keys; use order="serial" or order="partition", or by="key"'
            )
        return _Owned(partition.id, partition.incarnation, partition.fencing_token)

    def _place(self, owned: _Owned) -> tuple[str, str, Int8, str]:
        return self._subscription, owned.partition.source, Int8(owned.partition.number), owned.incarnation


def _in_order(message: Message) -> tuple[PartitionId, int]:
    return message.partition.id, message.position
