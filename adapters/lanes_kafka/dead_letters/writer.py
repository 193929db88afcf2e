"""Writes dead letters to a Kafka topic. The broker confirms a dead letter before the consumer settles its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from lanes.arguments import kind_of, names_unknown_options, shown_value
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, SourceError
from lanes.source import Destination
from lanes_kafka.broker import describe_topic, similar_to_missing
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
from lanes_kafka.dead_letters.wire import Record, dead_letter_record
from lanes_kafka.errors import NOT_ALLOWED, client_text
from lanes_kafka.keywords import of_the_client
from lanes_kafka.topic_names import is_topic

_TOO_LARGE: Final = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
_PERMANENT: Final = NOT_ALLOWED | {
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
}
"""Errors of a record that fails until an operator changes something."""

_USUAL_LIMIT: Final = 1_048_588
"""Maximum size in bytes of a batch in a topic without a ``max.message.bytes`` of its own."""


@names_unknown_options("KafkaDeadLetters", homes=of_the_client("KafkaDeadLetters", "topic"))
class KafkaDeadLetters:
    """Writes dead letters to a topic, which must exist.

    The producer is idempotent, and all in-sync replicas confirm each dead letter. The object runs on asyncio and on
    trio.

    A record has the key, value and headers of the original message. Further headers describe the dead letter:

    - ``Lanes-Id``, ``Lanes-Source``, ``Lanes-Partition``, ``Lanes-Position``, ``Lanes-Subject``, ``Lanes-Attempts``,
      ``Lanes-Error``, ``Lanes-Epoch``, and ``Lanes-Error-Text`` (percent-encoded).
    - ``Lanes-Time``: the time at which the consumer made the dead letter, in seconds since the epoch.
      ``Lanes-Timestamp``: the time at which a producer published the message.
    - ``Lanes-System`` and ``Lanes-Incarnation`` (percent-encoded): the kind of the broker, and the id of the topic.
    - ``Lanes-Queue`` (percent-encoded) and ``Lanes-Queue-Partition``, for a message of a partitioned queue.
    - ``Lanes-Tombstone`` for a message without a value, and ``Lanes-Null-Headers`` for headers without a value.
    - ``Lanes-Key`` and ``Lanes-Record-Key`` (percent-encoded), unless the key of the record shows both.
    - ``Lanes-Origin-<name>`` (percent-encoded) for an original header that starts with ``Lanes-``, or whose name the
      client cannot send.

    If a dead letter is too large for the topic, the writer first removes the original headers, and then truncates the
    value. The header ``Lanes-Truncated`` contains the original length of the value in bytes. In a compacted topic the
    key of the record is the id of the dead letter. With the original key, a dead letter would replace earlier dead
    letters of this key.

    Args:
        config: The dictionary of a ``confluent_kafka`` client, usually the dictionary of the consumer. The writer omits
            settings that only consumers have.
        topic: Name of the dead-letter topic.

    Raises:
        ConfigError: A setting is invalid or could lose dead letters, or the topic name is invalid.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self._topic = topic_name(topic)
        self._name = f"dead letters to {topic}"
        self._producer = ConfirmedProducer(producer_settings(config), self._name)
        self._settings = self._producer.settings
        self._by_id = False
        self._limit = _USUAL_LIMIT

    def __repr__(self) -> str:
        return f"<KafkaDeadLetters to {self._topic}>"

    async def open(self) -> None:
        """Connect, and check that the topic exists and is writable. Waits up to 10 seconds. Idempotent.

        Raises:
            ConfigError: The topic does not exist, or the client refuses its settings.
            SourceError: No broker answers (retryable), the broker refuses the login, or this user may not describe or
                write to the topic.
        """
        self._producer.open()
        try:
            found = await self._producer.call(
                lambda wanted: describe_topic(self._settings, self._topic, wanted, name=self._name)
            )
            if found is None:
                similar = await self._producer.call(lambda wanted: similar_to_missing(self._settings, self._topic))
                raise ConfigError(
                    f"dead-letter topic {self._topic!r} does not exist{similar}; create it, with "
                    "cleanup.policy=delete and a retention that leaves time to inspect dead letters"
                )
            if not found.writable:
                raise SourceError(
                    f"dead-letter topic {self._topic!r}: this user may not write to it; allow the user Write on it"
                )
            await self._producer.connect()
        except BaseException:
            await self._producer.aclose(0.0)
            raise
        self._by_id = found.compacted
        self._limit = found.max_message_bytes or _USUAL_LIMIT

    async def put(self, dead_letter: DeadLetter) -> None:
        """Write a dead letter, and wait for its confirmation, at most 10 s for each attempt.

        If the topic refuses the size, the call retries with a shorter record. A repeated call writes another record
        with the same id. A cancelled call may still write the dead letter.

        Args:
            dead_letter: The dead letter to write.

        Raises:
            SourceError: The broker does not confirm the write (retryable) or refuses it, or the source also reads this
                topic.
        """
        if self._topic in (dead_letter.source, dead_letter.subject):
            raise SourceError(
                f"the source also reads the dead-letter topic {self._topic!r}, so every dead letter would create "
                "another dead letter; write the dead letters to a separate topic"
            )
        by_id, limit = self._by_id, None
        while True:
            record = dead_letter_record(dead_letter, by_id=by_id, limit=limit)
            try:
                await self._producer.send(self._topic, record)
                return
            except KafkaException as failure:
                error: KafkaError = failure.args[0]
                if error.code() == KafkaError.INVALID_RECORD and not by_id:
                    # The broker refused a record without a key, so the topic is compacted; this user may not read the
                    # topic's settings.
                    by_id = self._by_id = True
                elif error.code() in _TOO_LARGE:
                    limit = self._smaller(record, limit)
                else:
                    raise self._failure(error) from None

    def _smaller(self, record: Record, limit: int | None) -> int:
        """Return the next size limit in bytes to try, after the broker refused a record as too large."""
        if limit is not None and record.size > limit:
            raise SourceError(
                f"dead letter refused by {self._topic}: its key and error text alone have {record.size} bytes; raise "
                "max.message.bytes of the topic"
            )
        # A record above the limit may fit after compression, so the writer has sent the whole record first.
        return self._limit if limit is None and self._limit < record.size else record.size // 2

    def _failure(self, error: KafkaError) -> SourceError:
        text = client_text(error, self._settings)
        if error.code() not in _PERMANENT:
            # The client learns only later of the deletion of a topic.
            missing = error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
            remedy = "create this topic again" if missing else "check that the broker runs and has this topic"
            return SourceError(
                f"dead letter not confirmed by {self._topic} ({text}); {remedy}",
                retryable=True,
            )
        return SourceError(
            f"dead letter refused by {self._topic} ({text}); correct the permissions or settings of the topic"
        )

    def destination(self) -> Destination:
        """Return the topic; see ``lanes.source.Addressed.destination``.

        Returns:
            The topic.
        """
        return Destination("kafka", self._topic)

    async def aclose(self) -> None:
        """Wait up to 5 seconds for unconfirmed dead letters, and then close the client. Idempotent."""
        await self._producer.aclose()


def topic_name(topic: object) -> str:
    """Return the name of a dead-letter topic, or raise ``ConfigError`` for an invalid name."""
    if isinstance(topic, Mapping):
        raise ConfigError(
            f"dead-letter topic is {kind_of(topic)}, no str; pass the configuration first and the topic second"
        )
    if not isinstance(topic, str) or not is_topic(topic):
        raise ConfigError(
            f"dead-letter topic {shown_value(topic)}: must be 1 to 249 letters, digits, '.', '_' and '-', and not '.' "
            "or '..'"
        )
    return topic
