"""Dead letters to a Kafka topic, confirmed by the broker before the message settles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, SourceError
from lanes_kafka.broker import describe_topic
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
from lanes_kafka.dead_letters.wire import Record, letter_record
from lanes_kafka.errors import client_text

__all__ = ["KafkaDeadLetters", "is_topic", "topic_name"]

_TOPIC: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_TOO_LARGE: Final = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
_NEVER: Final = frozenset(
    (
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_RECORD,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    )
)
"""What the broker answers to a record that it takes only when somebody has changed something."""

_USUAL_LIMIT: Final = 1_048_588
"""Bytes of a batch that a topic takes when nobody has set ``max.message.bytes``."""


class KafkaDeadLetters:
    """Writes each letter to ``topic``, which must exist.

    ``config`` is the dictionary a ``confluent_kafka`` client is made from, as a rule that of the consumer: what is a
    consumer's alone is left out. The producer is idempotent and every letter is confirmed by all replicas in sync.

    Key, value and headers are the original's; the id, the origin and the reason stand in ``Lanes-…`` headers: Id,
    Source, Partition, Position, Subject, Attempts, Error, Error-Text (percent-encoded), Epoch, Time and Timestamp
    (seconds since the epoch; when it was given up, and when it was published), Tombstone where there was no value,
    Null-Headers where headers had none, Key and Record-Key (percent-encoded) where the key of the record does not say
    it. An original header whose name starts with ``Lanes-``, or that the client cannot send, is kept as
    ``Lanes-Origin-<name>``, percent-encoded. A letter that is too large for the topic loses its original headers, then
    the end of its value; ``Lanes-Truncated`` says how many bytes that had. In a topic that is compacted the key of the
    record is the letter's id, or letters of one key would replace each other. ``read_letter`` makes a record of such a
    message again.

    Runs on asyncio and on trio. Raises ``ConfigError`` for settings that would lose letters.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self._topic = topic_name(topic)
        self._settings = producer_settings(config)
        self._producer = ConfirmedProducer(self._settings, f"dead letters to {topic}")
        self._by_id = False
        self._limit = _USUAL_LIMIT

    def __repr__(self) -> str:
        return f"<KafkaDeadLetters to {self._topic}>"

    async def open(self) -> None:
        """Connect, and check that the topic exists and may be written to. Waits up to 10 seconds. Idempotent.

        Raises ``ConfigError`` for a topic that is not there and settings that the client refuses, ``SourceError`` when
        no broker is reached (retryable) and for a topic that may not be written to.
        """
        self._producer.open()
        try:
            found = await self._producer.call(lambda wanted: describe_topic(self._settings, self._topic, wanted))
            if found is None:
                raise ConfigError(
                    f"dead-letter topic {self._topic!r} does not exist: letters would be lost; create it, with "
                    "cleanup.policy=delete and a retention that leaves time to look at them"
                )
            if not found.writable:
                raise SourceError(
                    f"dead-letter topic {self._topic!r}: this user may not write to it; allow it Write on the topic"
                )
            await self._producer.connect()
        except BaseException:
            await self._producer.aclose(0.0)
            raise
        self._by_id = found.compacted
        self._limit = found.max_message_bytes or _USUAL_LIMIT

    async def put(self, letter: DeadLetter) -> None:
        """Write the letter and wait for the confirmation, up to 10 seconds. One that is too large is cut.

        Written again, it is in the topic twice, with the same id. Cancelled, it may be written all the same. Raises
        ``SourceError``: retryable when the confirmation does not come, else when it never can.
        """
        if self._topic in (letter.source, letter.subject):
            raise SourceError(
                f"the source also reads the dead-letter topic {self._topic!r}, so every letter would make another; use "
                "a topic of its own"
            )
        by_id, limit = self._by_id, None
        while True:
            record = letter_record(letter, by_id=by_id, limit=limit)
            try:
                await self._producer.send(self._topic, record)
                return
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.code() == KafkaError.INVALID_RECORD and not by_id:
                    # A record without a key, and a compacted topic: this user may not ask for how it is set.
                    by_id = self._by_id = True
                elif error.code() in _TOO_LARGE:
                    limit = self._smaller(record, limit)
                else:
                    raise self._failure(error) from None

    def _smaller(self, record: Record, limit: int | None) -> int:
        """The next limit to try for a record that was too large."""
        if limit is not None and record.size > limit:
            raise SourceError(
                f"dead letter refused by {self._topic}: key and reason alone have {record.size} bytes, more than it "
                "takes; raise its max.message.bytes"
            )
        # Uncompressed it may be above the limit and fit: it was tried whole.
        return self._limit if limit is None and self._limit < record.size else record.size // 2

    def _failure(self, error: KafkaError) -> SourceError:
        said = client_text(error, self._settings)
        if error.code() not in _NEVER:
            return SourceError(f"dead letter not confirmed by {self._topic} ({said})", retryable=True)
        return SourceError(f"dead letter refused by {self._topic} ({said}): mend permissions or settings of the topic")

    async def aclose(self) -> None:
        """Wait up to 5 seconds for letters on their way, then close the client. Idempotent."""
        await self._producer.aclose()


def is_topic(name: str) -> bool:
    """Whether a topic can have this name."""
    return _TOPIC.fullmatch(name) is not None


def topic_name(topic: object) -> str:
    """A topic's name; raises ``ConfigError`` for what can be none."""
    if not isinstance(topic, str) or not is_topic(topic):
        raise ConfigError(f"dead-letter topic {topic!r}: must be letters, digits, '.', '_' and '-', 249 at most")
    return topic
