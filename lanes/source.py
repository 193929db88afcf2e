"""The contract between ``lanes`` and a backend.

A source delivers messages, settles them and gives up partitions. A source decides nothing about order, retries or
bounds. The engine and the runtime use a backend only through values and Protocols, most of which are in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import DeadLetter

__all__ = [
    "CONTRACT_VERSION",
    "Addressed",
    "Assigned",
    "DeadLetters",
    "Declaring",
    "Delivered",
    "Destination",
    "Exhausted",
    "Generation",
    "Lagging",
    "Lost",
    "Progressed",
    "Reading",
    "Revoking",
    "Source",
    "SourceEvent",
    "SourceTraits",
]

CONTRACT_VERSION: Final = 1
"""The version of the contract that this file states.

The version rises when a source that kept the former contract may break the new contract: by a new duty, a new meaning,
a further method, or a further check of ``memsource.contract``. An addition that is optional, or has a default, leaves
the version unchanged.
"""


@dataclass(frozen=True, kw_only=True)
class SourceTraits:
    """The properties of a source, known once it is open.

    Attributes:
        name: Name of the source in logs and errors.
        system: Name of the broker's kind in OpenTelemetry, such as ``kafka``.
        settles: ``"individual"`` = one acknowledgement a message. ``"cumulative"`` = one committed position a
            partition, which settles every message below it. A partition with a committed position has a ``floor``.
        hands_over: Whether a commit also stores, for the next owner, which messages above the floor are completed.
        extend_interval: Seconds after which an unsettled message must be kept alive by ``extend``. ``None`` = the
            broker has no such timer.
        max_in_flight: Number of unsettled messages that the broker allows. ``None`` = any number.
        remembers: Whether the source never redelivers, within one assignment, a position that was passed to
            ``settle``. The engine then does not track settled positions. Only for ``"individual"``.
        revoke_limit: Seconds after which the broker removes a revoked partition without a release, at least
            ``Settings.longest_drain``. ``None`` = the broker waits for the release.
        partitions: Number of partitions, including the partitions of other processes. ``None`` = unknown.
        plans: Whether the source sends a ``Generation`` for each plan of the group, and the first one as soon as the
            source knows its assignment.
        ordered: False if several processes receive from one broker's consumer at once, so that no order can be kept.
        exclusive: False where several processes own one partition at once, each of them for its own keys.
    """

    name: str
    system: str = "other"
    settles: Literal["individual", "cumulative"] = "individual"
    hands_over: bool = True
    extend_interval: float | None = None
    max_in_flight: int | None = None
    remembers: bool = False
    revoke_limit: float | None = None
    partitions: int | None = None
    plans: bool = False
    ordered: bool = True
    exclusive: bool = True


@dataclass(frozen=True, slots=True)
class Assigned:
    """This process owns the partition from now on.

    Attributes:
        partition: The assignment, a new object each time. The ownership ends at its ``deadline`` at the latest. After
            the deadline no handler starts and no message is settled.
    """

    partition: Partition


@dataclass(frozen=True, slots=True)
class Delivered:
    """A run: consecutive messages of one partition, in the order of the source.

    A message whose key cannot be read has no key, and its ``broken`` is the ``MessageError`` with the reason. Only
    this message fails. Its handler is not called, and the poison policy decides about the message. The runtime raises
    ``ContractError`` for any other exception in ``broken``.

    Attributes:
        partition: The assignment that the messages belong to.
        run: The messages.
        size: Sum of the sizes of the messages, in bytes.
    """

    partition: Partition
    run: list[Message]
    size: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The source has read up to ``position`` and found no more messages below it, only gaps.

    Only a source that commits sends this event. After the event, the committed position can reach the end of a log
    that ends with markers.

    Attributes:
        partition: The assignment that was read.
        position: The position that the source reads next.
    """

    partition: Partition
    position: int


@dataclass(frozen=True, slots=True)
class Revoking:
    """The partition must be handed over: the runtime lets running handlers end, and then releases the partition.

    Attributes:
        partition: The assignment to give up.
        timeout: Seconds that running handlers get, at most ``Settings.drain_timeout``. The cancellation of
            handlers, the last settlement and ``release`` follow after this time, within ``Settings.longest_drain``.
            State a broker's limit on the whole drain in ``SourceTraits.revoke_limit``. Infinity = the next owner
            waits for the release, so handlers are not cancelled, however long they take.
    """

    partition: Partition
    timeout: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The partition is no longer owned. The runtime neither settles its messages nor releases the partition.

    Attributes:
        partition: The assignment that was lost.
        reason: Text for the log and for ``GroupEvent.reason``.
    """

    partition: Partition
    reason: str


@dataclass(frozen=True, slots=True)
class Generation:
    """The group has a new plan.

    Attributes:
        number: Number of the plan.
        standby: Whether this process owns no partition under the plan.
    """

    number: int
    standby: bool


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A finite source has delivered every message. This event is the last; a further ``receive`` waits."""


SourceEvent = Assigned | Delivered | Progressed | Revoking | Lost | Generation | Exhausted
"""The events that ``Source.receive`` returns."""


