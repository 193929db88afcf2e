"""The configuration of a client: the user's ``confluent_kafka`` dictionary, checked and completed.

All functions are pure and create no client. The second half of the module lists names of librdkafka's settings:
aliases, settings that only consumers have, and settings with secret values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, get_args

from lanes.arguments import check_aware, did_you_mean, shown_value
from lanes.errors import ConfigError
from lanes_kafka.callbacks import ON_COMMIT, named_callbacks

Start = Literal["beginning", "next"] | datetime
"""Position at which a group starts in a topic for which it has committed no position. A ``datetime`` is aware."""

OutOfRange = Literal["earliest", "latest", "fail"]
"""Position at which to continue when the log does not contain the committed position."""

Protocol = Literal["eager", "cooperative", "848"]

DEFAULT_MAX_POLL_INTERVAL_MS: Final = 300_000
DEFAULT_SESSION_TIMEOUT_MS: Final = 45_000
"""Default session timeout of librdkafka, in milliseconds."""

DEFAULT_HEARTBEAT_INTERVAL_MS: Final = 3_000
"""Default heartbeat interval of librdkafka, in milliseconds."""


class Chosen(NamedTuple):
    """A setting to which ``lanes`` gives a value.

    Attributes:
        name: Name of the setting.
        value: Value of the setting.
        reason: The reason for the value, shown to the user.
    """

    name: str
    value: object
    reason: str


_COMMITS_ARE_OURS: Final = "lanes commits the positions of completed messages itself"
_RESETS_ARE_OURS: Final = "lanes decides by start and out_of_range where to read, and skips nothing silently"

_WANTED_OFF: Final = ("enable.auto.commit", "enable.auto.offset.store")
_REFUSED_ON: Final = (*_WANTED_OFF, "auto.commit.enable", "topic.auto.commit.enable", "topic.enable.auto.commit")
_FALSE: Final = ("false", "f", "0")

_TUNED: Final = (
    Chosen("fetch.queue.backoff.ms", 5, "with librdkafka's 1,000, fetching stalls for a second when its queue is full"),
    Chosen("queued.max.messages.kbytes", 16_384, "bounds the client's queue to 16 MiB, in addition to max_in_flight"),
    Chosen("queued.min.messages", 20_000, "with a lower number the queue may run empty; the bytes bound the queue"),
    Chosen(
        "max.partition.fetch.bytes",
        1_048_576,
        "holds a batch of a producer; with less, a fetch returns one partition, and others wait",
    ),
    Chosen("fetch.wait.max.ms", 100, "bounds the wait of a resumed partition for its first message"),
    Chosen("enable.partition.eof", False, "not needed: the position tells where a partition ends"),
)
_FETCHES_WAIT: Final = ("max.partition.fetch.bytes", "fetch.wait.max.ms")
"""Settings that ``lanes`` leaves unset if the user sets ``fetch.min.bytes``, to let a fetch wait for that size."""

_RESETS: Final[Mapping[str, tuple[Literal["beginning", "next"] | None, OutOfRange]]] = {
    "earliest": ("beginning", "earliest"),
    "smallest": ("beginning", "earliest"),
    "beginning": ("beginning", "earliest"),
    "latest": ("next", "latest"),
    "largest": ("next", "latest"),
    "end": ("next", "latest"),
    "error": (None, "fail"),
}

_NOT_SETTINGS: Final = ("on_assign", "on_revoke", "on_lost")
_ON_THE_BROKER: Final[Mapping[str, str]] = {
    "session.timeout.ms": "consumer.session.timeout.ms of the group, group.consumer.session.timeout.ms of the broker",
    "heartbeat.interval.ms": (
        "consumer.heartbeat.interval.ms of the group, group.consumer.heartbeat.interval.ms of the broker"
    ),
    "partition.assignment.strategy": "group.consumer.assignors of the broker, chosen by group.remote.assignor here",
    "group.protocol.type": "nothing, because there is one type",
}
_EAGER: Final = ("range", "roundrobin")
_COOPERATIVE: Final = "cooperative-sticky"
_WHOLE: Final = re.compile(r"\s*([0-9]{1,10})\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True, repr=False)
class ClientConfig:
    """The checked configuration of a ``KafkaSource``. The ``repr`` of the object shows no secret.

    Attributes:
        client: Settings of the ``Consumer``, with all callbacks of the user except ``on_commit``. The dictionary
            contains secrets.
        admin: The settings that an ``AdminClient`` or a ``Producer`` uses too, for example addresses, security,
            ``oauth_cb`` and ``logger``. The dictionary contains secrets.
        on_commit: The user's callback; None = no callback.
        chosen: The settings to which ``lanes`` gave a value.
        group: The id of the group.
        protocol: Rebalance protocol of the group.
        instance: The id of a static member; None for a dynamic member.
        start: Position at which the group starts in a topic for which it has committed no position.
        out_of_range: Position at which to continue when the log does not contain the committed position.
        max_poll_interval: ``max.poll.interval.ms`` in seconds.
        session_timeout: ``session.timeout.ms`` in seconds; None under KIP-848, where the broker has this setting.
        heartbeat_interval: ``heartbeat.interval.ms`` in seconds; None under KIP-848.
    """

    client: dict[str, Any]
    admin: dict[str, Any]
    on_commit: Callable[..., object] | None
    chosen: tuple[Chosen, ...]
    group: str
    protocol: Protocol
    instance: str | None
    start: Start
    out_of_range: OutOfRange
    max_poll_interval: float
    session_timeout: float | None
    heartbeat_interval: float | None

    def __repr__(self) -> str:
        return f"<ClientConfig group {self.group!r} protocol {self.protocol}>"


def client_config(
    config: Mapping[str, Any], *, start: Start | None = None, out_of_range: OutOfRange | None = None
) -> ClientConfig:
    """Check the dictionary of a ``confluent_kafka.Consumer``, and complete a copy.

    The function merges ``default.topic.config`` into the copy, like the client. The function disables automatic commits
    and automatic offset stores, and refuses a setting that enables them. The function sets ``auto.offset.reset=error``
    for the client, and derives ``start`` and ``out_of_range`` from the user's value. ``chosen`` lists all settings that
    the function set. Pure and idempotent.

    Args:
        config: The user's dictionary.
        start: Position at which the group starts in a topic for which it has committed no position. Default: the
            meaning of ``auto.offset.reset``, or ``"beginning"``.
        out_of_range: Position at which to continue when the log does not contain the committed
            position. Default: the meaning of ``auto.offset.reset``, or ``"fail"``.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: A setting is missing, invalid, or contradicts another setting or a guarantee of ``lanes``.
    """
    given = UserSettings(config)
    given.client = named_callbacks(given.client)
    for name in _NOT_SETTINGS:
        if name in given:
            raise ConfigError(f"{name} is not a setting of a client; leave it out, because lanes handles assignments")
    if "log_cb" in given:
        raise ConfigError("log_cb is not a setting of confluent_kafka; pass logger, a logging.Logger")
    check_addresses(given)
    _refuse_automatic(given)
    group = _group(given)
    protocol = _protocol(given)
    max_poll_interval, session_timeout, heartbeat_interval = _intervals(given, protocol)
    begin, beyond = _beginning(given, start, out_of_range)
    chosen = _complete(given)
    return ClientConfig(
        client=given.client,
        admin={name: value for name, value in given.client.items() if connects(name)},
        on_commit=given.client.pop(ON_COMMIT, None),
        chosen=chosen,
        group=group,
        protocol=protocol,
        # librdkafka treats an empty ``group.instance.id`` like a missing one.
        instance=str(given.get("group.instance.id") or "").lstrip() or None,
        start=begin,
        out_of_range=beyond,
        max_poll_interval=max_poll_interval,
        session_timeout=session_timeout,
        heartbeat_interval=heartbeat_interval,
    )


def _refuse_automatic(given: UserSettings) -> None:
    for name in _REFUSED_ON:
        if name in given and str(given.get(name)).lower() not in _FALSE:
            raise ConfigError(
                f"{name}={shown_value(given.get(name))}: {_COMMITS_ARE_OURS}; set it to False, or leave it out"
            )
    method = given.get("offset.store.method")
    if method is not None and str(method).strip().lower() != "broker":
        raise ConfigError(f"offset.store.method={shown_value(method)}: the broker stores positions; leave it out")


def _group(given: UserSettings) -> str:
    group = given.get("group.id")
    if isinstance(group, int) and not isinstance(group, bool):
        group = str(group)
    if group is not None and not isinstance(group, str):
        raise ConfigError(f"group.id is of type {type(group).__name__}; write group.id as a str")
    # librdkafka removes leading blanks from the id, and an empty id makes the client end the process.
    name = (group or "").lstrip()
    if not name:
        raise ConfigError(
            "group.id is missing or empty; set group.id, because partitions and positions belong to a group"
            f"{misspelt('group.id', given.client)}"
        )
    if "://" in name:
        # Do not show the group, because a URL may contain a password.
        raise ConfigError("group.id is an address, not the name of a group; write addresses into bootstrap.servers")
    return name


def _protocol(given: UserSettings) -> Protocol:
    name = str(given.get("group.protocol") or "classic").lstrip().lower()
    if name == "share":
        raise ConfigError("group.protocol='share': a share group has no order; set 'classic' or 'consumer'")
    if "share.acknowledgement.mode" in given:
        raise ConfigError(
            f"share.acknowledgement.mode={shown_value(given.get('share.acknowledgement.mode'))}: share groups have no "
            "order; leave it out, and use a group of the protocol 'classic' or 'consumer'"
        )
    if name not in ("classic", "consumer"):
        raise ConfigError(f"group.protocol={shown_value(given.get('group.protocol'))}: must be 'classic' or 'consumer'")
    if name == "consumer":
        for setting, instead in _ON_THE_BROKER.items():
            if setting in given:
                raise ConfigError(
                    f"{setting}={shown_value(given.get(setting))} with group.protocol='consumer': the broker has this "
                    f"setting (KIP-848); leave it out here, and set {instead}"
                )
        return "848"
    if "group.remote.assignor" in given:
        raise ConfigError(
            f"group.remote.assignor={shown_value(given.get('group.remote.assignor'))} without "
            "group.protocol='consumer': the classic protocol ignores it; set partition.assignment.strategy, or "
            "group.protocol='consumer'"
        )
    return _strategy(given.get("partition.assignment.strategy"))


def _strategy(strategy: object) -> Protocol:
    if strategy is None:
        return "eager"
    names = [name.lstrip() for name in str(strategy).split(",")]
    names = [name for name in names if name]
    known = (*_EAGER, _COOPERATIVE)
    if not names or any(name not in known for name in names):
        raise ConfigError(f"partition.assignment.strategy={shown_value(strategy)}: must be one of {', '.join(known)}")
    if set(names) == {_COOPERATIVE}:
        return "cooperative"
    if _COOPERATIVE in names:
        raise ConfigError(
            f"partition.assignment.strategy={shown_value(strategy)}: librdkafka cannot change between eager and "
            "cooperative assignors while a group runs; name one kind, stop every member, then start them again"
        )
    return "eager"


def _intervals(given: UserSettings, protocol: Protocol) -> tuple[float, float | None, float | None]:
    """Return the poll interval, the session timeout and the heartbeat interval in seconds.

    Under KIP-848 the session timeout and the heartbeat interval are None, because the broker decides them.
    """
    interval = _milliseconds(given, "max.poll.interval.ms", DEFAULT_MAX_POLL_INTERVAL_MS)
    if protocol == "848":
        return interval / 1000, None, None
    session = _milliseconds(given, "session.timeout.ms", DEFAULT_SESSION_TIMEOUT_MS)
    if interval < session:
        raise ConfigError(
            f"session.timeout.ms={session} is above max.poll.interval.ms={interval}; lower one, or raise the other"
        )
    heartbeat = _milliseconds(given, "heartbeat.interval.ms", DEFAULT_HEARTBEAT_INTERVAL_MS)
    if heartbeat >= session:
        default = "" if "heartbeat.interval.ms" in given else " (the default)"
        raise ConfigError(
            f"heartbeat.interval.ms={heartbeat}{default} is not below session.timeout.ms={session}, so the group would "
            "remove this member between two heartbeats; set it to a third of the session timeout"
        )
    return interval / 1000, session / 1000, heartbeat / 1000


def _milliseconds(given: UserSettings, name: str, default: int) -> int:
    if name not in given:
        return default
    value = given.get(name)
    # librdkafka reads only the leading digits of a text: it reads "6e3" and "6_000" as 6.
    found = _WHOLE.fullmatch(str(int(value) if isinstance(value, float) and value.is_integer() else value))
    if found is None or not int(found[1]):
        raise ConfigError(f"{name}={shown_value(value)}: must be a whole number of milliseconds, 1 or more")
    return int(found[1])


def _beginning(given: UserSettings, start: Start | None, out_of_range: OutOfRange | None) -> tuple[Start, OutOfRange]:
    if isinstance(start, datetime):
        check_aware("start", start)
    elif start not in (None, "beginning", "next"):
        named = {"earliest": "beginning", "latest": "next"}.get(start if isinstance(start, str) else "")
        meant = f' (did you mean "{named}"?)' if named else ""
        raise ConfigError(f'start={shown_value(start)}: must be "beginning", "next" or an aware datetime{meant}')
    if out_of_range is not None and out_of_range not in get_args(OutOfRange):
        raise ConfigError(f'out_of_range={shown_value(out_of_range)}: must be "earliest", "latest" or "fail"')
    reset = given.get("auto.offset.reset")
    if "auto.offset.reset" in given:
        name = str(reset).lstrip().lower()
        if name.startswith("by_duration"):
            raise ConfigError(
                f"auto.offset.reset={shown_value(reset)}: librdkafka does not support durations; leave it out, and "
                "pass an aware datetime as start="
            )
        if name not in _RESETS:
            raise ConfigError(f"auto.offset.reset={shown_value(reset)}: must be 'earliest', 'latest' or 'error'")
        begin, beyond = _RESETS[name]
        for name, here, there in (("start", start, begin), ("out_of_range", out_of_range, beyond)):
            if here is not None and there is not None and here != there:
                raise ConfigError(
                    f"{name}={here!r} contradicts auto.offset.reset={shown_value(reset)}, which means {there!r}; "
                    "leave one of them out"
                )
        start, out_of_range = start or begin, out_of_range or beyond
    return start or "beginning", out_of_range or "fail"


def _complete(given: UserSettings) -> tuple[Chosen, ...]:
    """Set the values that ``lanes`` needs, and return the changed settings."""
    wanted = [Chosen(name, False, _COMMITS_ARE_OURS) for name in _WANTED_OFF]
    wanted += [one for one in _TUNED if one.name not in _FETCHES_WAIT or "fetch.min.bytes" not in given]
    chosen = [one for one in wanted if one.name not in given]
    if str(given.get("auto.offset.reset")).lstrip().lower() != "error":
        chosen.append(Chosen("auto.offset.reset", "error", _RESETS_ARE_OURS))
    for name, value, _ in chosen:
        given.replace(name, value)
    return tuple(chosen)


# --- names of settings

_ALIASES: Final[Mapping[str, str]] = {
    "metadata.broker.list": "bootstrap.servers",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "topic.auto.offset.reset": "auto.offset.reset",
}
"""The name that ``lanes`` uses for each alias of a consumer's setting."""

