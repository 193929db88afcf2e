"""What a broker says of its settings. All calls block, each with a deadline; nothing is written."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from lanes.errors import SourceError

__all__ = [
    "DEADLINE",
    "METADATA_LIMIT",
    "NOT_ALLOWED",
    "answer",
    "broker_settings",
    "metadata_limit",
    "said",
    "settings",
]

DEADLINE: Final = 5.0
"""Seconds that one question may take."""

METADATA_LIMIT: Final = "offset.metadata.max.bytes"

NOT_ALLOWED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)
_POLL: Final = 0.05


def metadata_limit(admin: AdminClient, *, timeout: float = DEADLINE) -> int | None:
    """How long commit metadata may be at the broker, in its own count; None = this user may not ask.

    Blocks for up to ``timeout`` seconds. Raises a retryable ``SourceError`` when nothing answers.
    """
    text = broker_settings(admin, timeout=timeout).get(METADATA_LIMIT)
    return None if text is None else int(text)


def broker_settings(admin: AdminClient, *, timeout: float = DEADLINE) -> Mapping[str, str]:
    """The settings of one broker; empty where this user may not ask.

    Blocks for up to ``timeout`` seconds. Raises a retryable ``SourceError`` when nothing answers.
    """
    deadline = time.monotonic() + timeout
    try:
        cluster = answer(admin, admin.describe_cluster(request_timeout=timeout), deadline)
        # Any broker will do: brokers of one cluster that differ in these are a fault of their own.
        number = min(node.id for node in cluster.nodes)
        return settings(admin, ResourceType.BROKER, str(number), deadline)
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() in NOT_ALLOWED:
            return {}
        raise SourceError(
            f"the settings of a broker could not be read ({said(error)}): see that it is up", retryable=True
        ) from failure


def settings(admin: AdminClient, kind: ResourceType, name: str, deadline: float) -> dict[str, str]:
    """The settings of a broker or a topic. Blocks until ``deadline`` (seconds of ``time.monotonic``) at most.

    Raises ``KafkaException``, also when it is too late.
    """
    resource = ConfigResource(kind, name)
    asked = admin.describe_configs([resource], request_timeout=max(_POLL, deadline - time.monotonic()))
    found = answer(admin, asked[resource], deadline)
    return {entry.name: entry.value for entry in found.values() if entry.value is not None}


def answer(admin: AdminClient, future: Future[Any], deadline: float, give_up: Callable[[], bool] | None = None) -> Any:
    """The answer. Serves the client's callbacks meanwhile. Raises ``KafkaException``, also when it is too late."""
    while not future.done():
        if time.monotonic() >= deadline or (give_up is not None and give_up()):
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time"))
        admin.poll(0)
        concurrent.futures.wait([future], _POLL)
    return future.result(0)


def said(error: KafkaError) -> str:
    """An error in words."""
    return f"{error.name()}: {error.str()}"