class Source(Protocol):
    """A backend.

    The runtime makes all calls on one event loop, and calls ``receive`` concurrently with the other methods. The first
    call is ``open``, unless the target of dead letters cannot be opened. The last call is ``aclose``, even if ``open``
    failed or was never called. No method may block the event loop; a blocking call belongs in a thread. An anyio scope
    may cancel each call.
    """

    async def open(self) -> SourceTraits:
        """Connect, and check before the first message every setting that depends on the broker. Called once.

        Returns:
            The properties of the source.

        Raises:
            ConfigError: A setting contradicts the broker; the text names setting, value and remedy.
            SourceError: The broker does not answer, or refuses the login or a request.
        """

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for the next events. Cancel-safe: a cancelled call loses no event.

        With room for messages and bytes, the call returns as soon as a message is available. Without room for messages
        or for bytes, the call waits for events of ownership only. If the source settles each message individually, it
        may deliver a message for the first time after later positions of the partition. While the connection is lost,
        the call waits for a new connection, because any exception stops the consumer after a drain.

        Args:
            room: Bounds of this call. The call returns at most ``room.messages`` new messages. Only the batch that
                crosses ``room.bytes``, or a single message, may exceed ``room.bytes``. Partitions in ``room.paused``
                deliver no message. A client that prefetches pauses exactly these partitions, even right after an
                assignment.

        Returns:
            Events in the order of the source.

        Raises:
            SourceError: The connection cannot be restored.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Tell the broker that these messages are finished. Idempotent.

        When the call returns, every settlement was sent to the broker. If the source commits, the broker has also
        confirmed each ``floor``, and each ``completed`` set that the source hands over.

        The runtime cancels the call when a partition of the settlements is lost, or is released before the commit is
        confirmed. After the cancellation the source must send no commit of the call, because it could undo a commit
        of the next owner. An event loop cannot cancel a call whose wait has just ended. A source that waits before it
        sends must therefore check, after the wait, which partitions it has reported lost.

        Args:
            settlements: At most one settlement for each partition. The runtime passes the next settlement of a
                partition only after this call has ended. Concurrent calls may pass settlements of different
                partitions.

        Raises:
            SourceError: With ``retryable=True``, a settlement was perhaps not sent. The caller then repeats the
                settlement, or passes a later settlement of the partition.
        """

    async def extend(self, messages: Sequence[Message]) -> None:
        """Keep these unsettled messages alive at the broker. Idempotent; best effort while disconnected.

        Called only if ``SourceTraits.extend_interval`` is set. The source skips messages that the broker has already
        delivered to another process. ``extend`` must not raise an exception for a transient failure, because any
        exception stops the consumer after a drain.

        Args:
            messages: The messages to keep alive.
        """

    async def release(self, partition: Partition) -> None:
        """Hand a drained partition back. When the call returns, all earlier settlements have reached the broker.

        Idempotent, even while the same call runs, because the source may revoke a partition during its release. The
        broker may deliver the unsettled messages to the next owner at once. A handler that did not end within
        ``drain_timeout`` and ``grace`` may still run. Any exception but ``SourceError`` stops the consumer after a
        drain.

        Args:
            partition: The assignment to hand back.

        Raises:
            SourceError: The release failed. The runtime logs the error, and the run continues without the partition.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened. Idempotent; the user's own connection stays open.

        After a cancellation, the owned partitions are not released. The broker redelivers their unsettled messages
        after its own timeout. The runtime logs an exception of the call.
        """


@runtime_checkable
class Lagging(Protocol):
    """An optional part of a source that can report its lag."""

    def lag(self, partition: Partition) -> int | None:
        """Return the lag of a partition. Called from any thread; sends nothing, raises nothing and does not block.

        Args:
            partition: An assignment of this source.

        Returns:
            The last known lag, in messages, or in positions if the source commits positions. The broker's own tools
            count the lag in the same way. ``None`` = unknown.
        """


@runtime_checkable
class Declaring(Protocol):
    """An optional part of a source that knows some of its traits before ``open``.

    The constructor of a consumer then refuses settings that contradict these traits, so that no connection is opened
    for them. ``open`` returns the complete traits, which the consumer checks too.
    """

    def declared(self) -> SourceTraits:
        """Return the traits that the arguments of the source decide, and defaults for traits that the broker decides.

        Sends nothing and does not block.

        Returns:
            The traits.
        """


class Destination(NamedTuple):
    """A topic or stream to which dead letters are written.

    Attributes:
        system: Kind of the broker, as in ``SourceTraits.system``.
        name: Name of the topic or stream.
        subject: Subject of the dead letters, where the broker has subjects.
    """

    system: str
    name: str
    subject: str = ""


@runtime_checkable
class Reading(Protocol):
    """An optional part of a source: whether the source reads a given topic or stream.

    The consumer calls ``reads`` at most once, after the source and the dead letters are open. The consumer refuses dead
    letters that the source would read again.
    """

    def reads(self, destination: Destination) -> bool:
        """Return whether the source reads messages that are written to ``destination``.

        Sends nothing and does not block.

        Args:
            destination: Topic or stream, possibly of another broker.

        Returns:
            True if the source reads messages of the destination. False if it does not, or if the answer is unknown.
        """


@runtime_checkable
class Addressed(Protocol):
    """An optional part of ``DeadLetters`` that names its topic or stream."""

    def destination(self) -> Destination:
        """Return the topic or stream of the dead letters. Called after ``open``; does not block.

        Returns:
            The topic or stream.
        """


class DeadLetters(Protocol):
    """The target of dead letters."""

    async def open(self) -> None:
        """Connect and check that the target exists.

        Raises:
            ConfigError: The target does not exist, or a setting contradicts the broker.
            SourceError: The target cannot be reached.
        """

    async def put(self, dead_letter: DeadLetter) -> None:
        """Write one dead letter and wait until the broker has confirmed it.

        Idempotent by the ``id``, as far as the backend can deduplicate. A cancelled call may have written the record.

        Args:
            dead_letter: The dead letter.

        Raises:
            SourceError: With ``retryable=True``, the write is not confirmed, and the caller repeats the write
                until it succeeds. With ``retryable=False``, the consumer stops after a drain.
            LanesError: Any other error of ``lanes``, such as ``ConfigError``, stops the consumer after a drain.
                After an exception of another kind, the caller repeats the write.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened. Idempotent."""
