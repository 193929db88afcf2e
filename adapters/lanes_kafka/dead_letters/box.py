"""The dead letters of a topic, for the operator: listed, found, published again; what became of them is written down.

A topic forgets nothing when it is asked to. So what became of a letter is a record of its own, a *disposition*, behind
the letter in its partition: what ages out, the letter does so first. Where the topic is compacted, letters have their
ids for keys, as dispositions always have, and the disposition takes the letter's place.
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
from lanes.dead_letters.box import Disposition, FoundDeadLetters, StoredDeadLetter
from lanes.errors import ConfigError, MessageError, SourceError
from lanes_kafka.broker import describe_topic
from lanes_kafka.client.records import READER
from lanes_kafka.dead_letters.log_reader import LogReader, Range
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
from lanes_kafka.dead_letters.wire import WIRE, Record, disposition_record, read_disposition, read_letter, read_whole
from lanes_kafka.dead_letters.writer import is_topic, topic_name
from lanes_kafka.errors import client_text, is_permanent

_Place = tuple[int, int]
"""Partition and offset."""

_NEAR: Final = 1_000
"""Letters no further apart than so many offsets are read in one go, with what lies between them."""

_Wanted = Callable[[], bool]


class KafkaDeadLetterBox:
    """What ``KafkaDeadLetters`` has written to ``topic``; see ``lanes.dead_letters.box.DeadLetterBox``.

    ``config`` is the dictionary a ``confluent_kafka`` client is made from. Reading needs the permission to read the
    topic and none of a group; disposing of a letter that to write to it. What has been read is not read again: each
    call reads on from where the last one ended. In memory are the ids and places of all letters, about 300 bytes each.
    Runs on asyncio and on trio.
    """

    remembers = True

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self._topic = topic_name(topic)
        self._settings = producer_settings(config)
        self._producer = ConfirmedProducer(self._settings, f"dead letters of {topic}")
        self.other_messages = 0
        self._reader: LogReader | None = None
        self._next: dict[int, int] = {}
        # The order in which they were parked is that of their time, for it is the broker's or the producer's.
        self._parked: dict[str, tuple[int, list[_Place]]] = {}
        self._disposed: dict[str, Disposition] = {}

    def __repr__(self) -> str:
        return f"<KafkaDeadLetterBox {self._topic}: {len(self._parked)} letters seen>"

    async def open(self) -> None:
        """Connect, and check that the topic is there. Raises ``ConfigError`` or ``SourceError``."""
        self._producer.open()
        try:
            await self._producer.call(self._open)
        except BaseException:
            await self._producer.aclose(0.0)
            raise

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """See ``lanes.dead_letters.box.DeadLetterBox.ids``. The first call reads the whole topic, despite the limit."""
        await self._producer.call(self._read_on)
        waiting = [(when, one) for one, (when, _) in self._parked.items() if one not in self._disposed]
        waiting.sort(key=lambda found: found[0])
        return [one for _, one in waiting[:limit]]

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        """See ``lanes.dead_letters.box.DeadLetterBox.find``."""
        await self._producer.call(self._read_on)
        found: dict[str, StoredDeadLetter | Disposition] = {
            one: self._disposed[one] for one in ids if one in self._disposed
        }
        copies = {one: list(self._parked[one][1]) for one in ids if one in self._parked and one not in found}
        while copies:
            places = {left.pop(0): one for one, left in copies.items()}
            fetched = await self._producer.call(functools.partial(self._fetch, sorted(places)))
            found |= {places[place]: parked for place, parked in fetched.items()}
            # Of a letter that was parked twice one copy may be gone, as where the topic is compacted.
            copies = {one: left for one, left in copies.items() if left and one not in found}
        return found

    async def dispose(self, parked: StoredDeadLetter, how: Disposition) -> None:
        """See ``lanes.dead_letters.box.DeadLetterBox.dispose``. The first disposition of a letter counts."""
        letter_id = parked.dead_letter.id
        # In each partition that holds a copy, so that none of them outlives it.
        for number in sorted({number for number, _ in self._parked[letter_id][1]}):
            await self._send(self._topic, disposition_record(letter_id, how, time.time()), number)
        self._disposed.setdefault(letter_id, how)

    async def publish(self, parked: StoredDeadLetter) -> str:
        """See ``lanes.dead_letters.box.DeadLetterBox.publish``. It goes to the partition it came from."""
        letter = parked.dead_letter
        # A letter is anybody's text, and the client takes what stands in front of a NUL for the name.
        facts = None
        if is_topic(letter.source):
            facts = await self._producer.call(lambda wanted: describe_topic(self._settings, letter.source, wanted))
        if facts is None or letter.partition >= facts.partitions:
            raise SourceError(
                f"{letter.source}/{letter.partition}, where letter {letter.id} came from, is not there: publish it "
                "yourself, then drop the letter"
            )
        key = letter.key if letter.record_key is None else letter.record_key
        record = Record(key, None if letter.tombstone else letter.value, [*WIRE.republished(letter)])
        number, offset = await self._send(letter.source, record, letter.partition)
        return f"{letter.source}/{number} offset {offset}"

    async def aclose(self) -> None:
        """Close what ``open`` opened. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            with anyio.CancelScope(shield=True):
                await self._producer.call(lambda wanted: reader.close())
        await self._producer.aclose()

    async def _send(self, topic: str, record: Record, partition: int) -> _Place:
        await self._producer.connect()
        try:
            return await self._producer.send(topic, record, partition)
        except KafkaException as failure:
            error = failure.args[0]
            raise SourceError(
                f"not confirmed by {topic}/{partition} ({client_text(error, self._settings)})",
                retryable=not is_permanent(error),
            ) from None

    # --- in the thread of the producer

    def _open(self, wanted: _Wanted) -> None:
        if describe_topic(self._settings, self._topic, wanted) is None:
            raise ConfigError(f"dead-letter topic {self._topic!r} does not exist: correct its name, or the brokers")
        if self._reader is None:
            self._reader = LogReader(self._settings, self._topic)

    def _read_on(self, wanted: _Wanted) -> None:
        """Take in what has come since the last time."""
        reader = self._opened()
        ranges = reader.ranges()
        new = {number: Range(max(begin, self._next.get(number, 0)), end) for number, (begin, end) in ranges.items()}
        for raw in reader.read(new, wanted):
            number, offset = place_of(raw)
            self._enter(raw)
            self._next[number] = offset + 1
        if wanted():
            # What is left below the ends are markers, and what was compacted away.
            self._next.update((number, end) for number, (_, end) in new.items())

    def _enter(self, raw: Raw) -> None:
        message = message_at(self._topic, raw)
        try:
            disposed = read_disposition(message)
            if disposed is not None:
                self._disposed.setdefault(*disposed)
                return
            letter = read_letter(message)
        except MessageError:
            self.other_messages += 1
            return
        self._parked.setdefault(letter.id, (raw.timestamp()[1], []))[1].append(place_of(raw))

    def _fetch(self, places: Sequence[_Place], wanted: _Wanted) -> dict[_Place, StoredDeadLetter]:
        found: dict[_Place, StoredDeadLetter] = {}
        wanted_places = frozenset(places)
        for ranges in _passes(places):
            for raw in self._opened().read(ranges, wanted):
                place = place_of(raw)
                if place in wanted_places:
                    letter, whole = read_whole(message_at(self._topic, raw))
                    at = f"{self._topic}/{place[0]} offset {place[1]}"
                    found[place] = StoredDeadLetter(dead_letter=letter, place=at, whole_size=whole)
        return found

    def _opened(self) -> LogReader:
        if self._reader is None:
            raise SourceError(f"{self!r} is not open: await open() first")
        return self._reader


def message_at(topic: str, raw: Raw) -> Message:
    """A record of the topic as a message whose key is the record's."""
    number, offset = place_of(raw)
    return Message(Partition(PartitionId(topic, number), READER), offset, raw.key(), 0, raw, None)


def place_of(raw: Raw) -> _Place:
    """Where a record lies."""
    number, offset = raw.partition(), raw.offset()
    # A record that was read has both.
    assert number is not None and offset is not None
    return number, offset


def _passes(places: Sequence[_Place]) -> list[dict[int, Range]]:
    """The ranges that hold these places, which rise: one of each partition a pass, so that none is read for long for
    the sake of a few letters far apart."""
    ranges: dict[int, list[Range]] = {}
    for number, offset in places:
        of_partition = ranges.setdefault(number, [])
        if of_partition and offset - of_partition[-1].end < _NEAR:
            of_partition[-1] = Range(of_partition[-1].begin, offset + 1)
        else:
            of_partition.append(Range(offset, offset + 1))
    longest = max(map(len, ranges.values()), default=0)
    return [{number: of[turn] for number, of in ranges.items() if turn < len(of)} for turn in range(longest)]
