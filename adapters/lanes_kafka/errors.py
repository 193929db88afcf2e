"""Errors of the client: which will never pass, and a log that an outage does not flood."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError

from lanes.clock import Clock

log = logging.getLogger("lanes.kafka")

SAID_EVERY: Final = 30.0
"""Seconds between two lines of the log about the same kind of error."""

_PERMANENT: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError._FATAL,
        KafkaError._INVALID_ARG,
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.GROUP_MAX_SIZE_REACHED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_ASSIGNOR,
        KafkaError.UNSUPPORTED_VERSION,
    }
)


def is_permanent(error: KafkaError) -> bool:
    """Whether the same call fails again until somebody changes something."""
    return error.fatal() or error.code() in _PERMANENT


class ErrorLog:
    """What the client says beside its messages; an outage says it many times a second.

    ``user``: the ``error_cb`` of the configuration, called every time. ``down``: no broker is reached, as far as is
    known.
    """

    def __init__(self, name: str, clock: Clock, user: Callable[[Any], object] | None) -> None:
        self.down = False
        self._name = name
        self._clock = clock
        self._user = user
        self._said: dict[int, float] = {}
        self._unsaid: dict[int, int] = {}

    def on_error(self, error: KafkaError) -> None:
        """The client's ``error_cb``."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down = True
        self.on_message(error)
        if self._user is not None:
            self._user(error)

    def on_message(self, error: KafkaError) -> None:
        """Say it, unless the same was said a moment ago."""
        code, now = error.code(), self._clock()
        last = self._said.get(code)
        if last is not None and now - last < SAID_EVERY:
            self._unsaid[code] = self._unsaid.get(code, 0) + 1
            return
        self._said[code] = now
        more = self._unsaid.pop(code, 0)
        again = f" ({more} times more since)" if more else ""
        log.warning("%s: %s: %s%s", self._name, error.name(), error.str(), again)

    def answered(self) -> None:
        """A broker is reached."""
        self.down = False
