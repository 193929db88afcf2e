"""The values of the core: what a source hands in, what a handler sees, what comes back.

Slotted, positional and without behaviour, because one ``Message`` exists per message in flight and nothing
else does. Hot states and outcomes are compared by identity or as plain ints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from lanes.errors import MessageError

__all__ = [
    "ABANDON",
    "ACK",
    "NEVER",
    "RETURN",
    "Failure",
    "LaneId",
    "Message",
    "Outcome",
    "Partition",
    "PartitionId",
    "PartitionKey",
    "Reader",
    "Room",
    "Runs",
    "Settlement",
    "key_bytes",
]

PartitionKey = bytes | str | int
"""What a key may be: bytes, a ``str`` (its UTF-8) or an unsigned 128-bit ``int`` (16 bytes, little-endian)."""

LaneId: TypeAlias = bytes | int | None
"""Which lane of its partition a message is in: its key, the number of a lane that several keys share, or None for
a message whose order nobody claims."""

Runs: TypeAlias = list[tuple[int, int]]
"""Positions as sorted, disjoint, half-open runs: ``[(3, 5), (9, 10)]`` is 3, 4 and 9."""

KEY_INT_BYTES: Final = 16

NEVER: Final = float("inf")
"""When what does not come is due: the deadline without a lease. Also a length of time that has no limit."""


def key_bytes(key: PartitionKey) -> bytes:
    """The bytes that identify a key.

    Raises ``ValueError`` for an ``int`` outside 0 … 2¹²⁸−1 and ``TypeError`` for any other type. Neither shows the
    key.
    """
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, int) and not isinstance(key, bool):
        if 0 <= key < 1 << 8 * KEY_INT_BYTES:
            return key.to_bytes(KEY_INT_BYTES, "little")
        # Not the key itself: it is private, and one of thousands of digits could not be written.
        found = "is below 0" if key < 0 else f"has {key.bit_length()} bits"
        raise ValueError(f"an int key must be in 0 … 2**128-1, and this one {found}; pass its bytes instead")
    raise TypeError(f"a key must be bytes, str or int, not {type(key).__name__}; return None for 'no key'")


class PartitionId(NamedTuple):
    """Where a message came from: the topic or stream, and the number of its partition there."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}/{self.number}"


class Reader(Protocol):
    """How to look into the raw messages of one source; called only when a handler asks.

    Every method is a plain function of the raw message: it neither blocks nor changes it.
    """

    def value(self, raw: object) -> bytes:
        """The payload; empty bytes when there is none."""

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        """The headers in the order of the wire, as far as the client keeps them."""

    def subject(self, raw: object) -> str:
        """The topic or the subject the message was published to."""


class Ledger(Protocol):
    """The record of which messages of an assignment are in flight. Each way of settling has its own.

    ``highest``: the highest position admitted so far.
    """

    highest: int

    def settle(self, messages: Iterable[Message]) -> tuple[int, int]:
        """Mark messages as settled; returns how many that changed and their bytes."""

    def drop(self, message: Message) -> None:
        """Forget an unfinished message; the broker delivers it again."""

    def in_flight(self) -> list[Message]:
        """The messages delivered and not settled, in order of delivery."""

    def unfinished(self) -> list[Message]:
        """The messages in flight that are not finished, in order of delivery."""

    def oldest(self) -> Message | None:
        """The unfinished message that was delivered first."""

    def holes(self) -> int:
        """How many deliveries are not settled."""

    def floor(self) -> int:
        """The next position to read; every delivery below it is finished."""


class CommitProgress(Protocol):
    """How far the commits of an assignment are."""

    changes: int
    confirmed: int
    confirmed_ordinal: int
    sending: Settlement | None
    over: bool

    @property
    def pending(self) -> bool:
        """Whether a change waits for a commit, and none is on its way."""

    def unknown(self, again_at: float) -> None:
        """Repeat the commit on its way, not before ``again_at``: its result is unknown."""


_NOTHING_RECALLED: Final[Mapping[int, int]] = {}


