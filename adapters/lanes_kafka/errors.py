"""Errors of the client: which will never pass, what is said of them, and a log that an outage does not flood."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError

from lanes.clock import Clock
from lanes.errors import ConfigError, LanesError, SourceError
from lanes_kafka.config import redacted

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


_OTHER_GROUP: Final = (
    "the group has members of another protocol, or is a share group, which has no order: use a group.id of its own, or "
    "the protocol and strategy of its members"
)
_REMEDIES: Final[Mapping[int, str]] = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: _OTHER_GROUP,
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user Read on the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user Describe and Read on the topic",
}
_OF_848: Final = "ConsumerGroupHeartbeat"
_UNSUPPORTED: Final = "version not supported"
_NO_SUCH_GROUP: Final = "group id does not exist"
_NO_848: Final = (
    "this broker does not know group.protocol='consumer' (KIP-848): set 'classic', or have one of Kafka 4.0 or newer "
    "whose group.coordinator.rebalance.protocols names it"
)


def is_permanent(error: KafkaError) -> bool:
    """Whether the same call fails again until somebody changes something."""
    return error.fatal() or error.code() in _PERMANENT


def named(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """What a client says, without the secrets among its settings."""
    return f"{error.name()}: {redacted(error.str(), settings)}"


def said(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """What a client says, as ``named``; and what is to be done, where that is known."""
    text = error.str()
    remedy = _REMEDIES.get(error.code())
    if _OF_848 in text:
        remedy = _NO_848 if _UNSUPPORTED in text else _OTHER_GROUP if _NO_SUCH_GROUP in text else remedy
    return named(error, settings) + (f": {remedy}" if remedy else "")


def words(raised: BaseException, settings: Mapping[str, Any]) -> str:
    """What an exception says, of the client or of a function of the user's that it called, without the secrets."""
    error = raised.args[0] if raised.args else None
    if isinstance(error, KafkaError):
        return said(error, settings)
    return f"{type(raised).__name__}: {redacted(str(raised), settings)}"


def ended_by(what: str, raised: BaseException, settings: Mapping[str, Any]) -> SourceError:
    """What a source stops with after an exception that it cannot go on from; ``what`` has failed. Chained to it, unless
    its traceback shows a secret."""
    failure = SourceError(f"{what}: {words(raised, settings)}; start again")
    shown = "".join(traceback.format_exception(raised))
    if redacted(shown, settings) == shown:
        failure.__cause__ = raised
    return failure


def refusal(name: str, failure: Exception, settings: Mapping[str, Any]) -> LanesError:
    """What is raised where a client cannot be made, or does not get what it needs at the start. Not to be chained: the
    ``failure`` itself may show a secret."""
    error = failure.args[0] if failure.args else ""
    if not isinstance(error, KafkaError):
        return ConfigError(f"{name}: {redacted(str(failure), settings)}: correct the configuration of the client")
    text = f"{name}: {said(error, settings)}"
    if error.code() in (KafkaError._INVALID_ARG, KafkaError._CONFLICT):
        return ConfigError(f"{text}: correct the configuration of the client")
    return SourceError(text, retryable=not is_permanent(error))


def client_failure(error: object, settings: Mapping[str, Any]) -> ConfigError:
    """What a client says that cannot be made of its settings, without the secrets among them."""
    text = error.str() if isinstance(error, KafkaError) else str(error)
    return ConfigError(f"the Kafka client refuses its settings: {redacted(text, settings)}")


class ErrorLog:
    """What the client says beside its messages; an outage says it many times a second.

    ``user``: the ``error_cb`` of the configuration, called every time. ``settings``: whose secrets are not shown.
    ``down``: no broker is reached, as far as is known.
    """

    def __init__(
        self, name: str, clock: Clock, user: Callable[[Any], object] | None, settings: Mapping[str, Any]
    ) -> None:
        self.down = False
        self._settings = settings
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
        log.warning("%s: %s%s", self._name, said(error, self._settings), again)

    def words(self, raised: BaseException) -> str:
        """What an exception says, without the secrets."""
        return words(raised, self._settings)

    def answered(self) -> None:
        """A broker is reached."""
        self.down = False
