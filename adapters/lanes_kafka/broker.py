"""Questions to a broker, outside the consuming client. Every call blocks, with a deadline; nothing is written.

Reading order: how long one answer is waited for and why none came (``wait``, ``answer``, ``cause``), the settings of a
broker (``broker_settings``, ``metadata_limit``), all that is known of a topic (``ask_topic``).
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType, TopicDescription

from lanes.errors import SourceError
from lanes_kafka.config import addresses, redacted
from lanes_kafka.errors import client_failure

QUESTION_TIMEOUT: Final = 5.0
"""Seconds that one question may take."""

TOPIC_DEADLINE: Final = 10.0
"""Seconds that a broker may take to answer all that is asked of one topic."""

METADATA_LIMIT: Final = "offset.metadata.max.bytes"

NOT_ALLOWED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)

_POLL: Final = 0.05
_LOGIN: Final = frozenset((KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED))

_T = TypeVar("_T")


def _never() -> bool:
    return False


def wait(
    admin: AdminClient, futures: Collection[Future[_T]], deadline: float, give_up: Callable[[], bool] = _never
) -> bool:
    """Whether all of them are done by ``deadline``, in seconds of ``time.monotonic``. Blocks for no longer, serves the
    client's callbacks meanwhile, and ends at once where ``give_up`` is true."""
    while not all(future.done() for future in futures):
        left = deadline - time.monotonic()
        if left <= 0 or give_up():
            return False
        # Polled, it says what goes wrong meanwhile.
        admin.poll(0)
        concurrent.futures.wait(futures, min(left, _POLL))
    return True


def answer(admin: AdminClient, future: Future[_T], deadline: float, give_up: Callable[[], bool] = _never) -> _T:
    """What comes of one of them; see ``wait``. Raises ``KafkaException``, also when it is too late or given up."""
    done = wait(admin, [future], deadline, give_up)
    # An error is kept for long, with a traceback that knows this call: the client is to end all the same.
    del admin
    if not done:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time"))
    return future.result(0)


def settings_of(
    admin: AdminClient, kind: ResourceType, name: str, deadline: float, give_up: Callable[[], bool] = _never
) -> dict[str, str]:
    """The settings of a broker or a topic. Blocks and raises like ``answer``."""
    resource = ConfigResource(kind, name)
    asked: dict[ConfigResource, Future[dict[str, Any]]] = admin.describe_configs(
        [resource], request_timeout=max(_POLL, deadline - time.monotonic())
    )
    found = answer(admin, asked[resource], deadline, give_up)
    return {entry.name: entry.value for entry in found.values() if entry.value is not None}


def is_login(error: KafkaError) -> bool:
    """Whether it is a login that was refused."""
    return error.code() in _LOGIN


def is_refused(told: Sequence[KafkaError]) -> bool:
    """Whether a client that was told these has nothing to wait for: its login was refused."""
    return any(map(is_login, told))


def cause(error: KafkaError, told: Sequence[KafkaError]) -> KafkaError:
    """Why a question ended with ``error``, which may only say that its time is over: ``told`` is what the client was
    told beside it. A login that was refused says most."""
    causes = [one for one in told if one.code() != KafkaError._ALL_BROKERS_DOWN]
    return ([one for one in causes if is_login(one)] or causes or [error])[-1]


def metadata_limit(admin: AdminClient, *, timeout: float = QUESTION_TIMEOUT) -> int | None:
    """How long commit metadata may be at the broker, in its own count; None = this user may not ask.

    Blocks for up to ``timeout`` seconds. Raises a retryable ``SourceError`` when nothing answers.
    """
    text = broker_settings(admin, timeout=timeout).get(METADATA_LIMIT)
    return None if text is None else int(text)


def broker_settings(admin: AdminClient, *, timeout: float = QUESTION_TIMEOUT) -> Mapping[str, str]:
    """The settings of one broker; empty where this user may not ask.

    Blocks for up to ``timeout`` seconds. Raises a retryable ``SourceError`` when nothing answers.
    """
    deadline = time.monotonic() + timeout
    try:
        cluster = answer(admin, admin.describe_cluster(request_timeout=timeout), deadline)
        # Any broker will do: brokers of one cluster that differ in these are a fault of their own.
        number = min(node.id for node in cluster.nodes)
        return settings_of(admin, ResourceType.BROKER, str(number), deadline)
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() in NOT_ALLOWED:
            return {}
        # Not its words, nor chained: they may show a secret of settings that nobody has told here.
        raise SourceError(
            f"the settings of a broker could not be read ({error.name()}): see that it is up", retryable=True
        ) from None


class TopicFacts(NamedTuple):
    """``compacted`` and ``max_message_bytes`` are False and None where this user may not ask for them."""

    partitions: int
    writable: bool
    compacted: bool
    max_message_bytes: int | None


def ask_topic(settings: Mapping[str, Any], topic: str, wanted: Callable[[], bool] = lambda: True) -> TopicFacts | None:
    """What is known of a topic; None when there is none. Blocks for up to ``TOPIC_DEADLINE`` seconds; creates nothing.

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
    """What is wrong where topics were not described in time. Blocks for up to ``TOPIC_DEADLINE`` seconds a topic.

    Raises what ``ask_topic`` raises, which says more.
    """
    for topic in topics:
        ask_topic(settings, topic)
    return SourceError(f"{name}: the broker did not describe the topics in time: see that it is up", retryable=True)


class _Asker:
    """Waits for answers until ``TOPIC_DEADLINE``, or until the login is refused or no caller wants them.

    ``admin``: the client alone, known nowhere else: its threads and sockets end when nobody knows it any more, and an
    error is kept for long, with a traceback that knows this.
    """

    def __init__(self, admin: list[AdminClient], errors: list[KafkaError], wanted: Callable[[], bool]) -> None:
        self._admin = admin
        self._errors = errors
        self._wanted = wanted
        self._deadline = time.monotonic() + TOPIC_DEADLINE

    def topic(self, name: str) -> TopicDescription:
        asked = self._admin[0].describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=TOPIC_DEADLINE
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
        f"no Kafka broker answers at {addresses(settings)} within {TOPIC_DEADLINE:g} s ({said}): start it, or correct "
        "bootstrap.servers and security.protocol",
        retryable=True,
    )
