"""The contract between ``lanes`` and a backend.

A source delivers, settles and gives up partitions; it decides nothing about order, retries or bounds. The
engine and the runtime know a backend only through the values and Protocols of this file.
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
"""The version of what this file asks of a source. It rises when one that kept the contract may not keep it any more: a
new duty, a new meaning, a method more, a check more in ``memsource.contract``. What has a default, or need not be
there, leaves it as it is."""


@dataclass(frozen=True, kw_only=True)
class SourceTraits:
    """What a source can do, known once it is open.

    ``name``: how logs and errors call it. ``system``: the broker's kind as OpenTelemetry calls it. ``settles``:
    ``"individual"`` = one acknowledgement a message, ``"cumulative"`` = one committed position a partition, for
    everything below it; its partitions have a ``floor``. ``hands_over``: whether a commit also keeps what is completed
    above the floor, for the next owner. ``extend_interval``: seconds after which a held message must be kept alive by
    ``extend``; None = the broker has no such timer. ``max_in_flight``: how many unsettled messages the broker itself
    allows; None = it does not care. ``remembers``: of the positions of one assignment, which may all come again where
    the source settles each message by itself, none comes that was given to ``settle`` there, whatever came of that: so
    nobody else has to know.
    ``revoke_limit``: seconds after which the broker takes a partition away that is being revoked, which have to hold
    ``Settings.longest_drain``; None = it waits.
    ``partitions``: how many there are, those of other processes included; None = that is not known. ``plans``: it says
    by ``Generation`` what the group's plan is, the first time as soon as its assignment is known. ``ordered``: False
    where several processes take from one consumer at once, so that no order can be kept. ``exclusive``: False where
    several processes have a partition at once, each with keys of its own.
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
    """This process owns the partition from now on. The ``Partition`` is new for every assignment.

    With a ``deadline`` it is owned until then at most: nothing starts and nothing is settled from there on.
    """

    partition: Partition


@dataclass(frozen=True, slots=True)
class Delivered:
    """A run: consecutive messages of one partition, as received. ``size`` is the sum of their sizes.

    One whose key cannot be read is delivered like the others, with the ``MessageError`` that says why as its
    ``broken``, and without a key: it fails alone, no handler is called, and the poison policy decides about it. Any
    other exception there is a ``ContractError``.
    """

    partition: Partition
    run: list[Message]
    size: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The source has read up to ``position`` and found nothing more below it: gaps at the end of what there is.

    Only from a source that commits; so its committed position reaches the end although markers lie there.
    """

    partition: Partition
    position: int


@dataclass(frozen=True, slots=True)
class Revoking:
    """The partition is to be handed over: its handlers have ``timeout`` seconds to end, then it is released.

    Cancelling them, settling and ``release`` may take the rest of ``Settings.longest_drain`` on top: a broker's limit
    for all of it is for ``SourceTraits.revoke_limit`` to say, before the first message. Infinity: nobody takes it
    before it is released, so its handlers are let end, however long they take. Any other time is cut to
    ``Settings.drain_timeout``.
    """

    partition: Partition
    timeout: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The partition is no longer owned. Nothing of it is settled or released any more."""

    partition: Partition
    reason: str


@dataclass(frozen=True, slots=True)
class Generation:
    """The group has a plan, number ``number``; ``standby``: by that plan this process owns nothing, and waits."""

    number: int
    standby: bool


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A finite source has delivered everything; the last event it sends. ``receive`` may be called again: it waits."""


SourceEvent = Assigned | Delivered | Progressed | Revoking | Lost | Generation | Exhausted
"""What ``Source.receive`` tells."""


class Source(Protocol):
    """A backend. All calls come from one task group of one event loop; ``receive`` runs beside the others.

    Order of calls: ``open``, then any of ``receive``, ``settle``, ``extend``, ``release``, then ``aclose``, also where
    ``open`` failed. None may block the event loop: what blocks goes to a thread. Each may be cancelled, by a scope of
    anyio.
    """

    async def open(self) -> SourceTraits:
        """Connect and check everything only the broker knows, before the first message.

        Raises ``ConfigError`` naming setting, value and remedy for what cannot be kept, and ``SourceError`` when
        the broker cannot be reached. Called once.
        """

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for the next events, in source order.

        Delivers at most ``room.messages`` new messages, and does not wait for more room while there is any; more than
        ``room.bytes`` only by the batch that crosses the bound, or for one message alone. With no room, of messages or
        of bytes, it waits for events of ownership only. A message may come for the first time behind later positions
        of its partition where the source settles each message by itself. Nothing of the partitions in ``room.paused``
        is delivered; a client that prefetches is to be paused for exactly these, also right after an assignment.
        Cancel-safe: nothing is lost when the call is cancelled. A lost connection is waited for, not raised: whatever
        it raises stops the consumer in order. So it raises ``SourceError`` only when the connection cannot come back.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Tell the broker that these messages are finished. Idempotent.

        When it returns they have left for the broker; where the source commits, the broker has confirmed the ``floor``
        of each settlement, and its ``completed`` set if the source hands it over. A partition has one settlement under
        way at a time; those of different partitions may come by different calls at once. Raises ``SourceError`` with
        ``retryable=True`` when they may not have: the caller repeats it, or sends a later one in its place.

        Cancelled when a partition of it is lost, or released before its commit came back: what has not left for the
        broker by then must not leave any more, for it could undo a commit of the next owner. No event loop cancels a
        call that is about to go on anyway: one that waits before it sends looks, behind the wait, for what the source
        has reported lost meanwhile.
        """

    async def extend(self, messages: Sequence[Message]) -> None:
        """Keep these held messages alive at the broker. Idempotent; best effort while disconnected.

        Called only with ``extend_interval``. One that the broker has given to somebody else by now is passed over. What
        will pass is not raised: whatever it raises stops the consumer in order.
        """

    async def release(self, partition: Partition) -> None:
        """Hand a drained partition back. Everything settled before has reached the broker when it returns.

        Idempotent, also while the same call is under way: one that is given back may be revoked at that moment. What
        is unsettled then will not be: it may go to the next owner at once. A handler that did not end within
        ``drain_timeout`` and its grace may still run. Raises ``SourceError`` where that failed: it is told of in the
        log, and the run goes on without the partition. Any other exception stops the consumer in order.
        """

    async def aclose(self) -> None:
        """Close what ``open`` opened. Idempotent; a connection the user passed in stays open.

        A run that was cancelled has released nothing: what it left unsettled comes when the broker's own time is over.
        What it raises is told of in the log.
        """


@runtime_checkable
class Lagging(Protocol):
    """What a source may have beside the methods of ``Source``: one that knows how far behind it is."""

    def lag(self, partition: Partition) -> int | None:
        """How much the broker has of the partition that it has not been told is finished, counted as the broker's own
        tools count it: in messages, or in positions where it commits those. None while that is not known.

        A moment old. Called from any thread; does not block, asks nobody, raises nothing.
        """


class DeadLetters(Protocol):
    """Where poison messages go."""

    async def open(self) -> None:
        """Connect and check that the target exists. Raises ``ConfigError`` or ``SourceError``."""

    async def put(self, letter: DeadLetter) -> None:
        """Write one letter and wait until the broker confirmed it.

        Idempotent by ``letter.id`` as far as the backend can deduplicate. Raises a retryable ``SourceError`` when the
        write is not confirmed: the caller tries again for as long as it takes. It stops in order after one that is not
        retryable, and after any other error of ``lanes``, such as ``ConfigError``. Cancelled, the letter may have been
        written all the same.
        """

    async def aclose(self) -> None:
        """Close what ``open`` opened. Idempotent."""
