"""Classifies and describes errors of the client, and logs errors at a bounded rate."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import KafkaError

from lanes.clock import Clock
from lanes.errors import ConfigError, LanesError, SourceError
from lanes_kafka.callbacks import Callback, CallbackError
from lanes_kafka.config import DEFAULT_SESSION_TIMEOUT_MS, is_secret, redacted, similar_setting

log = logging.getLogger("lanes.kafka")

LOG_EVERY: Final = 30.0
"""Seconds between two log lines about the same error code."""

NOT_ALLOWED: Final = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)
"""Error codes of a call that an access rule of the broker forbids."""

NO_ANSWER: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
"""Error codes of a request that no broker answered."""

_LOGIN_REFUSED: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
_PERMANENT: Final = (
    NOT_ALLOWED
    | _LOGIN_REFUSED
    | {
        KafkaError._FATAL,
        KafkaError._INVALID_ARG,
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError.GROUP_MAX_SIZE_REACHED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.UNSUPPORTED_ASSIGNOR,
        KafkaError.UNSUPPORTED_VERSION,
    }
)


_HANDSHAKE: Final = "handshake failed"
"""Words in the client's error if the broker has refused the login before the exchange of credentials."""

_FIRST_REQUEST: Final = "in state APIVERSION_QUERY"
"""Words in the client's line about a connection that ended before the answer to the first request."""

_OTHER_GROUP: Final = (
    "the group has members of another protocol, or is a share group, which has no order; use another group.id, or "
    "the protocol and strategy of its members"
)
_REMEDIES: Final[Mapping[int, str]] = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: _OTHER_GROUP,
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow this user Read on the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow this user Describe and Read on the topic",
}
_NO_848: Final = (
    "this broker does not know group.protocol='consumer' (KIP-848); set 'classic', or use Kafka 4.0 or newer with "
    "'consumer' in group.coordinator.rebalance.protocols"
)


_THREAD: Final = re.compile(r"^\[thrd:[^]]*\]: ")
"""Name of the client's thread, which begins a line of the client's log."""

_FILE: Final = re.compile(r"(?<![\w.])((?:ssl|https)(?:\.\w+)+\.location)`? (?:failed|must)")
"""Words about a setting whose file the client cannot read, or refuses."""

_KEY_FILE: Final = re.compile(r"[^\n]{1,200}\.(cer|crt|der|jks|key|p12|pem|pfx)", re.IGNORECASE)
"""A path of a key or a keystore. Any other value of such a setting may be a secret in the wrong place."""

_UNKNOWN: Final = re.compile(r'No such configuration property: "([^"]+)"')


def is_permanent(error: KafkaError) -> bool:
    """Return whether the failed call can succeed only after a change by an operator."""
    return error.fatal() or error.code() in _PERMANENT


def is_login_refused(error: KafkaError) -> bool:
    """Return whether the broker refused the login."""
    return error.code() in _LOGIN_REFUSED


def closed_at_first_request(line: str) -> KafkaError | None:
    """Return the error for a line of the client's log about a connection that ended at its first request, else None.

    The client logs the end of the connection at INFO, and reports only the timeout of the request. For example, a
    listener with TLS ends the connection of a client without TLS.
    """
    if _FIRST_REQUEST not in line:
        return None
    return KafkaError(KafkaError._TRANSPORT, f"{_THREAD.sub('', line)}: connecting to a listener with TLS?")


def login_remedy(error: KafkaError) -> str:
    """Return the remedy for a refused login."""
    if _HANDSHAKE in error.str():
        # The broker refused the mechanism, or its listener has no logins, before it saw a user and a password.
        return "correct security.protocol and sasl.mechanism to those of the listener"
    return "correct the credentials"


