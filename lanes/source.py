"""The contract between ``lanes`` and a backend.

A source delivers messages, settles them and gives up partitions. It decides nothing about order, retries or bounds.
The engine and the runtime know a backend only through the values and Protocols of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import DeadLetter

__all__ = [
    "CONTRACT_VERSION",
    "Assigned",
    "DeadLetters",
    "Delivered",
    "Exhausted",
    "Generation",
    "Lagging",
    "Lost",
    "Progressed",
    "Revoking",
    "Source",
    "SourceEvent",
    "SourceTraits",
]

CONTRACT_VERSION: Final = 1
"""The version of the contract that this file states.

It rises when a source that kept the contract may break it now: by a new duty, a new meaning, one more method, or one
more check of ``memsource.contract``. An optional addition, or one with a default, leaves it unchanged.
"""


@dataclass(frozen=True, kw_only=True)
class SourceTraits:
    """The properties of a source, known once it is open.

    Attributes:
        name: Name of the source in logs and errors.
        system: Kind of the broker, by the names of OpenTelemetry.
        settles: ``"individual"`` = one acknowledgement a message. ``"cumulative"`` = one committed position a
            partition, for every message below it; such a partition has a ``floor``.
        hands_over: Whether a commit also stores, for the next owner, which messages above the floor are completed.
        extend_interval: Seconds after which an unsettled message must be kept alive by ``extend``. ``None`` = the
            broker has no such timer.
        max_in_flight: Number of unsettled messages that the broker allows. ``None`` = any number.
        remembers: Whether the source never redelivers, within one assignment, a position that was passed to
            ``settle``. The engine then does not track settled positions. Only for ``"individual"``.
        revoke_limit: Seconds until the broker takes away a partition that is being revoked; must be at least
            ``Settings.longest_drain``. ``None`` = it waits.
        partitions: Number of partitions, those of other processes included. ``None`` = unknown.
        plans: Whether the source sends a ``Generation`` for each plan of the group, the first one as soon as its
            assignment is known.
        ordered: False where several processes take from one consumer at once, so that no order can be kept.
        exclusive: False where several processes own a partition at once, each with keys of its own.
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
        partition: The assignment, a new object each time. The ownership ends at its ``deadline`` at the
            latest; after it no handler starts and no message is settled.
    """

    partition: Partition


@dataclass(frozen=True, slots=True)
class Delivered:
    """A run: consecutive messages of one partition, in the order of the source.

    A message whose key cannot be read has no key, and has the ``MessageError`` with the reason as its ``broken``. It
    fails alone: its handler is not called, and the poison policy decides about it. Any other exception in ``broken``
    is a ``ContractError``.

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

    Sent only by a source that commits. Its committed position thereby reaches the end of a log that ends with markers.

    Attributes:
        partition: The assignment that was read.
        position: The position that the source reads next.
    """

    partition: Partition
    position: int


@dataclass(frozen=True, slots=True)
class Revoking:
    """The partition must be handed over: its handlers may end, then it is released.

    Attributes:
        partition: The assignment to give up.
        timeout: Seconds that running handlers get, at most ``Settings.drain_timeout``. The cancellation of handlers,
            the last settlement and ``release`` come after that, within ``Settings.longest_drain``. A broker's limit
            on all of it belongs in ``SourceTraits.revoke_limit``. Infinity = the next owner waits for the release, so
            handlers are not cancelled, however long they take.
    """

    partition: Partition
    timeout: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The partition is no longer owned. Its messages are neither settled nor released any more.

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
        standby: Whether this process owns nothing under the plan, and waits.
    """

    number: int
    standby: bool


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A finite source has delivered everything. It is the last event; a further ``receive`` waits."""


SourceEvent = Assigned | Delivered | Progressed | Revoking | Lost | Generation | Exhausted
"""The events that ``Source.receive`` returns."""


class Source(Protocol):
    """A backend.

    All calls come from one task group of one event loop; ``receive`` runs beside the others. The order of calls is
    ``open``, then any of ``receive``, ``settle``, ``extend`` and ``release``, then ``aclose``, also after a failed
    ``open``. No method may block the event loop; a blocking call belongs in a thread. An anyio scope may cancel each
    call.
    """

    async def open(self) -> SourceTraits:
        """Connect, and check before the first message everything that only the broker knows. Called once.

        Returns:
            The properties of the source.

        Raises:
            ConfigError: A setting cannot be kept; the text names setting, value and remedy.
            SourceError: The broker cannot be reached.
        """

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for the next events. Cancel-safe: a cancelled call loses nothing.

        With room for messages, the call returns as soon as there are any. Without room, of messages or of bytes, it
        waits for events of ownership only. Where the source settles each message by itself, a message may come for
        the first time after later positions of its partition. A lost connection is waited for: any exception stops
        the consumer in order.

        Args:
            room: Bounds of this call. At most ``room.messages`` new messages are delivered. Only the batch that
                crosses ``room.bytes``, or a single message, may exceed that bound. Partitions in ``room.paused``
                deliver nothing; a client that prefetches pauses exactly these, also right after an assignment.

        Returns:
            Events in the order of the source.

        Raises:
            SourceError: The connection cannot come back.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Tell the broker that these messages are finished. Idempotent.

        After the return, every settlement has left for the broker. A source that commits also has the broker's
        confirmation of each ``floor``, and of each ``completed`` set that it hands over.

        The call is cancelled when one of its partitions is lost, or is released before the commit is confirmed. A
        commit that has not left by then must not leave any more: it could undo a commit of the next owner. An event
        loop does not cancel a call that is about to continue. A source that waits before it sends must therefore
        check, after the wait, which partitions it has reported lost.

        Args:
            settlements: At most one for each partition. The next settlement of a partition comes after this one has
                ended; those of different partitions may come by concurrent calls.

        Raises:
            SourceError: With ``retryable=True``, a settlement may not have left. The caller then repeats it, or sends
                a later one in its place.
        """

    async def extend(self, messages: Sequence[Message]) -> None:
        """Keep these unsettled messages alive at the broker. Idempotent; best effort while disconnected.

        Called only with ``extend_interval``. Messages that the broker has already given to another process are
        skipped. Transient errors are not raised: any exception stops the consumer in order.

        Args:
            messages: The messages to keep alive.
        """

    async def release(self, partition: Partition) -> None:
        """Hand a drained partition back. When it returns, everything settled before has reached the broker.

        Idempotent, also while the same call runs: a partition that is being given back may be revoked at that moment.
        Its unsettled messages may go to the next owner at once. A handler that did not end within ``drain_timeout``
        and ``grace`` may still run. Any exception but ``SourceError`` stops the consumer in order.

        Args:
            partition: The assignment to hand back.

        Raises:
            SourceError: The release failed. The log names it, and the run continues without the partition.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened. Idempotent; the user's own connection stays open.

        A cancelled run has released nothing: the broker redelivers its unsettled messages after its own timeout. An
        exception is logged.
        """


