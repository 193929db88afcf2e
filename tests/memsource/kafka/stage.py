"""The stage of the scripts of ``tests.memsource.kafka.scenarios``: a broker with its clients, the
personality's or real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, get_args

from memsource.kafka.client import OffsetReset, RebalanceProtocol

NEW_MESSAGES: Final = 30
"""Number of messages of a recreated topic."""

LIMIT: Final = 60.0
"""Seconds within which an awaited event happens."""

PROTOCOLS: Final = get_args(RebalanceProtocol)

Seen = list[Any]
Hook = Callable[["Member"], None]


class Committed(NamedTuple):
    """The commit of a partition."""

    offset: int
    metadata: str


class Member(Protocol):
    """A client that has subscribed."""

    def heard(self) -> list[str]:
        """Its callbacks with a partition, as "assign 2", and the codes of its errors, in order."""

    def owned(self) -> list[int]:
        """The partitions that the client believes it owns."""

    def poll(self) -> None:
        """Let the client run its callbacks, and receive its messages."""

    def taken(self, partition: int = 0) -> list[int]:
        """The offsets of the messages received since the last call."""

    def commit(self, *offsets: int, partition: int = 0, metadata: str = "") -> str | None:
        """Commit offsets synchronously, for ``partition`` and the partitions after it; returns the error.

        ``metadata`` belongs to the last partition.
        """

    def pause(self, partition: int) -> None:
        """Pause a partition."""

    def resume(self, partition: int) -> None:
        """Resume a partition."""

    def position(self, partition: int = 0) -> int:
        """The next position to read."""

    def close(self) -> None:
        """Close the client."""


class Cluster(Protocol):
    """A broker with one topic, and one group on it. All times are in seconds."""

    protocol: RebalanceProtocol

    def publish(self, count: int, partition: int = 0) -> None:
        """Publish messages."""

    def transact(self, count: int, partition: int = 0, *, commit: bool = True) -> None:
        """Publish messages in a transaction, which leaves a marker after them."""

    def join(
        self, name: str, *, instance: str | None = None, on_revoke: Hook | None = None, on_lost: Hook | None = None
    ) -> Member:
        """Start a member, with a hook inside its callbacks. Does not wait."""

    def until(self, condition: Callable[[], bool], *members: Member) -> None:
        """Poll only these members until the condition holds."""

    def wait(self, seconds: float, *members: Member) -> None:
        """Poll only these members for some seconds."""

    def committed(self, partition: int = 0) -> Committed | None:
        """The commit of the group."""

    def delete_records(self, before: int, partition: int = 0) -> None:
        """Delete the records below an offset."""

    def delete_topic(self) -> None:
        """Delete the topic. Does not wait for the members."""

    def recreate_topic(self) -> None:
        """Delete the topic, create it again at once, and publish ``NEW_MESSAGES``."""

    def freeze(self, member: Member, seconds: float) -> None:
        """Freeze the process of a member that was made ``apart``, and wait for its end."""

    def outage(self, member: Member) -> None:
        """Kill the broker, start it again after more than a session, and poll the member continually."""


class Settings(NamedTuple):
    """Settings of the broker and the clients of a script.

    ``session``: None = long. ``apart``: each member has a process of its own. ``outage``: the script kills the broker.
    """

    partitions: int = 1
    session: float | None = None
    poll_interval: float = 60.0
    reset: OffsetReset = "earliest"
    refresh: float = 300.0
    apart: bool = False
    outage: bool = False


@dataclass(frozen=True)
class Scenario:
    """A script with its settings, and the observations on a real broker by protocol.

    ``quick``: the protocols in which it is a quick test on a real broker.
    """

    play: Callable[[Cluster], Seen]
    settings: Settings
    expected: Mapping[RebalanceProtocol, Seen]
    quick: Sequence[str]
    name: str

    def __str__(self) -> str:
        return self.name


def same(*seen: Any) -> dict[RebalanceProtocol, Seen]:
    """The same observations for all protocols."""
    return {protocol: list(seen) for protocol in PROTOCOLS}


def differing(*, classic: Seen | None = None, **by_protocol: Seen) -> dict[RebalanceProtocol, Seen]:
    """Observations by protocol: ``classic`` is eager and cooperative, ``new`` is 848. Others are not compared."""
    found = {"eager": classic, "cooperative": classic, "848": by_protocol.pop("new", None), **by_protocol}
    return {protocol: seen for protocol in PROTOCOLS if (seen := found[protocol]) is not None}