_NESTED: Final = "default.topic.config"
_ADDRESSES: Final = ("bootstrap.servers", "metadata.broker.list", "test.mock.num.brokers")

_SCHEMES: Final = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
"""Schemes that the client accepts before an address."""

_HOST: Final = re.compile(r"\[[^\s\[\]/]+\]|[^\s\[\]:/]+")
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)

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

_OTHERS: Final = """
acks allow.auto.create.topics api.version.request batch.size bootstrap.servers broker.address.family
broker.address.ttl broker.version.fallback builtin.features client.dns.lookup client.id client.rack
compression.codec compression.level compression.type connections.max.idle.ms debug
delivery.report.only.error delivery.timeout.ms enable.idempotence enable.metrics.push
enable.ssl.certificate.verification error_cb https.ca.location linger.ms log.connection.close log.queue
log.thread.name log_level logger max.in.flight max.in.flight.requests.per.connection message.copy.max.bytes
message.max.bytes message.send.max.retries message.timeout.ms metadata.broker.list metadata.max.age.ms
metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy oauth_cb on_commit partitioner
plugin.library.paths queue.buffering.max.kbytes queue.buffering.max.messages queue.buffering.max.ms
receive.message.max.bytes reconnect.backoff.max.ms reconnect.backoff.ms request.required.acks request.timeout.ms
retries retry.backoff.max.ms retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd
sasl.kerberos.min.time.before.relogin sasl.kerberos.principal sasl.kerberos.service.name sasl.mechanism
sasl.mechanisms sasl.oauthbearer.client.id sasl.oauthbearer.client.secret sasl.oauthbearer.config
sasl.oauthbearer.extensions sasl.oauthbearer.method sasl.oauthbearer.scope sasl.oauthbearer.token.endpoint.url
sasl.password sasl.username security.protocol socket.connection.setup.timeout.ms socket.keepalive.enable
socket.max.fails socket.nagle.disable socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms
ssl.ca.certificate.stores ssl.ca.location ssl.ca.pem ssl.certificate.location ssl.certificate.pem
ssl.cipher.suites ssl.crl.location ssl.curves.list ssl.endpoint.identification.algorithm ssl.engine.id
ssl.engine.location ssl.key.location ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password
ssl.providers ssl.sigalgs.list statistics.interval.ms stats_cb sticky.partitioning.linger.ms throttle_cb
topic.metadata.propagation.max.ms topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse
transaction.timeout.ms transactional.id
"""
_OF_EVERY_CLIENT: Final = frozenset(_OTHERS.split())
"""Further names of settings, for "did you mean" texts. The client also accepts settings outside this list."""