def client_text(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """Return the name and text of an error, without the secrets of ``settings``.

    If the settings show the cause, which the client's text does not name, the returned text names it.
    """
    return f"{error.name()}: {_with_cause(error.str(), settings)}{_failed_login(error, settings)}"


def _failed_login(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """Return the error of the user's ``oauth_cb``, for the last part of the text of a login without a token."""
    callback = settings.get("oauth_cb")
    if error.code() not in _LOGIN_REFUSED or not isinstance(callback, Callback) or callback.raised is None:
        return ""
    return f" (oauth_cb raised {exception_text(callback.raised, settings)})"


def _with_cause(text: str, settings: Mapping[str, Any]) -> str:
    """Return a text of the client without secrets; for a file that the client cannot read, with the path."""
    found = _FILE.search(text)
    fault = None if found is None else _unreadable_file(found[1], settings)
    return redacted(text, settings) if fault is None else fault


def _unreadable_file(name: str, settings: Mapping[str, Any]) -> str | None:
    """Describe the fault of the file that a setting names; None = this process can read the file.

    The call reads the first byte of the file. The text shows the path, unless a secret may stand in its place.
    """
    path = settings.get(name)
    if not isinstance(path, str) or not path:
        return None
    shown = f"{name}={path!r}" if not is_secret(name) or _KEY_FILE.fullmatch(path) else name
    try:
        if os.path.isdir(path):
            return f"{shown} is a folder; write the path of a file"
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        fault = (getattr(error, "strerror", None) or "it is not a path").lower()
        if isinstance(error, FileNotFoundError):
            fault = "the file does not exist"
        return f"{shown}: {fault}"
    return None


def client_message(error: KafkaError, settings: Mapping[str, Any]) -> str:
    """Return the text of ``client_text``, followed by the known remedy of the error, if any."""
    text = error.str()
    remedy = _REMEDIES.get(error.code())
    if "ConsumerGroupHeartbeat" in text and "version not supported" in text:
        remedy = _NO_848
    elif error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
        value = settings.get("session.timeout.ms", DEFAULT_SESSION_TIMEOUT_MS)
        remedy = (
            f"session.timeout.ms={value} is outside the bounds of the broker; set session.timeout.ms between "
            "group.min.session.timeout.ms (default 6000) and group.max.session.timeout.ms (default 1800000)"
        )
    elif "ConsumerGroupHeartbeat" in text and "group id does not exist" in text:
        remedy = _OTHER_GROUP
    return client_text(error, settings) + (f"; {remedy}" if remedy else "")


def exception_text(raised: BaseException, settings: Mapping[str, Any]) -> str:
    """Return the text of an exception that the client or a user's callback raised, without secrets."""
    if isinstance(raised, CallbackError):
        return f"{raised.name} raised {exception_text(raised.raised, settings)}"
    error = raised.args[0] if raised.args else None
    if isinstance(error, KafkaError):
        return client_message(error, settings)
    return f"{type(raised).__name__}: {redacted(str(raised), settings)}"


def fatal_error(what: str, raised: BaseException, settings: Mapping[str, Any]) -> SourceError:
    """Make the error that ends a source.

    Args:
        what: Beginning of the error's text, which names the failed step.
        raised: The cause.
        settings: Configuration of the client, whose secrets no error or log line shows.

    Returns:
        The error, chained to its cause unless the traceback of the cause shows a secret.
    """
    text = f"{what}: {exception_text(raised, settings)}"
    if isinstance(raised, CallbackError):
        failure = SourceError(f"{text}; correct {raised.name} in the configuration, and start again")
        raised = raised.raised
    else:
        failure = SourceError(f"{text}; start again")
    shown = "".join(traceback.format_exception(raised))
    if redacted(shown, settings) == shown:
        failure.__cause__ = raised
    return failure


def startup_error(name: str, failure: Exception, settings: Mapping[str, Any]) -> LanesError:
    """Make the error of a source that cannot create its client, or whose first requests fail.

    Raise the error ``from None``, because ``failure`` may show a secret.
    """
    error = failure.args[0] if failure.args else ""
    if not isinstance(error, KafkaError):
        return ConfigError(f"{name}: {redacted(str(failure), settings)}; correct the configuration of the client")
    text = f"{name}: {client_message(error, settings)}"
    if error.code() in (KafkaError._INVALID_ARG, KafkaError._CONFLICT):
        return ConfigError(f"{text}; correct the configuration of the client{setting_meant(error.str())}")
    return SourceError(text, retryable=not is_permanent(error))


def settings_error(error: object, settings: Mapping[str, Any]) -> ConfigError:
    """Make the error of a client that refuses its settings. The text shows no secret."""
    text = error.str() if isinstance(error, KafkaError) else str(error)
    cause = _failed_login(error, settings) if isinstance(error, KafkaError) else ""
    meant = setting_meant(text)
    return ConfigError(
        f"the Kafka client refuses its settings: {_with_cause(text, settings)}{cause}; correct the named setting{meant}"
    )


def setting_meant(text: str) -> str:
    """Return a "did you mean" text if ``text`` names an unknown setting with a name like a known setting, else ""."""
    found = _UNKNOWN.search(text)
    return "" if found is None else similar_setting(found[1])


@dataclass(eq=False, repr=False)
class ErrorLog:
    """Logs the errors of a client, at most one line per error code in ``LOG_EVERY`` seconds.

    In an outage a client reports the same error many times a second.

    Attributes:
        name: Name of the client's owner, for log lines.
        clock: Monotonic clock, in seconds.
        user: The ``error_cb`` of the user's configuration, called for every error; None = no callback.
        settings: Configuration of the client. The log shows no secret of the configuration.
        down: Whether the client has reported an outage, and no broker has answered since.
    """

    name: str
    clock: Clock
    user: Callable[[Any], object] | None
    settings: Mapping[str, Any]
    down: bool = field(default=False, init=False)
    _last: tuple[KafkaError, float] | None = field(default=None, init=False)
    _logged_at: dict[int, float] = field(default_factory=dict, init=False)
    _skipped: dict[int, int] = field(default_factory=dict, init=False)

    def on_error(self, error: KafkaError) -> None:
        """Log an error, and call the user's callback. The client calls this method as its ``error_cb``."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down = True
        self.on_message(error)
        if self.user is not None:
            self.user(error)

    def on_message(self, error: KafkaError) -> None:
        """Log an error, unless the log has a line about the same code from the last ``LOG_EVERY`` seconds."""
        code, now = error.code(), self.clock()
        self._last = error, now
        last = self._logged_at.get(code)
        if last is not None and now - last < LOG_EVERY:
            self._skipped[code] = self._skipped.get(code, 0) + 1
            return
        self._logged_at[code] = now
        more = self._skipped.pop(code, 0)
        again = f" ({more} times more since)" if more else ""
        log.warning("%s: %s%s", self.name, client_message(error, self.settings), again)

    def answered(self) -> None:
        """Record that a broker has answered."""
        self.down = False

    def last(self) -> tuple[str, float] | None:
        """Return text and age in seconds of the last error; None = no error yet. Any thread may call this method."""
        last = self._last
        return None if last is None else (client_message(last[0], self.settings), self.clock() - last[1])
