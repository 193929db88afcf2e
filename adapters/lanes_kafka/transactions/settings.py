"""The settings of transactions, and of the producer that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lanes.arguments import check_whole, shown_value
from lanes.errors import ConfigError
from lanes_kafka.config import ClientConfig, UserSettings
from lanes_kafka.dead_letters.producer import WRITE_TIMEOUT_MS
from lanes_kafka.publisher import publisher_settings

TRANSACTION_TIMEOUT_MS: Final = 10_000
"""Milliseconds after which the broker aborts the transaction of a process that has stopped."""

_SHORTEST: Final = 0.001
_LONGEST: Final = 5.0
"""Bounds of ``every`` in seconds. A longer transaction could reach its timeout."""

_TIMEOUT: Final = "transaction.timeout.ms"
_MESSAGE_TIMEOUTS: Final = ("message.timeout.ms", "delivery.timeout.ms")
_FAST: Final[Mapping[str, Any]] = {
    # The coordinator refuses a transaction while it completes the former one. The default pause is 100 ms.
    "retry.backoff.ms": 10,
}


@dataclass(frozen=True, slots=True)
class KafkaTransactions:
    """Transactions that commit the position of a source together with the outputs of its handlers.

    The *transactional id* is ``name``, followed by ``group.instance.id`` if the source has one. Each process of the
    group needs an id of its own, and keeps the id when it starts again. A start aborts the unfinished transaction of
    the former process with the same id.

    Attributes:
        name: Name of the transactional id. ``None`` = the id is the group and ``group.instance.id``.
        every: Seconds from the end of a handler to the transaction with its outputs, 0.001 to 5. The transaction begins
            earlier with ``messages`` finished messages, and later while another transaction runs.
        messages: Number of finished messages of a partition that start a transaction at once, 1 or more.
    """

    name: str | None = None
    every: float = 0.02
    messages: int = 1_000

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name.isprintable() or not self.name):
            raise ConfigError(
                f"KafkaTransactions(name={shown_value(self.name)}): pass a printable text, such as the name of the "
                "process"
            )
        every = self.every
        if isinstance(every, bool) or not isinstance(every, int | float) or not _SHORTEST <= every <= _LONGEST:
            raise ConfigError(
                f"KafkaTransactions(every={shown_value(every)}): pass {_SHORTEST:g} to {_LONGEST:g} seconds"
            )
        check_whole("KafkaTransactions(messages=…)", self.messages, 1)

    def transactional_id(self, config: ClientConfig) -> str:
        """Return the transactional id of this process. Pure.

        Args:
            config: Configuration of the source's client.

        Returns:
            The id.

        Raises:
            ConfigError: Neither a name nor ``group.instance.id`` identifies the process.
        """
        if self.name is None and config.instance is None:
            raise ConfigError(
                "transactions=KafkaTransactions(): two processes with one transactional id end each other's "
                "transactions; set group.instance.id, or pass KafkaTransactions(name), with a name that only this "
                "process has"
            )
        parts = [config.group if self.name is None else self.name, config.instance]
        return "-".join(part for part in parts if part is not None)


def transactional_settings(config: Mapping[str, Any], transactional_id: str) -> dict[str, Any]:
    """Return the settings of the producer that makes the transactions. Pure.

    Args:
        config: The dictionary of the publisher.
        transactional_id: The transactional id.

    Returns:
        The settings.

    Raises:
        ConfigError: A setting is invalid, or contradicts transactions.
    """
    given = UserSettings(config)
    settings = publisher_settings(config)
    timeout = given.get(_TIMEOUT)
    settings[_TIMEOUT] = TRANSACTION_TIMEOUT_MS if timeout is None else timeout
    if all(given.get(name) is None and f"topic.{name}" not in given for name in _MESSAGE_TIMEOUTS):
        # The client refuses a write timeout above the timeout of the transaction.
        settings["message.timeout.ms"] = min(WRITE_TIMEOUT_MS, int(settings[_TIMEOUT]))
    fast = {name: value for name, value in _FAST.items() if given.get(name) is None}
    return settings | fast | {"transactional.id": transactional_id}


def check_source(config: ClientConfig, given: Mapping[str, Any], *, commit_metadata: bool) -> None:
    """Raise ``ConfigError`` for settings of a source that contradict transactions. Pure.

    Args:
        config: Configuration of the source's client.
        given: The dictionary of the user.
        commit_metadata: See ``KafkaSource``.
    """
    if not commit_metadata:
        raise ConfigError(
            "transactions=… with commit_metadata=False: the outputs of a message above the position would need its "
            "entry in the metadata of the commit; leave commit_metadata out"
        )
    isolation = str(config.client.get("isolation.level", "read_committed"))
    if isolation != "read_committed":
        raise ConfigError(
            f"transactions=… with isolation.level={shown_value(isolation)}: the next owner of a partition would not "
            "wait for the last transaction of the former owner; leave the setting out"
        )
    transactional = UserSettings(given).get("transactional.id")
    if transactional is not None:
        raise ConfigError(
            f"transactional.id={shown_value(transactional)}: the source makes this id from KafkaTransactions(name) and "
            "group.instance.id; leave the setting out"
        )