@runtime_checkable
class Lagging(Protocol):
    """An optional part of a source: one that knows its lag."""

    def lag(self, partition: Partition) -> int | None:
        """The lag of a partition. Called from any thread; does not block, sends nothing and raises nothing.

        Args:
            partition: An assignment of this source.

        Returns:
            The lag a moment ago, counted as the broker's own tools count it: in messages, or in positions where the
            source commits those. ``None`` = unknown.
        """


class DeadLetters(Protocol):
    """The target of dead letters."""

    async def open(self) -> None:
        """Connect and check that the target exists.

        Raises:
            ConfigError: The target does not exist, or a setting cannot be kept.
            SourceError: The target cannot be reached.
        """

    async def put(self, dead_letter: DeadLetter) -> None:
        """Write one dead letter and wait until the broker has confirmed it.

        Idempotent by the ``id``, as far as the backend can deduplicate. A cancelled call may still have written it.

        Args:
            dead_letter: The dead letter.

        Raises:
            SourceError: With ``retryable=True``, the write is not confirmed; the caller repeats it for as long as it
                takes. Otherwise the consumer stops in order.
            LanesError: Any other error of ``lanes``, such as ``ConfigError``, stops the consumer in order. An
                exception of another kind counts as retryable.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened. Idempotent."""