class PartitionInternals:
    """What the engine and its shell keep of an assignment. Not public: it may change without notice.

    ``steady``: live and not draining. ``dirty``: it has something to settle. ``unended``: while it drains, the handlers
    that have to end, those that are yet to start included. ``recalled``: at which attempt some of its messages begin,
    by position, where a store has kept that; set before they are delivered, and their ``Message.attempt`` with it.
    """

    __slots__ = (
        "commits",
        "dirty",
        "draining",
        "finished",
        "ledger",
        "recalled",
        "resettle",
        "steady",
        "tails",
        "unended",
    )

    commits: CommitProgress | None
    dirty: bool
    draining: bool
    finished: list[Message]
    ledger: Ledger
    recalled: Mapping[int, int]
    resettle: list[Message]
    steady: bool
    tails: dict[bytes | int, Message]
    unended: int


class Partition(PartitionInternals):
    """One assignment of a partition to this process.

    A source makes a new one for every assignment and hands it over in ``Assigned``; the engine numbers it. It *is* the
    fence: a result whose ``message.partition`` is no longer ``live`` changes nothing.

    ``incarnation`` tells two streams or topics of the same name apart (a recreated one), and goes into the ids
    of dead letters. ``floor`` is None for a source that settles each message by itself; a source that commits says
    where it begins to read, and hands over what its predecessor had ``completed`` above that.

    ``deadline``: until when a lease certainly holds, in seconds of ``lanes.clock.monotonic``; infinite without one. The
    source raises it at each renewal, but never one that has passed: from then on the assignment is lost, for the
    source and for the engine's shell alike, whoever notices first. ``fencing_token``: the number of this ownership
    across processes, 0 … 2⁶³−1 and rising for each partition; None = there is none.

    ``assignment`` counts the assignments of this process: 1, 2, 3 … over all its partitions, 0 before there is one.
    Rows of a history name their assignment by it. ``epoch`` is what handlers get, and spans, dead letters, events and
    the status with them; the row ``assigned`` has both.
    """

    __slots__ = (
        "assignment",
        "completed",
        "deadline",
        "fencing_token",
        "floor",
        "id",
        "incarnation",
        "live",
        "reader",
    )

    def __init__(
        self,
        partition_id: PartitionId,
        reader: Reader,
        incarnation: str = "",
        *,
        floor: int | None = None,
        completed: Sequence[tuple[int, int]] = (),
        deadline: float = NEVER,
        fencing_token: int | None = None,
    ) -> None:
        self.id = partition_id
        self.reader = reader
        self.incarnation = incarnation
        self.floor = floor
        self.completed = completed
        self.deadline = deadline
        self.fencing_token = fencing_token
        self.assignment: int = 0
        self.live: bool = False
        self.recalled = _NOTHING_RECALLED
        self.draining = False
        self.steady = False
        self.dirty = False
        self.unended = 0
        self.tails = {}
        self.finished = []
        self.resettle = []
        self.commits = None

    @property
    def epoch(self) -> int:
        """What handlers get: the fencing token, or where there is none the number of the assignment."""
        return self.assignment if self.fencing_token is None else self.fencing_token

    def __repr__(self) -> str:
        state = "draining" if self.draining else "live" if self.live else "fenced"
        handlers = f", {self.unended} handlers to end" if self.draining else ""
        return f"<Partition {self.id} assignment {self.assignment} {state}{handlers}>"


class MessageInternals:
    """What the engine keeps of a message. Not public: it may change without notice.

    ``lane``: which one it is in; a source sets none. ``next``: what follows it there. ``state``: one of
    ``lanes.core.lane``. ``ordinal``: the number of its delivery, where the source commits.
    """

    __slots__ = ("lane", "next", "ordinal", "state")

    lane: LaneId
    next: Message | None
    ordinal: int
    state: int