_CALLED_BY_THE_CONSUMER: Final = frozenset(
    ("error_cb", "on_commit", "statistics.interval.ms", "stats_cb", "throttle_cb")
)
"""Settings that only the consumer receives: callbacks for the events of a client, and the interval of statistics."""

_SECRET: Final = re.compile(r"sasl\.|ssl.key|.*(password|secret|private|token|\.pem$)")
_LONG: Final = 6
_NO_SECRET: Final = frozenset(("sasl.mechanism", "sasl.mechanisms", "sasl.oauthbearer.method"))


def similar_setting(name: str) -> str:
    """Return a "did you mean" text about settings with names like an unknown name; "" = no similar name."""
    return did_you_mean(name, _CONSUMER_ONLY | _OF_EVERY_CLIENT)


def is_secret(name: str) -> bool:
    """Whether the value of the setting ``name`` is a secret."""
    return name not in _NO_SECRET and _SECRET.match(name) is not None


_SIZE: Final = re.compile(
    r"Invalid response size (\d{1,9}|[1-3]\d{9}) \(0\.\.\d+\): increase receive\.message\.max\.bytes"
)
"""The client's error text for an answer whose first four bytes, read as a size, exceed the limit."""


def redacted(text: str, config: Mapping[str, Any]) -> str:
    """Return the client's text with ``…`` in place of each secret of ``config`` and of each word of a secret.

    If a server uses another protocol, the client reads the beginning of its answer as a size, and recommends a larger
    limit. The function then replaces this advice by the real cause.
    """
    words = {
        word
        for name, value in config.items()
        if is_secret(name) and isinstance(value, str | bytes)
        for whole in (value if isinstance(value, str) else value.decode("utf-8", "replace"),)
        for word in (whole, *re.split(r"[\s=,;\"']+", whole))
        if word
    }
    for word in sorted(words, key=len, reverse=True):
        # A short secret may be part of a longer word by chance, so replace a short secret only as a whole word.
        alone = "" if len(word) >= _LONG else r"(?<!\w)", "" if len(word) >= _LONG else r"(?!\w)"
        text = re.sub(alone[0] + re.escape(word) + alone[1], "…", text)
    return _SIZE.sub(_other_protocol, text)


