"""Reads offset ranges of a topic with a consumer that joins no group. All reads block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from lanes.errors import SourceError
from lanes_kafka.config import addresses
from lanes_kafka.errors import client_text, is_permanent, settings_error

SILENCE: Final = 15.0
"""Seconds without an answer of the broker after which reading fails."""

_WAIT: Final = 0.2
_BATCH: Final = 500

_OURS: Final[Mapping[str, Any]] = {
    # The client requires a group id. The reader neither joins this group nor commits positions.
    "group.id": "lanes-dead-letters",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "earliest",
    "queued.max.messages.kbytes": 16_384,
    "fetch.queue.backoff.ms": 5,
    # At the end of a range the broker delays its answer for this time, and the next range waits for the answer.
    "fetch.wait.max.ms": 20,
}


_PRODUCERS_OWN: Final = frozenset(
    {"acks", "batch.num.messages", "enable.idempotence", "linger.ms", "message.timeout.ms"}
)
"""Settings of the dead-letter producer about which a consumer would log a warning."""


class Range(NamedTuple):
    """A range of offsets.

    Attributes:
        begin: First offset.
        end: Offset after the last offset of the range.
    """

    begin: int
    end: int


class LogReader:
    """Reads offset ranges of one topic. Make all calls in one thread.

    Args:
        settings: Configuration of the client, whose secrets no error or log line shows.
        topic: Name of the topic.

    Raises:
        ConfigError: The client refuses its settings.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str) -> None:
        self._settings = settings
        self._topic = topic
        try:
            reading = {name: value for name, value in settings.items() if name not in _PRODUCERS_OWN}
            self._consumer = Consumer({**reading, **_OURS})
        except (KafkaException, TypeError, ValueError) as failure:
            raise settings_error(failure.args[0], settings) from None

    def close(self) -> None:
        """Close the client. Idempotent."""
        self._consumer.close()

    def ranges(self) -> dict[int, Range]:
        """Ask for the range of offsets in each partition. Blocks.

        Raises ``SourceError`` if no broker answers, or the broker refuses the request.
        """
        try:
            found = self._consumer.list_topics(self._topic, timeout=SILENCE).topics[self._topic]
            if found.error is not None:
                raise KafkaException(found.error)
            places = {number: TopicPartition(self._topic, number) for number in found.partitions}
            bounds = self._consumer.get_watermark_offsets
            return {number: Range(*bounds(place, timeout=SILENCE)) for number, place in places.items()}
        except KafkaException as failure:
            raise self._failure(failure.args[0]) from None

    def read(self, ranges: Mapping[int, Range], wanted: Callable[[], bool]) -> Iterator[Message]:
        """Yield the records in these ranges, in the order of each partition, until ``wanted`` returns False.

        Raises ``SourceError`` when the broker does not answer, or refuses the read.
        """
        ends = {number: end for number, (begin, end) in ranges.items() if begin < end}
        if not ends:
            return
        self._consumer.assign([TopicPartition(self._topic, number, ranges[number].begin) for number in ends])
        try:
            heard = time.monotonic()
            while ends and wanted():
                # A ``consume`` call for several records waits until it has them all, so ask for one record first.
                batch = self._consumer.consume(1, _WAIT)
                if batch:
                    batch += self._consumer.consume(_BATCH - 1, 0.0)
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE:
                    raise self._failure(KafkaError(KafkaError._TIMED_OUT, f"no broker answered for {SILENCE:g} s"))
                for message in batch:
                    yield from self._within(message, ends)
        finally:
            self._consumer.unassign()

    def _within(self, message: Message, ends: dict[int, int]) -> Iterator[Message]:
        """Yield a record within the ranges, and remove its partition from ``ends`` at the end of its range."""
        error, number, offset = message.error(), message.partition(), message.offset()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            # The client requests the coordinator of its group, even if it joins no group. A refusal of this request
            # does no harm.
            if is_permanent(error) and error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise self._failure(error)
            return
        # A record and an end-of-partition event have a partition and an offset.
        assert number is not None and offset is not None
        if error is None and offset < ends.get(number, 0):
            yield message
        # If the last offsets hold a transaction marker or compacted records, only the end-of-partition event arrives.
        if error is not None or offset + 1 >= ends.get(number, 0):
            ends.pop(number, None)

    def _failure(self, error: KafkaError) -> SourceError:
        return SourceError(
            f"cannot read topic {self._topic!r} at {addresses(self._settings)} ({client_text(error, self._settings)}); "
            "check that the broker runs, and that this user may read the topic",
            retryable=not is_permanent(error),
        )