class Message(MessageInternals):
    """One message, as the source delivered it and as the handler sees it.

    ``key`` is the bytes of the partition key, or None for a message without one. ``position`` is the offset or
    stream sequence. ``size`` counts bytes against ``max_in_flight_bytes``. ``attempt`` starts at 1 in each
    assignment, or where a store of attempts says. ``token`` is what the source needs to settle this delivery; a
    redelivery replaces it.
    ``received`` is the time of the delivery in seconds of the engine's clock. ``data`` is what the consumer's
    ``decode`` made of the message; there is none without. ``broken`` is set by a source that could not read the key,
    for one: then the handler is not called, and this is what it failed with, an outcome of this one message.
    """

    __slots__ = (
        "attempt",
        "broken",
        "data",
        "key",
        "partition",
        "position",
        "raw",
        "received",
        "size",
        "token",
    )

    def __init__(
        self, partition: Partition, position: int, key: bytes | None, size: int, raw: object, token: object
    ) -> None:
        self.partition = partition
        self.position = position
        self.key = key
        self.lane = key
        self.size = size
        self.raw = raw
        self.token = token
        self.broken: MessageError | None = None
        self.attempt: int = 1
        self.state = 0
        self.ordinal = 0
        self.data: object
        self.received: float = 0.0
        self.next = None

    @property
    def value(self) -> bytes:
        """The payload, read from the raw message each time it is asked for."""
        return self.partition.reader.value(self.raw)

    @property
    def headers(self) -> Sequence[tuple[str, bytes]]:
        """The headers as pairs, in the order of the wire, as far as the client keeps repeated names."""
        return self.partition.reader.headers(self.raw)

    @property
    def subject(self) -> str:
        """The topic (Kafka) or the subject (JetStream) it was published to."""
        return self.partition.reader.subject(self.raw)

    @property
    def epoch(self) -> int:
        """A number that rises with each assignment; pass it along with effects as a fencing token.

        In a cohort it rises across its processes, else within this one. As ``partition.epoch``.
        """
        return self.partition.epoch

    def __repr__(self) -> str:
        # Neither key nor payload: a repr ends up in logs, and both are the user's data.
        return f"<Message {self.partition.id} position {self.position} attempt {self.attempt}>"


class Outcome:
    """How a handler ended: ``ACK``, ``ABANDON``, ``RETURN`` or a ``Failure``."""

    __slots__ = ()


ACK: Final = Outcome()
"""It is done."""

ABANDON: Final = Outcome()
"""It was interrupted and does not count: neither done nor failed. Abandoned; the broker delivers it again."""


RETURN: Final = Outcome()
"""It was interrupted because of other messages of its batch: it goes back to the head of its lane, and runs again.

It has not started, and its ``attempt`` is what it was: a lower position of its lane that comes late goes before it."""


class Failure(Outcome):
    """A handler that did not succeed.

    ``delay`` (seconds) replaces the backoff of this attempt, ``terminal`` means "do not retry", ``chance`` in
    [0, 1) is the randomness for the jitter, drawn by the caller because the core draws none. ``dead_lettered``: an
    earlier assignment wrote its dead letter, where the policy asks for one.
    """

    __slots__ = ("chance", "dead_lettered", "delay", "error", "terminal")

    def __init__(
        self,
        error: BaseException,
        chance: float = 0.0,
        delay: float | None = None,
        terminal: bool = False,
        dead_lettered: bool = False,
    ) -> None:
        self.error = error
        self.chance = chance
        self.delay = delay
        self.terminal = terminal
        self.dead_lettered = dead_lettered


class SettlementInternals:
    """What the engine keeps of a settlement. Not public: it may change without notice.

    ``ordinal``: the number of the first delivery above the floor of a commit.
    """

    __slots__ = ("ordinal",)

    ordinal: int


class Settlement(SettlementInternals):
    """What one settle step sends for one partition.

    To a source that settles each message by itself: ``messages``, by their tokens. To one that commits: ``floor``,
    the next position to read, and what is ``completed`` above it, both of one snapshot.
    """

    __slots__ = ("completed", "floor", "messages", "partition")

    def __init__(
        self,
        partition: Partition,
        messages: list[Message],
        floor: int | None = None,
        completed: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.partition = partition
        self.messages = messages
        self.floor = floor
        self.completed = completed
        self.ordinal = 0


class Room(NamedTuple):
    """How much more a source may deliver now; nothing of the partitions that are ``paused``."""

    messages: int
    bytes: int
    paused: frozenset[Partition] = frozenset()
