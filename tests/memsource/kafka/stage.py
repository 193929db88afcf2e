"""The stage of the scripts of ``tests.memsource.kafka.scenarios``: a broker with its clients, the
personality's or real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, get_args

from memsource.kafka.client import OffsetReset, RebalanceProtocol

NEW_MESSAGES: Final = 30
"""How many a recreated topic has."""

LIMIT: Final = 20.0
"""Seconds within which what is waited for happens."""

PROTOCOLS: Final = get_args(RebalanceProtocol)

Seen = list[Any]
Hook = Callable[["Member"], None]


class Committed(NamedTuple):
    """What is committed of a partition."""

    offset: int
    metadata: str


class Member(Protocol):
    """A client that has subscribed."""

    def heard(self) -> list[str]:
        """Its callbacks that named a partition, as "assign 2", and the codes of the errors it was told, in order."""

    def owned(self) -> list[int]:
        """What it believes to own."""

    def poll(self) -> None:
        """Let the client do what there is to be done, and take the messages it hands out."""

    def taken(self, partition: int = 0) -> list[int]:
        """The offsets of the messages that were taken since this was asked last."""

    def commit(self, *offsets: int, partition: int = 0, metadata: str = "") -> str | None:
        """Commit synchronously, the first offset of ``partition``, the next one of the next; what it fails with.

        ``metadata`` is that of the last one.
        """

    def pause(self, partition: int) -> None:
        """Have nothing of it handed out."""

    def resume(self, partition: int) -> None:
        """Have it handed out again."""

    def position(self, partition: int = 0) -> int:
        """Next to read."""

    def close(self) -> None:
        """Close the client."""


class Cluster(Protocol):
    """A broker with one topic, and one group on it. All times are in seconds."""

    protocol: RebalanceProtocol

    def publish(self, count: int, partition: int = 0) -> None:
        """Publish messages."""

    def transact(self, count: int, partition: int = 0, *, commit: bool = True) -> None:
        """Publish messages in a transaction, which leaves a marker behind them."""

    def join(
        self, name: str, *, instance: str | None = None, on_revoke: Hook | None = None, on_lost: Hook | None = None
    ) -> Member:
        """A new member, with what is run inside its callbacks. Does not wait."""

    def until(self, condition: Callable[[], bool], *members: Member) -> None:
        """Poll these, and no others, until the condition holds."""

    def wait(self, seconds: float, *members: Member) -> None:
        """Poll these, and no others, for so long."""

    def committed(self, partition: int = 0) -> Committed | None:
        """What the group has committed."""

    def delete_records(self, before: int, partition: int = 0) -> None:
        """Let the log begin there."""

    def delete_topic(self) -> None:
        """Delete the topic. Does not wait for what the members do."""

    def recreate_topic(self) -> None:
        """Delete the topic and create it anew at once, with messages of the new one behind it: ``NEW_MESSAGES``."""

    def freeze(self, member: Member, seconds: float) -> None:
        """Stop the process of a member that was made ``apart`` for so long, and wait."""

    def outage(self, member: Member) -> None:
        """Kill the broker, start it again after more than a session, and poll the member all the time."""


class Settings(NamedTuple):
    """How brokers and clients are set for a script. ``session``: None = long. ``apart``: each member in a process of
    its own; ``outage``: the broker is killed."""

    partitions: int = 1
    session: float | None = None
    poll_interval: float = 60.0
    reset: OffsetReset = "earliest"
    refresh: float = 300.0
    apart: bool = False
    outage: bool = False


@dataclass(frozen=True)
class Scenario:
    """A script, what it runs on, and what was seen on a broker, by protocol. ``quick``: the protocols in which it is
    among the quick tests there."""

    play: Callable[[Cluster], Seen]
    settings: Settings
    expected: Mapping[RebalanceProtocol, Seen]
    quick: Sequence[str]
    name: str

    def __str__(self) -> str:
        return self.name


def same(*seen: Any) -> dict[RebalanceProtocol, Seen]:
    """All protocols do the same."""
    return {protocol: list(seen) for protocol in PROTOCOLS}


def differing(*, classic: Seen | None = None, **by_protocol: Seen) -> dict[RebalanceProtocol, Seen]:
    """What each does; ``classic`` = eager and cooperative; ``new`` = 848. One that is left out is not looked at."""
    found = {"eager": classic, "cooperative": classic, "848": by_protocol.pop("new", None), **by_protocol}
    return {protocol: seen for protocol in PROTOCOLS if (seen := found[protocol]) is not None}
