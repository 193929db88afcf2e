"""What a broker says of one topic, asked once. Blocks, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ResourceType, TopicDescription

from lanes.errors import SourceError
from lanes_kafka.admin.producing import addresses, client_failure
from lanes_kafka.admin.questions import answer, cause, is_login, is_refused, settings_of
from lanes_kafka.setting_names import redacted

DEADLINE: Final = 10.0
"""Seconds that a broker may take to answer all."""


class TopicFacts(NamedTuple):
    """``compacted`` and ``max_message_bytes`` are False and None where this user may not ask for them."""

    partitions: int
    writable: bool
    compacted: bool
    max_message_bytes: int | None


def ask_topic(settings: Mapping[str, Any], topic: str, wanted: Callable[[], bool] = lambda: True) -> TopicFacts | None:
    """What is known of a topic; None when there is none. Blocks for up to ``DEADLINE`` seconds; creates nothing.

    ``wanted``: False = nobody waits any more, and it gives up.

    Raises ``SourceError`` when no broker answers (retryable), the login is refused, or the topic may not be described.
    """
    errors: list[KafkaError] = []
    try:
        # An idempotent client asks for a number to produce with, also where it only looks.
        connecting: dict[str, Any] = {**settings, "enable.idempotence": False, "error_cb": errors.append}
        asker = _Asker([AdminClient(connecting)], errors, wanted)
    except (KafkaException, TypeError, ValueError) as failure:
        raise client_failure(failure.args[0], settings) from None
    try:
        return _facts(asker, topic)
    except KafkaException as failure:
        error: KafkaError = failure.args[0]
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise _unanswered(settings, topic, error, errors) from None
    finally:
        asker.close()


def _facts(asker: _Asker, topic: str) -> TopicFacts:
    found = asker.topic(topic)
    # A broker too old to tell says nothing.
    allowed = found.authorized_operations
    config = asker.config(topic)
    limit = config.get("max.message.bytes", "")
    return TopicFacts(
        partitions=len(found.partitions),
        writable=not allowed or AclOperation.WRITE in allowed,
        compacted="compact" in config.get("cleanup.policy", ""),
        max_message_bytes=int(limit) if limit.isdigit() else None,
    )


def no_answer(settings: Mapping[str, Any], topics: Sequence[str], name: str) -> SourceError:
    """What is wrong where topics were not described in time. Blocks for up to ``DEADLINE`` seconds a topic.

    Raises what ``ask_topic`` raises, which says more.
    """
    for topic in topics:
        ask_topic(settings, topic)
    return SourceError(f"{name}: the broker did not describe the topics in time: see that it is up", retryable=True)


class _Asker:
    """Waits for answers, all of them within ``DEADLINE``, and no longer than there is hope and somebody wants them.

    ``admin``: the client alone, known nowhere else: its threads and sockets end when nobody knows it any more, and an
    error is kept for long, with a traceback that knows this.
    """

    def __init__(self, admin: list[AdminClient], errors: list[KafkaError], wanted: Callable[[], bool]) -> None:
        self._admin = admin
        self._errors = errors
        self._wanted = wanted
        self._deadline = time.monotonic() + DEADLINE

    def topic(self, name: str) -> TopicDescription:
        asked = self._admin[0].describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=DEADLINE
        )
        found: TopicDescription = answer(self._admin[0], asked[name], self._deadline, self._gives_up)
        return found

    def config(self, topic: str) -> dict[str, str]:
        """The topic's settings; none where this user may not ask, or is not answered."""
        try:
            return settings_of(self._admin[0], ResourceType.TOPIC, topic, self._deadline, self._gives_up)
        except KafkaException:
            return {}

    def close(self) -> None:
        """Let go of the client. Idempotent."""
        self._admin.clear()

    def _gives_up(self) -> bool:
        return is_refused(self._errors) or not self._wanted()


def _unanswered(settings: Mapping[str, Any], topic: str, error: KafkaError, errors: list[KafkaError]) -> SourceError:
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return SourceError(f"topic {topic!r}: this user may not describe it; allow it Describe on the topic")
    why = cause(error, errors)
    said = redacted(why.str(), settings)
    if is_login(why):
        return SourceError(f"login refused at {addresses(settings)} ({said}): correct the credentials")
    return SourceError(
        f"no Kafka broker answers at {addresses(settings)} within {DEADLINE:g} s ({said}): start it, or correct "
        "bootstrap.servers and security.protocol",
        retryable=True,
    )
