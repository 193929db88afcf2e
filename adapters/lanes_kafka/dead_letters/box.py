"""Lists, finds, republishes and disposes of the dead letters of a topic, for an operator.

A topic cannot delete a single record. The box therefore disposes of a dead letter by another record, a *disposition*.
The disposition is in the same partition as the dead letter, so the dead letter expires first. The key of the
disposition is the id of the dead letter. In a compacted topic the dead letter has the same key, so the disposition
replaces the dead letter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio
from confluent_kafka import KafkaException
from confluent_kafka import Message as Raw

from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letters.box import Disposition, FoundDeadLetters, StoredDeadLetter, check_origin
from lanes.errors import ConfigError, MessageError, SourceError
from lanes_kafka.broker import describe_topic, similar_to_missing
from lanes_kafka.client.records import READER
from lanes_kafka.config import address_name
from lanes_kafka.dead_letters.log_reader import LogReader, Range
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
from lanes_kafka.dead_letters.wire import (
    WIRE,
    Record,
    disposition_record,
    read_dead_letter,
    read_disposition,
    read_whole,
)
from lanes_kafka.dead_letters.writer import topic_name
from lanes_kafka.errors import client_text, is_permanent
from lanes_kafka.topic_names import is_topic

_Position = tuple[int, int]
"""Number of the partition, and offset."""

_NEAR: Final = 1_000
"""Distance in offsets below which the box reads two dead letters in one range, with the records between them."""

_SYSTEMS: Final = ("kafka", "spark")
"""Kinds of sources whose messages come from topics. A source on Spark records no id of its topic."""

_Wanted = Callable[[], bool]


class KafkaDeadLetterBox:
    """The dead letters that ``KafkaDeadLetters`` wrote to a topic; see ``lanes.dead_letters.box.DeadLetterBox``.

    Reading needs the permission Read on the topic, and no permission for a group. Disposing needs Write on the topic.
    ``ids`` and ``find`` first read the records that are new since the last call. The box stores the id and the
    positions of every dead letter in memory, about 300 bytes for each. The object runs on asyncio and on trio.

    Args:
        config: The dictionary of a ``confluent_kafka`` client.
        topic: Name of the dead-letter topic.

    Attributes:
        remembers: Whether ``find`` distinguishes a disposed dead letter from an unknown id.
        other_messages: Number of messages read by this box that are neither dead letters nor dispositions.
    """

    remembers = True

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self._topic = topic_name(topic)
        self._name = f"dead letters of {topic}"
        self._producer = ConfirmedProducer(producer_settings(config), self._name)
        self._settings = self._producer.settings
        self.other_messages = 0
        self._reader: LogReader | None = None
        self._next: dict[int, int] = {}
        # Dead letters by id: the timestamp of the record, which orders the list, and the positions of all copies.
        self._seen: dict[str, tuple[int, list[_Position]]] = {}
        self._disposed: dict[str, Disposition] = {}

    def __repr__(self) -> str:
        return f"<KafkaDeadLetterBox {self._topic}: {len(self._seen)} dead letters seen>"

    async def open(self) -> None:
        """Connect, and check that the topic exists.

        Raises:
            ConfigError: The topic does not exist, or the client refuses its settings.
            SourceError: No broker answers (retryable), or the broker refuses the login or the operation.
        """
        self._producer.open()
        try:
            await self._producer.call(self._open)
        except BaseException:
            await self._producer.aclose(0.0)
            raise

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """See ``lanes.dead_letters.box.DeadLetterBox.ids``.

        The first call reads the whole topic, even with a limit.
        """
        await self._producer.call(self._read_on)
        waiting = [(when, one) for one, (when, _) in self._seen.items() if one not in self._disposed]
        waiting.sort(key=lambda found: found[0])
        return [one for _, one in waiting[:limit]]

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        """See ``lanes.dead_letters.box.DeadLetterBox.find``."""
        await self._producer.call(self._read_on)
        found: dict[str, StoredDeadLetter | Disposition] = {
            one: self._disposed[one] for one in ids if one in self._disposed
        }
        copies = {one: list(self._seen[one][1]) for one in ids if one in self._seen and one not in found}
        while copies:
            positions = {left.pop(0): one for one, left in copies.items()}
            fetched = await self._producer.call(functools.partial(self._fetch, sorted(positions)))
            found |= {positions[position]: stored for position, stored in fetched.items()}
            # Compaction may have removed one copy of a dead letter that was written twice.
            copies = {one: left for one, left in copies.items() if left and one not in found}
        return found

    async def dispose(self, stored: StoredDeadLetter, how: Disposition) -> None:
        """See ``lanes.dead_letters.box.DeadLetterBox.dispose``. The first disposition of a dead letter counts."""
        dead_letter_id = stored.dead_letter.id
        # Write one disposition to each partition with a copy, so that each copy expires before its disposition.
        for number in sorted({number for number, _ in self._seen[dead_letter_id][1]}):
            await self._send(self._topic, disposition_record(dead_letter_id, how, time.time()), number)
        self._disposed.setdefault(dead_letter_id, how)

    async def publish(self, stored: StoredDeadLetter) -> str:
        """Publish to the partition of the original message; see ``lanes.dead_letters.box.DeadLetterBox.publish``."""
        one = stored.dead_letter
        check_origin(one, _SYSTEMS)
        # Any producer may have written the topic name, and the client truncates a name at a NUL.
        facts = None
        if is_topic(one.source):
            facts = await self._producer.call(
                lambda wanted: describe_topic(self._settings, one.source, wanted, name=self._name)
            )
        if facts is None or one.partition >= facts.partitions:
            raise SourceError(
                f"dead letter {one.id}: its origin {one.source}/{one.partition} does not exist; publish the letter by "
                "another client, then drop the letter"
            )
        check_origin(one, _SYSTEMS, "topic id", facts.id)
        key = one.key if one.record_key is None else one.record_key
        record = Record(key, None if one.tombstone else one.value, [*WIRE.republished(one)])
        number, offset = await self._send(one.source, record, one.partition)
        return f"{one.source}/{number} offset {offset}"

    async def aclose(self) -> None:
        """Close the clients. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            with anyio.CancelScope(shield=True):
                await self._producer.call(lambda wanted: reader.close())
        await self._producer.aclose()

    async def _send(self, topic: str, record: Record, partition: int) -> _Position:
        await self._producer.connect()
        try:
            return await self._producer.send(topic, record, partition)
        except KafkaException as failure:
            error = failure.args[0]
            raise SourceError(
                f"write not confirmed by {topic}/{partition} ({client_text(error, self._settings)}); correct the "
                "cause, then repeat the command",
                retryable=not is_permanent(error),
            ) from None

    # --- in the thread of the producer

    def _open(self, wanted: _Wanted) -> None:
        if describe_topic(self._settings, self._topic, wanted, name=self._name) is None:
            raise ConfigError(
                f"dead-letter topic {self._topic!r} does not exist{similar_to_missing(self._settings, self._topic)}; "
                f"correct the name, or {address_name(self._settings)}"
            )
        if self._reader is None:
            self._reader = LogReader(self._settings, self._topic)

    def _read_on(self, wanted: _Wanted) -> None:
        """Read the records since the last call."""
        reader = self._opened()
        ranges = reader.ranges()
        new = {number: Range(max(begin, self._next.get(number, 0)), end) for number, (begin, end) in ranges.items()}
        for raw in reader.read(new, wanted):
            number, offset = position_of(raw)
            self._enter(raw)
            self._next[number] = offset + 1
        if wanted():
            # Offsets without a record belong to transaction markers, to aborted records, or to records that compaction
            # removed.
            self._next.update((number, end) for number, (_, end) in new.items())

    def _enter(self, raw: Raw) -> None:
        message = message_at(self._topic, raw)
        try:
            disposed = read_disposition(message)
            if disposed is not None:
                self._disposed.setdefault(*disposed)
                return
            dead_letter = read_dead_letter(message)
        except MessageError:
            self.other_messages += 1
            return
        self._seen.setdefault(dead_letter.id, (raw.timestamp()[1], []))[1].append(position_of(raw))

    def _fetch(self, positions: Sequence[_Position], wanted: _Wanted) -> dict[_Position, StoredDeadLetter]:
        found: dict[_Position, StoredDeadLetter] = {}
        wanted_positions = frozenset(positions)
        for ranges in _passes(positions):
            for raw in self._opened().read(ranges, wanted):
                position = position_of(raw)
                if position in wanted_positions:
                    dead_letter, whole = read_whole(message_at(self._topic, raw))
                    place = f"{self._topic}/{position[0]} offset {position[1]}"
                    found[position] = StoredDeadLetter(dead_letter=dead_letter, place=place, whole_size=whole)
        return found

    def _opened(self) -> LogReader:
        if self._reader is None:
            raise SourceError(f"{self!r} is not open; await open() first")
        return self._reader


def message_at(topic: str, raw: Raw) -> Message:
    """Return the message of ``lanes`` for a record of the topic. The key of the message is the key of the record."""
    number, offset = position_of(raw)
    return Message(Partition(PartitionId(topic, number), READER), offset, raw.key(), 0, raw, None)


def position_of(raw: Raw) -> _Position:
    """Return the partition and offset of a record."""
    number, offset = raw.partition(), raw.offset()
    # Every record that was read has a partition and an offset.
    assert number is not None and offset is not None
    return number, offset


def _passes(positions: Sequence[_Position]) -> list[dict[int, Range]]:
    """Return ranges that cover these positions, in passes. A pass has at most one range for each partition.

    The box reads distant dead letters in separate passes, and skips the records between them.
    """
    ranges: dict[int, list[Range]] = {}
    for number, offset in positions:
        of_partition = ranges.setdefault(number, [])
        if of_partition and offset - of_partition[-1].end < _NEAR:
            of_partition[-1] = Range(of_partition[-1].begin, offset + 1)
        else:
            of_partition.append(Range(offset, offset + 1))
    longest = max(map(len, ranges.values()), default=0)
    return [{number: of[turn] for number, of in ranges.items() if turn < len(of)} for turn in range(longest)]
