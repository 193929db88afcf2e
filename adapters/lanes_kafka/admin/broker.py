"""What a broker says of its settings. All calls block, each with a deadline; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ResourceType

from lanes.errors import SourceError
from lanes_kafka.admin.questions import NOT_ALLOWED, answer, settings_of

__all__ = ["DEADLINE", "METADATA_LIMIT", "broker_settings", "metadata_limit"]

DEADLINE: Final = 5.0
"""Seconds that one question may take."""

METADATA_LIMIT: Final = "offset.metadata.max.bytes"


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
        return settings_of(admin, ResourceType.BROKER, str(number), deadline)
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() in NOT_ALLOWED:
            return {}
        # Not its words, nor chained: they may show a secret of settings that nobody has told here.
        raise SourceError(
            f"the settings of a broker could not be read ({error.name()}): see that it is up", retryable=True
        ) from None
