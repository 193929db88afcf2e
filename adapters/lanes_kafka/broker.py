"""Requests of a reading client to a broker, each with a deadline.

Reading order: ``wait_for``, ``answer`` and ``likely_cause`` for one request; ``broker_settings`` and
``metadata_limit``; ``describe_topic``.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType, TopicDescription

from lanes.arguments import did_you_mean
from lanes.errors import SourceError
from lanes_kafka.config import address_name, addresses, redacted
from lanes_kafka.errors import NOT_ALLOWED, is_login_refused, is_permanent, login_remedy, settings_error

QUESTION_TIMEOUT: Final = 5.0
"""Seconds allowed for one request to a broker."""

TOPIC_DEADLINE: Final = 10.0
"""Seconds allowed for all requests about one topic."""

METADATA_LIMIT: Final = "offset.metadata.max.bytes"

COORDINATOR_TIMEOUT: Final = 3_600.0
"""Timeout in seconds of a request to a group's coordinator, the maximum that an ``AdminClient`` accepts.

If such a request times out before the coordinator is reached, librdkafka 2.16 ends the process with a failed assertion
as soon as the coordinator is reached again. The caller therefore closes the client long before this timeout to end a
request."""

LEADER_MOVES: Final = frozenset({KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION})
"""Error codes of a new partition, or of a partition whose leader moves."""

COORDINATOR_MOVES: Final = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
    }
)
"""Error codes of a group whose coordinator starts or moves."""

_POLL: Final = 0.05

_T = TypeVar("_T")


def wait_for(
    admin: AdminClient, futures: Collection[Future[_T]], deadline: float, give_up: Callable[[], bool] = lambda: False
) -> bool:
    """Wait for all futures, and serve the client's callbacks during the wait.

    Args:
        admin: Client that sent the requests.
        futures: Answers of the broker to wait for.
        deadline: Latest end of the wait, in seconds of ``time.monotonic``.
        give_up: Function that returns True to end the wait at once.

    Returns:
        Whether all futures have a result.
    """
    while not all(future.done() for future in futures):
        left = deadline - time.monotonic()
        if left <= 0 or give_up():
            return False
        # Polling calls error_cb, which reports the causes of a failure meanwhile.
        admin.poll(0)
        concurrent.futures.wait(futures, min(left, _POLL))
    return True


def answer(admin: AdminClient, future: Future[_T], deadline: float, give_up: Callable[[], bool] = lambda: False) -> _T:
    """Wait for one future as ``wait_for`` does, and return the result of the future.

    Raises ``KafkaException`` if the future has failed, or has no result before the deadline or before ``give_up``.
    """
    done = wait_for(admin, [future], deadline, give_up)
    # The traceback of a stored error references this frame, so the frame must not keep the client alive.
    del admin
    if not done:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time"))
    return future.result(0)


def settings_of(
    admin: AdminClient, kind: ResourceType, name: str, deadline: float, give_up: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """Return the settings of a broker or a topic that have a value, by name. Blocks and raises like ``answer``."""
    resource = ConfigResource(kind, name)
    asked: dict[ConfigResource, Future[dict[str, Any]]] = admin.describe_configs(
        [resource], request_timeout=max(_POLL, deadline - time.monotonic())
    )
    found = answer(admin, asked[resource], deadline, give_up)
    return {entry.name: entry.value for entry in found.values() if entry.value is not None}


def similar_topic(admin: AdminClient, topic: str, *, timeout: float = QUESTION_TIMEOUT) -> str:
    """Return a "did you mean" text about topics with names like a missing topic; "" = no similar topic. Blocks."""
    try:
        found = admin.list_topics(timeout=timeout).topics
    except KafkaException:
        return ""
    return did_you_mean(topic, (name for name in found if not name.startswith("__")))


def likely_cause(error: KafkaError, reported: Collection[KafkaError]) -> KafkaError:
    """Find the best explanation for the failure of a request.

    Args:
        error: The error of the request, which often only reports a timeout.
        reported: The errors that the client reported during the request.

    Returns:
        The last reported refusal of a login, or else the last report that names a cause, or else ``error``.
    """
    causes = [one for one in reported if one.code() != KafkaError._ALL_BROKERS_DOWN]
    return ([one for one in causes if is_login_refused(one)] or causes or [error])[-1]


# --- settings of a broker


def metadata_limit(admin: AdminClient, *, timeout: float = QUESTION_TIMEOUT) -> int | None:
    """Read the broker's ``offset.metadata.max.bytes``; None = no value, or this user may not read the value.

    The call blocks for up to ``timeout`` seconds. Raises the errors of ``broker_settings``.
    """
    text = broker_settings(admin, timeout=timeout).get(METADATA_LIMIT)
    return None if text is None else int(text)


def broker_settings(admin: AdminClient, *, timeout: float = QUESTION_TIMEOUT) -> Mapping[str, str]:
    """Read the settings of one broker; empty = this user may not read the settings.

    The call blocks for up to ``timeout`` seconds. Raises ``SourceError`` for every failure except a missing permission.
    The error is retryable if a second call may succeed.
    """
    deadline = time.monotonic() + timeout
    try:
        cluster = answer(admin, admin.describe_cluster(request_timeout=timeout), deadline)
        # Ask any broker, because these settings should be equal on all brokers of a cluster.
        number = min(node.id for node in cluster.nodes)
        return settings_of(admin, ResourceType.BROKER, str(number), deadline)
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() in NOT_ALLOWED:
            return {}
        # The error shows neither the text nor the chain of the failure, because both may contain a secret.
        permanent = is_permanent(error)
        remedy = "check that the broker runs"
        if permanent:
            remedy = login_remedy(error) if is_login_refused(error) else "correct the named cause"
        raise SourceError(
            f"cannot read the settings of a broker ({error.name()}); {remedy}", retryable=not permanent
        ) from None


# --- a topic


class TopicFacts(NamedTuple):
    """Facts of a topic.

    Attributes:
        partitions: Number of partitions.
        writable: Whether this user may write to the topic; True if the broker reports no permissions.
        compacted: Whether the topic is compacted; False if the broker did not return the settings of the topic.
        max_message_bytes: ``max.message.bytes`` of the topic; None if the broker did not return the settings.
        id: Id of the topic; "" = the broker reports no ids.
    """

    partitions: int
    writable: bool
    compacted: bool
    max_message_bytes: int | None
    id: str = ""


def describe_topic(
    settings: Mapping[str, Any], topic: str, wanted: Callable[[], bool] = lambda: True, *, name: str
) -> TopicFacts | None:
    """Ask for the facts of a topic, without creating the topic. The call blocks for up to ``TOPIC_DEADLINE`` seconds.

    Args:
        settings: Configuration of the client, whose secrets no error or log line shows.
        topic: Name of the topic.
        wanted: Function that returns False to end the call early.
        name: Name of the owner of the client, for errors.

    Returns:
        The facts; None when the topic does not exist.

    Raises:
        ConfigError: The client refuses its settings.
        SourceError: No broker answers (retryable), the broker refuses the login, or this user may not describe the
            topic.
    """
    reported: list[KafkaError] = []
    try:
        # An idempotent client asks for a producer id even if it only reads.
        connecting: dict[str, Any] = {**settings, "enable.idempotence": False, "error_cb": reported.append}
        admin = [AdminClient(connecting)]
    except (KafkaException, TypeError, ValueError) as failure:
        raise settings_error(failure.args[0], settings) from None
    try:
        return _facts(admin, topic, lambda: any(map(is_login_refused, reported)) or not wanted())
    except KafkaException as failure:
        error: KafkaError = failure.args[0]
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise unanswered(settings, topic, error, reported, TOPIC_DEADLINE, name) from None
    finally:
        admin.clear()


def similar_to_missing(settings: Mapping[str, Any], topic: str) -> str:
    """Return a "did you mean" text about topics with names like a missing topic. Creates its own client. Blocks.

    Args:
        settings: Configuration of the client, which has already reached a broker.
        topic: Name of the topic.

    Returns:
        The text; "" = no similar topic, or no answer of the broker.
    """
    quiet: dict[str, Any] = {**settings, "enable.idempotence": False, "error_cb": lambda error: None}
    return similar_topic(AdminClient(quiet), topic)


def _facts(admin: list[AdminClient], topic: str, give_up: Callable[[], bool]) -> TopicFacts:
    """Ask for the facts of a topic.

    The list ``admin`` contains the only reference to the client. The caller clears this list to end the client. Without
    the list, the traceback of a stored error would keep the client alive.
    """
    deadline = time.monotonic() + TOPIC_DEADLINE
    asked = admin[0].describe_topics(
        TopicCollection([topic]), include_authorized_operations=True, request_timeout=TOPIC_DEADLINE
    )
    found: TopicDescription = answer(admin[0], asked[topic], deadline, give_up)
    try:
        config = settings_of(admin[0], ResourceType.TOPIC, topic, deadline, give_up)
    except KafkaException:
        # This user may not read the topic's settings, or the broker does not answer.
        config = {}
    # A broker that is too old to report permissions sends no operations.
    allowed = found.authorized_operations
    limit = config.get("max.message.bytes", "")
    return TopicFacts(
        partitions=len(found.partitions),
        writable=not allowed or AclOperation.WRITE in allowed,
        compacted="compact" in config.get("cleanup.policy", ""),
        max_message_bytes=int(limit) if limit.isdigit() else None,
        id=id_text(found.topic_id),
    )


def id_text(topic_id: Any) -> str:
    """Return the id of a topic as text; "" if the broker reports no ids."""
    text = "" if topic_id is None else str(topic_id)
    # A broker without topic ids sends the id zero.
    return "" if not text.strip("A=-0") else text


def unanswered(
    settings: Mapping[str, Any],
    topic: str,
    error: KafkaError,
    reported: Collection[KafkaError],
    timeout: float,
    name: str,
) -> SourceError:
    """Make the error of a failed request about a topic.

    Args:
        settings: Configuration of the client, whose secrets no error or log line shows.
        topic: Name of the topic.
        error: The error of the request.
        reported: The errors that the client reported during the request.
        timeout: Seconds for which the function waited for an answer.
        name: Name of the owner of the client.

    Returns:
        The error; retryable if no broker answered.
    """
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return SourceError(f"{name}: this user may not describe topic {topic!r}; allow the user Describe on the topic")
    why = likely_cause(error, reported)
    text = redacted(why.str(), settings)
    if is_login_refused(why):
        return SourceError(f"{name}: login refused at {addresses(settings)} ({text}); {login_remedy(why)}")
    return SourceError(
        f"{name}: no Kafka broker answers at {addresses(settings)} within {timeout:g} s ({text}); start one, or "
        f"correct {address_name(settings)} and security.protocol",
        retryable=True,
    )
