"""Decides by one SQL statement whether a message may have its effect, and stores the position of the message.

The statement is a compare-and-set. If the position rises and the epoch does not fall, the statement writes the position
of the message and returns one row. The statement locks the row until the end of the transaction. A concurrent claim of
the same key waits for this lock. If the statement returns no row, further statements find the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final, LiteralString, NamedTuple

from psycopg.types.numeric import Int8

from lanes.clock import monotonic
from lanes.core.types import Message
from lanes.errors import ConfigError, LanesError, SourceError
from lanes_postgres.rows import Row
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.topics import TRIES, Topics, being_changed

_IDENTITY: Final = 5
"""Number of leading ``Row`` fields that decide the order of claims."""

_OF_TOPIC: Final[LiteralString] = (
    "FROM {schema}.lanes_topics WHERE subscription = %s AND topic = %s AND (%s = '' OR incarnation = %s)"
)
_INTO: Final[LiteralString] = "INSERT INTO {schema}.lanes_positions AS kept (topic, partition, key, position, epoch) "
_UNLESS_DONE: Final[LiteralString] = (
    " ON CONFLICT (topic, partition, key) DO UPDATE "
    "SET position = excluded.position, epoch = greatest(kept.epoch, excluded.epoch) "
    "WHERE kept.position < excluded.position AND (kept.epoch <= excluded.epoch) IS NOT FALSE "
)
_ADVANCE: Final[LiteralString] = _INTO + "SELECT id, %s, %b, %s, %s::bigint " + _OF_TOPIC + _UNLESS_DONE + "RETURNING 1"
_ADVANCE_ALL: Final[LiteralString] = (
    "WITH advanced AS (" + _INTO + "SELECT id, each.* FROM (SELECT id " + _OF_TOPIC + ") AS of, "
    "unnest(%s::bigint[], %b::bytea[], %s::bigint[], %s::bigint[]) AS each (partition, key, position, epoch) "
    "ORDER BY each.partition, each.key" + _UNLESS_DONE + "RETURNING partition, key) "
    "SELECT array_agg(partition), array_agg(key) FROM advanced"
)
_SELECT: Final[LiteralString] = (
    "SELECT of.incarnation, kept.position, kept.epoch FROM {schema}.lanes_topics AS of "
    "LEFT JOIN {schema}.lanes_positions AS kept ON kept.topic = of.id AND kept.partition = %s AND kept.key = %b "
    "WHERE of.subscription = %s AND of.topic = %s"
)
_DEAD_LETTER: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_letters (topic, partition, position) "
    "SELECT id, %s, %s " + _OF_TOPIC + " ON CONFLICT DO NOTHING RETURNING 1"
)


class StoredRow(NamedTuple):
    """The stored values of a row; ``position`` None = the key has no row, ``epoch`` None = no fencing token."""

    incarnation: str
    position: int | None
    epoch: int | None


class Claims:
    """The claims of one subscription in one schema. Immutable; performs no I/O."""

    def __init__(self, subscription: str, schema: str) -> None:
        self._subscription = subscription
        self._topics = Topics(subscription, schema)
        self._advance = compose(_ADVANCE, schema)
        self._advance_all = compose(_ADVANCE_ALL, schema)
        self._select = compose(_SELECT, schema)
        self._dead_letter = compose(_DEAD_LETTER, schema)

    def one(self, message: Message, row: Row) -> Steps[bool]:
        """Return whether a message may have its effect now; False = the message has already had its effect."""
        if row.dead_letter and not (yield from self._first_time(row)):
            return False
        if (yield self._advancing(row)) is not None:
            return True
        return (yield from self._explain(message, row))

    def all(self, messages: Sequence[Message], rows: Sequence[Row]) -> Steps[list[Message]]:
        """Return the messages that may have their effect now, in the given order."""
        # All transactions claim in the same order, which prevents deadlocks. The claims of a key are in order of
        # position.
        order = sorted(range(len(rows)), key=lambda index: rows[index][:_IDENTITY])
        fresh = set()
        for of_topic in _grouped(order, rows):
            if any(rows[index].dead_letter for index in of_topic):
                for index in of_topic:
                    if (yield from self.one(messages[index], rows[index])):
                        fresh.add(index)
                continue
            # The first round locks every row, so the later rounds never wait.
            for each in _rounds(of_topic, rows):
                advanced = yield from self._advance_rows([rows[index] for index in each])
                for index in each:
                    row = rows[index]
                    if (row.partition, row.key) in advanced or (yield from self._explain(messages[index], row)):
                        fresh.add(index)
        return [messages[index] for index in sorted(fresh)]

    def _advancing(self, row: Row) -> Statement:
        epoch = None if row.epoch is None else Int8(row.epoch)
        place = (Int8(row.partition), row.key, Int8(row.position), epoch)
        return Statement(self._advance, (*place, *self._topic_of(row)))

    def _advance_rows(self, rows: Sequence[Row]) -> Steps[set[tuple[int, bytes]]]:
        """Raise the positions in different rows of one topic, and return the partition and key of each changed row."""
        columns = tuple([getattr(row, name) for row in rows] for name in ("partition", "key", "position", "epoch"))
        found = yield Statement(self._advance_all, (*self._topic_of(rows[0]), *columns))
        return set() if found is None or found[0] is None else set(zip(*found, strict=True))

    def _topic_of(self, row: Row) -> tuple[str, str, str, str]:
        return self._subscription, row.topic, row.incarnation, row.incarnation

    def _explain(self, message: Message, row: Row) -> Steps[bool]:
        """Find the reason why a claim returned no row: the effect exists, the owner is fenced, or the topic is new."""
        for _ in range(TRIES):
            kept = yield from self._stored_row(row)
            if kept.position is not None:
                if kept.position >= row.position:
                    # The consumer may have handled later messages of the key after it stored the dead letter.
                    return row.dead_letter and kept.position > row.position
                if kept.epoch is not None and row.epoch is not None and row.epoch < kept.epoch:
                    raise self._fenced(message, row, kept.epoch)
            if (yield self._advancing(row)) is not None:
                return True
        raise being_changed(self._subscription, row.place)

    def _first_time(self, row: Row) -> Steps[bool]:
        """Mark the dead letter as handled. Returns False if the mark already exists."""
        yield from self._stored_row(row)
        found = yield Statement(self._dead_letter, (Int8(row.partition), Int8(row.position), *self._topic_of(row)))
        return found is not None

    def _stored_row(self, row: Row) -> Steps[StoredRow]:
        """Return the stored values of a row; register a new topic. Raises ``ConfigError`` for another incarnation."""
        looking = (Int8(row.partition), row.key, self._subscription, row.topic)
        for _ in range(TRIES):
            found = yield Statement(self._select, looking)
            if found is not None:
                kept = StoredRow(*found)
                if not row.incarnation or kept.incarnation == row.incarnation:
                    return kept
            yield from self._topics.of(row.topic, row.incarnation)
        raise being_changed(self._subscription, row.place)

    def _fenced(self, message: Message, row: Row, epoch: int) -> LanesError:
        partition = message.partition
        text = (
            f"subscription {self._subscription!r}: {row.place} has epoch {row.epoch}, but its key was last written "
            f"with epoch {epoch}"
        )
        if partition.live and monotonic() < partition.deadline:
            # This process is the newest owner, so the epochs have restarted. Every message would fail.
            return ConfigError(
                f"{text}, although this process owns the partition, so epochs have restarted, as after the loss of a "
                "cohort's bucket; stop all former owners, then call Positions.unfence"
            )
        return SourceError(f"{text}; another process owns the partition now and handles the message")


def _grouped(order: Sequence[int], rows: Sequence[Row]) -> list[list[int]]:
    """Group the rows by topic and incarnation, and return the indices of each group."""
    return [list(group) for _, group in groupby(order, lambda index: (rows[index].topic, rows[index].incarnation))]


def _rounds(order: Sequence[int], rows: Sequence[Row]) -> list[list[int]]:
    """Split indices into groups with at most one index for each row, because a statement may change a row only once."""
    rounds: list[list[int]] = []
    times: Counter[tuple[int, bytes]] = Counter()
    for index in order:
        place = (rows[index].partition, rows[index].key)
        if times[place] == len(rounds):
            rounds.append([])
        rounds[times[place]].append(index)
        times[place] += 1
    return rounds