def _other_protocol(found: re.Match[str]) -> str:
    first = int(found[1]).to_bytes(4, "big")
    if not all(0x20 <= byte < 0x7F for byte in first):
        return found[0]
    return (
        f"the answer begins with the text {first.decode()!r}, so "
        f"{'a NATS server' if first == b'INFO' else 'another server'} and no Kafka broker listens there"
    )


def connects(name: str) -> bool:
    """Whether ``lanes`` passes the setting ``name`` to admin clients and producers too."""
    bare = name.removeprefix("topic.")
    return bare not in _CONSUMER_ONLY and bare not in _CALLED_BY_THE_CONSUMER and bare != "transactional.id"


class UserSettings:
    """A copy of a user's dictionary that finds a setting by its name or by an alias."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if ``config`` is not a dictionary of settings.

        The error shows the type of ``config``, and never a value.
        """
        self.client: dict[str, Any] = _names_checked("config", config)
        if _NESTED in self.client:
            # Settings of ``default.topic.config`` override the other settings, as in the client.
            self.client |= _names_checked(_NESTED, self.client.pop(_NESTED))
            self.client.pop(_NESTED, None)

    def __contains__(self, name: str) -> bool:
        return any(_ALIASES.get(other, other) == name for other in self.client)

    def get(self, name: str) -> Any:
        """Return the value of a setting; None = the setting is missing.

        If the dictionary has two names of the setting, the later entry applies.
        """
        values = [value for other, value in self.client.items() if _ALIASES.get(other, other) == name]
        return values[-1] if values else None

    def replace(self, name: str, value: object) -> None:
        """Set a value under this name, and remove the aliases of the name."""
        for other in [other for other in self.client if _ALIASES.get(other, other) == name]:
            del self.client[other]
        self.client[name] = value


