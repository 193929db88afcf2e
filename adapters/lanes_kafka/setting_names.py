"""The names of librdkafka's settings: which are spelled in two ways, a consumer's alone, or secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from lanes.errors import ConfigError

_ALIASES: Final[Mapping[str, str]] = {
    "metadata.broker.list": "bootstrap.servers",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "topic.auto.offset.reset": "auto.offset.reset",
}
"""From what a consumer's setting is called too, to what it is called here."""

_NESTED: Final = "default.topic.config"
_ADDRESSES: Final = ("bootstrap.servers", "test.mock.num.brokers")

_CONSUMER_ONLY: Final = frozenset(
    (
        "auto.commit.enable",
        "auto.commit.interval.ms",
        "auto.offset.reset",
        "check.crcs",
        "consume.callback.max.messages",
        "coordinator.query.interval.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.queue.backoff.ms",
        "fetch.wait.max.ms",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "group.protocol.type",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "max.poll.records",
        "offset.store.method",
        "offset.store.path",
        "offset.store.sync.interval.ms",
        "partition.assignment.strategy",
        "queued.max.messages.kbytes",
        "queued.min.messages",
        "session.timeout.ms",
        "share.acknowledgement.mode",
    )
)

_CALLED_BY_THE_CONSUMER: Final = frozenset(
    ("error_cb", "on_commit", "statistics.interval.ms", "stats_cb", "throttle_cb")
)
"""Each client would call them, and count its own."""


_SECRET: Final = re.compile(r"sasl\.|ssl.key|.*(password|secret|private|token|\.pem$)")
_LONG: Final = 6
_NO_SECRET: Final = frozenset(("sasl.mechanism", "sasl.mechanisms", "sasl.oauthbearer.method"))


def is_secret(name: str) -> bool:
    """Whether the value of a setting is shown to nobody."""
    return name not in _NO_SECRET and _SECRET.match(name) is not None


def redacted(text: str, config: Mapping[str, Any]) -> str:
    """The text of a client's error without any secret of its configuration, nor any word of one."""
    words = {
        word
        for name, value in config.items()
        if is_secret(name) and isinstance(value, str | bytes)
        for whole in (value if isinstance(value, str) else value.decode("utf-8", "replace"),)
        for word in (whole, *re.split(r"[\s=,;\"']+", whole))
        if word
    }
    for word in sorted(words, key=len, reverse=True):
        # A short one may stand inside a longer word by chance; by itself it is the secret.
        alone = "" if len(word) >= _LONG else r"(?<!\w)", "" if len(word) >= _LONG else r"(?!\w)"
        text = re.sub(alone[0] + re.escape(word) + alone[1], "…", text)
    return text


def connects(name: str) -> bool:
    """Whether a setting is one that an admin client or a producer connects with."""
    bare = name.removeprefix("topic.")
    return bare not in _CONSUMER_ONLY and bare not in _CALLED_BY_THE_CONSUMER and bare != "transactional.id"


class Given:
    """A copy of a user's dictionary, in which a setting is found under each of its names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ``ConfigError`` naming the type, never the value, of what is no dictionary of settings."""
        self.client: dict[str, Any] = _names_checked("config", config)
        if _NESTED in self.client:
            # Over the others, as the client does it: what is in there wins.
            self.client |= _names_checked(_NESTED, self.client.pop(_NESTED))
            self.client.pop(_NESTED, None)

    def __contains__(self, name: str) -> bool:
        return any(_canonical(other) == name for other in self.client)

    def get(self, name: str) -> Any:
        """The value in force, None where unset: of two spellings the client takes the later one."""
        values = [value for other, value in self.client.items() if _canonical(other) == name]
        return values[-1] if values else None

    def replace(self, name: str, value: object) -> None:
        """Set it, under this name alone."""
        for other in [other for other in self.client if _canonical(other) == name]:
            del self.client[other]
        self.client[name] = value


def check_addresses(given: Given) -> None:
    """Raises ``ConfigError`` where no broker is named, and where an address has more in it than one."""
    if not any(given.get(name) for name in _ADDRESSES):
        raise ConfigError("bootstrap.servers is missing: name at least one broker, as host:port")
    if "@" in str(given.get("bootstrap.servers")):
        # Not shown: what stands before the sign may be a password, and librdkafka would log it.
        raise ConfigError(
            "bootstrap.servers holds an '@': an address is host:port, and who logs in goes into sasl.username and "
            "sasl.password"
        )


def _canonical(name: str) -> str:
    return _ALIASES.get(name, name)


def _names_checked(what: str, config: object) -> dict[str, Any]:
    # Never the value: a text that was meant as a dictionary may hold a password.
    kind = type(config).__name__
    if not isinstance(config, Mapping):
        hint = ""
        if hasattr(config, "subscribe"):
            hint = ", and a factory that makes the consumer from the dict it is given: a ready one shows no settings"
        raise ConfigError(f"{what} is of type {kind}: pass the dict that confluent_kafka.Consumer is made from{hint}")
    for name in config:
        if not isinstance(name, str):
            raise ConfigError(f"{what} has a name of type {type(name).__name__}: settings are named by a str")
    return dict(config)
