"""Errors of the client: which are permanent, their texts and remedies, and a log that an outage cannot flood."""

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

LOG_EVERY: Final = 30.0
"""Seconds between two log lines about the same error code."""

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
    "the group has members of another protocol, or it is a share group, which has no order; use another group.id, or "
    "the protocol and strategy of its members"
)
_REMEDIES: Final[Mapping[int, str]] = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: _OTHER_GROUP,
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user Read on the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user Describe and Read on the topic",
}
_HEARTBEAT_848: Final = "ConsumerGroupHeartbeat"
_UNSUPPORTED: Final = "version not supported"
_NO_SUCH_GROUP: Final = "group id does not exist"
_NO_848: Final = (
    "this broker does not know group.protocol='consumer' (KIP-848); set 'classic', or use Kafka 4.0 or newer with "
    "'consumer' in group.coordinator.rebalance.protocols"
)


def is_permanent(error: KafkaError) -> bool:
    """Whether the same call fails until an operator changes something."""
    return error.fatal() or error.code() in _PERMANENT


def client_text(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """The name and text of an error, without the secrets of ``settings``."""
    return f"{error.name()}: {redacted(error.str(), settings)}"


def client_message(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """The text of ``client_text``, followed by the remedy where one is known."""
    text = error.str()
    remedy = _REMEDIES.get(error.code())
    if _HEARTBEAT_848 in text:
        remedy = _NO_848 if _UNSUPPORTED in text else _OTHER_GROUP if _NO_SUCH_GROUP in text else remedy
    return client_text(error, settings) + (f"; {remedy}" if remedy else "")


def exception_text(raised: BaseException, settings: Mapping[str, Any]) -> str:
    """The text of an exception raised by the client or by a callback of the user, without secrets."""
    error = raised.args[0] if raised.args else None
    if isinstance(error, KafkaError):
        return client_message(error, settings)
    return f"{type(raised).__name__}: {redacted(str(raised), settings)}"


def fatal_error(what: str, raised: BaseException, settings: Mapping[str, Any]) -> SourceError:
    """The error that ends a source; ``what`` is the sentence that says what failed.

    It is chained to the exception that was raised, unless the traceback of that shows a secret.
    """
    failure = SourceError(f"{what}: {exception_text(raised, settings)}; start again")
    shown = "".join(traceback.format_exception(raised))
    if redacted(shown, settings) == shown:
        failure.__cause__ = raised
    return failure


def startup_error(name: str, failure: Exception, settings: Mapping[str, Any]) -> LanesError:
    """The error of a source whose client cannot be created or is refused at the start.

    Raise it without a chain: ``failure`` may show a secret.
    """
    error = failure.args[0] if failure.args else ""
    if not isinstance(error, KafkaError):
        return ConfigError(f"{name}: {redacted(str(failure), settings)}; correct the configuration of the client")
    text = f"{name}: {client_message(error, settings)}"
    if error.code() in (KafkaError._INVALID_ARG, KafkaError._CONFLICT):
        return ConfigError(f"{text}; correct the configuration of the client")
    return SourceError(text, retryable=not is_permanent(error))


def settings_error(error: object, settings: Mapping[str, Any]) -> ConfigError:
    """The error of a client that refuses its settings, without the secrets among them."""
    text = error.str() if isinstance(error, KafkaError) else str(error)
    return ConfigError(f"the Kafka client refuses its settings: {redacted(text, settings)}")


class ErrorLog:
    """Logs the errors of a client. In an outage a client reports the same error many times a second.

    Args:
        name: Name of the client's owner, for log lines.
        clock: Monotonic clock, in seconds.
        user: The ``error_cb`` of the configuration, called for every error; None for none.
        settings: Configuration of the client. Its secrets are not shown.

    Attributes:
        down: Whether the client has reported that it reaches no broker, and no broker has answered since.
    """

    def __init__(
        self, name: str, clock: Clock, user: Callable[[Any], object] | None, settings: Mapping[str, Any]
    ) -> None:
        self.down = False
        self._settings = settings
        self._name = name
        self._clock = clock
        self._user = user
        self._logged_at: dict[int, float] = {}
        self._skipped: dict[int, int] = {}

    def on_error(self, error: KafkaError) -> None:
        """The client's ``error_cb``."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down = True
        self.on_message(error)
        if self._user is not None:
            self._user(error)

    def on_message(self, error: KafkaError) -> None:
        """Log an error, unless the same code was logged within ``LOG_EVERY`` seconds."""
        code, now = error.code(), self._clock()
        last = self._logged_at.get(code)
        if last is not None and now - last < LOG_EVERY:
            self._skipped[code] = self._skipped.get(code, 0) + 1
            return
        self._logged_at[code] = now
        more = self._skipped.pop(code, 0)
        again = f" ({more} times more since)" if more else ""
        log.warning("%s: %s%s", self._name, client_message(error, self._settings), again)

    def exception_text(self, raised: BaseException) -> str:
        """The text of an exception, without secrets."""
        return exception_text(raised, self._settings)

    def answered(self) -> None:
        """Note that a broker has answered."""
        self.down = False