class ServerOption(str):
    """Addresses of brokers from the option ``--server`` of a command. Errors name this option."""

    __slots__ = ()


def address_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the setting or option with the addresses, for an error."""
    given = next((settings[name] for name in _ADDRESSES if settings.get(name)), "")
    return "--server" if isinstance(given, ServerOption) else "bootstrap.servers"


def addresses(settings: Mapping[str, Any]) -> str:
    """Return the broker addresses of a configuration, separated by commas; "" = no address."""
    return next((str(settings[name]) for name in _ADDRESSES if settings.get(name)), "")


def check_addresses(given: UserSettings) -> None:
    """Raise ``ConfigError`` if the configuration names no broker, or an address is not ``host:port``.

    The client skips an address with an unknown scheme, and adds the port 9092 to an address without a port.
    """
    if not any(given.get(name) for name in _ADDRESSES):
        raise ConfigError(
            "bootstrap.servers is missing; name at least one broker as host:port"
            f"{misspelt('bootstrap.servers', given.client)}"
        )
    servers = given.get("bootstrap.servers")
    if not servers:
        return
    name = address_name(given.client)
    if not isinstance(servers, str):
        # The client would read the repr of a list.
        raise ConfigError(f"{name} is of type {type(servers).__name__}; write a str as host:port, several with commas")
    if "@" in servers:
        # The error does not show the value: the part before the @ may be a password. librdkafka would log the value.
        raise ConfigError(
            f"{name} contains an '@', but an address is host:port; put the login into sasl.username and sasl.password"
        )
    named = [address for address in map(str.strip, servers.split(",")) if address]
    if not named:
        raise ConfigError(f"{name}={servers!r} names no broker; name at least one broker as host:port")
    for address in named:
        _check_address(name, address)


def misspelt(name: str, given: Mapping[str, Any]) -> str:
    """Return the end of an error about a missing setting, with the user's misspelt name; "" = no misspelt name."""
    known = _CONSUMER_ONLY | _OF_EVERY_CLIENT
    near = difflib.get_close_matches(name, [other for other in given if other not in known], n=1, cutoff=0.75)
    return f"; write {name!r} in place of {near[0]!r}" if near else ""


def _check_address(name: str, address: str) -> None:
    scheme, has_scheme, place = address.rpartition("://")
    place = place.partition("/")[0]
    host, _, port = place.rpartition(":")
    if has_scheme and scheme.lower() not in _SCHEMES:
        raise ConfigError(
            f"{name}: {address!r} has the scheme {scheme!r}, and Kafka addresses have none; write "
            f"'{host or place or 'host'}:{port if host else 9092}', and set security.protocol for TLS or a login"
        )
    if _HOST.fullmatch(place):
        raise ConfigError(f"{name}: {address!r} has no port; write '{place}:9092', or another port")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 65_536:
        raise ConfigError(
            f"{name}: {address!r} is not host:port; write a host name or an address, and a port from 1 to "
            "65535, such as 'localhost:9092' or '[::1]:9092'"
        )


def _names_checked(what: str, config: object) -> dict[str, Any]:
    # The errors do not show ``config``, because a text in place of a dictionary may contain a password.
    kind = type(config).__name__
    if not isinstance(config, Mapping):
        hint = ""
        if hasattr(config, "subscribe"):
            hint = ", and a function that makes the consumer from it, because a ready consumer shows no settings"
        raise ConfigError(f"{what} is of type {kind}; pass the dict that confluent_kafka.Consumer is made from{hint}")
    for name in config:
        if not isinstance(name, str):
            raise ConfigError(f"{what} has a name of type {type(name).__name__}; write each name as a str")
    return dict(config)
