"""The values of the core: messages, partitions, outcomes and settlements.

This file is longer than most, because it contains all values that the modules of the core share. The classes have slots
and few methods, because a process has one ``Message`` for each message in flight. The hot path compares states as ints
and outcomes by identity.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

from lanes.errors import ConfigError, MessageError, SourceError

__all__ = [
    "ABANDON",
    "ACK",
    "NEVER",
    "RETURN",
    "BudgetId",
    "CommitProgress",
    "Failure",
    "LaneId",
    "Ledger",
    "Message",
    "Outcome",
    "OutputHeaders",
    "Part",
    "Partition",
    "PartitionId",
    "PartitionKey",
    "PieceId",
    "Reader",
    "Room",
    "Runs",
    "Settlement",
    "SettlementError",
    "key_bytes",
]

PartitionKey = bytes | str | int
"""A key: bytes, a ``str`` (its UTF-8) or an unsigned 128-bit ``int`` (16 bytes, little-endian)."""

OutputHeaders: TypeAlias = Mapping[str, bytes | str] | Sequence[tuple[str, bytes | str]]
"""Headers of an output, by name or as pairs of name and value. A ``str`` value stands for its UTF-8."""

LaneId: TypeAlias = bytes | int | None
"""The lane of a message in its partition: the key, or the number of a lane for several keys or for messages without a
key.

``None`` = the message needs no order.
"""

Runs: TypeAlias = list[tuple[int, int]]
"""Positions as sorted, disjoint, half-open runs: ``[(3, 5), (9, 10)]`` is 3, 4 and 9."""

WHOLE_PARTITION: Final = -2
"""The lane of messages that run in the order of their partition. No other lane has this number."""

KEY_INT_BYTES: Final = 16

NEVER: Final = float("inf")
"""A time that the clock never reaches, such as the deadline of a partition without a lease. As a duration, the value
means no limit.
"""


def key_bytes(key: PartitionKey) -> bytes:
    """Convert a key to the bytes that identify it. No error text contains the whole key, because keys are private.

    Args:
        key: The key.

    Returns:
        The bytes.

    Raises:
        ValueError: An ``int`` is outside 0 … 2¹²⁸−1, or a ``str`` cannot be encoded as UTF-8.
        TypeError: The key has another type.
    """
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, int) and not isinstance(key, bool):
        if 0 <= key < 1 << 8 * KEY_INT_BYTES:
            return key.to_bytes(KEY_INT_BYTES, "little")
        found = "is below 0" if key < 0 else f"has {key.bit_length()} bits"
        raise ValueError(f"an int key must be in 0 … 2**128-1, and this one {found}; pass its bytes instead")
    raise TypeError(f"a key must be bytes, str or int, not {type(key).__name__}; return None for 'no key'")


class PartitionId(NamedTuple):
    """The name of a partition.

    Attributes:
        source: Topic or stream.
        number: Number of the partition in the topic or stream.
    """

    source: str
    number: int

    @property
    def whole(self) -> PartitionId:
        """The name of the whole partition, also for a piece."""
        return self

    @property
    def piece(self) -> int:
        """Number of the piece; 0 = the whole partition."""
        return 0

    def __str__(self) -> str:
        return f"{self.source}/{self.number}"


class PieceId(PartitionId):
    """The name of a piece of a partition: the messages of some keys, which one process owns.

    A store of positions, attempts or dead letters names the partition by ``source`` and ``number``, because a key may
    move from one piece to another. A piece equals neither another piece nor the whole partition.

    Args:
        source: Topic or stream.
        number: Number of the partition in the topic or stream.
        piece: Number of the piece, 1 or more, unique in the source.
    """

    _piece: int

    def __new__(cls, source: str, number: int, piece: int) -> PieceId:
        made = super().__new__(cls, source, number)
        made._piece = piece
        return made

    @property
    def whole(self) -> PartitionId:
        """The name of the whole partition."""
        return PartitionId(self.source, self.number)

    @property
    def piece(self) -> int:
        """Number of the piece."""
        return self._piece

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PieceId) and tuple(self) == tuple(other) and self._piece == other._piece

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self._piece))

    def __reduce__(self) -> tuple[type[PieceId], tuple[str, int, int]]:
        return PieceId, (self.source, self.number, self._piece)

    def __repr__(self) -> str:
        return f"PieceId(source={self.source!r}, number={self.number}, piece={self._piece})"

    def __str__(self) -> str:
        return f"{self.source}/{self.number}#{self._piece}"


class Part(Protocol):
    """A function that returns whether a message belongs to a part of a partition that the source releases."""

    def __call__(self, message: Message) -> bool:
        """Return whether a message of the partition belongs to the part. The call does not block.

        Args:
            message: The message.

        Returns:
            Whether the next owner of the part handles the message.
        """


BudgetId: TypeAlias = PartitionId | str
"""The name of a budget of calls and messages: a partition, or a physical queue with all its partitions."""


class Reader(Protocol):
    """The reader of the raw messages of one source, called when a handler, a span or a dead letter needs content.

    Every method is a plain function of the raw message. No method blocks or changes the message.
    """

    def value(self, raw: object) -> bytes:
        """Read the payload.

        Args:
            raw: The raw message.

        Returns:
            The payload; empty bytes when there is none.
        """

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        """Read the headers.

        Args:
            raw: The raw message.

        Returns:
            Pairs in the order in which the broker sent them, if the client keeps that order.
        """

    def subject(self, raw: object) -> str:
        """Read the name under which the producer published the message.

        Args:
            raw: The raw message.

        Returns:
            The topic or the subject.
        """


class Ledger(Protocol):
    """The record of the messages in flight of an assignment.

    Each value of ``SourceTraits.settles`` has its own class of ledger.

    Attributes:
        highest: Highest admitted position.
    """

    highest: int

    def settle(self, messages: Iterable[Message]) -> tuple[int, int]:
        """Mark messages as settled, and return the number and bytes of the messages that changed."""

    def drop(self, message: Message) -> None:
        """Forget an unfinished message, which the broker redelivers later."""

    def in_flight(self) -> list[Message]:
        """Return the admitted, unsettled messages in order of delivery."""

    def unfinished(self) -> list[Message]:
        """Return the unfinished messages in flight, in order of delivery."""

    def oldest(self) -> Message | None:
        """Return the unfinished message with the earliest delivery; None = no message is unfinished."""

    def holes(self) -> int:
        """Return the number of unsettled deliveries."""

    def floor(self) -> int:
        """Return the next position to read. Every delivery below this position is finished."""


class CommitProgress(Protocol):
    """The state of the commits of one assignment; see ``lanes.core.commits.PartitionCommits``."""

    changes: int
    confirmed: int
    confirmed_ordinal: int
    sending: Settlement | None
    over: bool
    finished: int

    @property
    def pending(self) -> bool:
        """Whether the next commit may begin: changes wait, no commit is in transit, and ``over`` is False."""

    def unknown(self, again_at: float) -> None:
        """Repeat the sent commit, whose result is unknown, at ``again_at`` or later."""


@dataclass(slots=True, eq=False, repr=False)
class Parting:
    """A part that an assignment gives up, while the assignment keeps its other messages.

    Attributes:
        part: The part.
        running: Messages of the part whose handlers run.
        given_up: Messages of the part that the engine has abandoned. The floor stays below these messages, so that the
            commits of the assignment are also correct for the part.
    """

    part: Part
    running: set[Message] = field(default_factory=set)
    given_up: list[Message] = field(default_factory=list)


class Buffering(Protocol):
    """The buffer for the outputs of handlers; see ``lanes.runtime.publishing.OutputBuffer``."""

    def add(
        self, message: Message, target: str, value: bytes | None, key: PartitionKey | None, headers: OutputHeaders
    ) -> None:
        """Buffer an output of the handler of a message."""


class _Buffered:
    """An awaitable that is done."""

    __slots__ = ()

    def __await__(self) -> Generator[None]:
        return iter(())  # type: ignore[return-value]


_BUFFERED: Final = _Buffered()


@dataclass(slots=True, eq=False, repr=False)
class PartitionInternals:
    """Attributes of an assignment for the engine and the runtime. The private attributes may change.

    Attributes:
        ledger: The messages in flight; unset before the assignment.
        commits: The commits of the assignment. ``None`` = the source settles each message individually.
        tails: The last message of each lane.
        steady: Whether the assignment is live and does not drain.
        draining: Whether the assignment drains, which stops further starts of messages.
        unended: While the assignment drains, the number of handlers that must end or still have to start.
        dirty: Whether the assignment has messages to settle.
        finished: The finished messages to settle.
        resettle: Redeliveries of settled messages, to settle again.
        recalled: The first attempt of some messages by position, from a store of attempts. The runtime sets the mapping
            before the messages enter the engine. Each value becomes the ``Message.attempt`` of its message.
        budget: The budget of the assignment, if the policy has bounds per partition.
        aside: Number of delivered messages that wait while the runtime loads attempts of the partition.
        partings: The parts that the assignment gives up, each until its last handler has ended.
        outputs: The buffer for the outputs of handlers, which the runtime sets. ``None`` = the consumer has no
            publisher.
    """

    ledger: Ledger = field(init=False)
    commits: CommitProgress | None = None
    tails: dict[bytes | int, Message] = field(default_factory=dict)
    steady: bool = False
    draining: bool = False
    unended: int = 0
    dirty: bool = False
    finished: list[Message] = field(default_factory=list)
    resettle: list[Message] = field(default_factory=list)
    recalled: Mapping[int, int] = field(default_factory=dict)
    budget: BudgetId = ""
    aside: int = 0
    partings: list[Parting] = field(default_factory=list)
    outputs: Buffering | None = None


class Partition(PartitionInternals):
    """One assignment of a partition to this process.

    A source makes a new object for every assignment and passes the object in ``Assigned``. The engine numbers the
    assignment. The engine applies a result only while ``message.partition.live`` is True. The source increases
    ``deadline`` at each renewal of the lease, but never after the deadline has passed. After the deadline, both the
    source and the runtime treat the assignment as lost.

    Args:
        partition_id: Name of the partition.
        reader: Reader of the raw messages of the partition.
        incarnation: Name that distinguishes a recreated topic or stream from the former one; "" = unknown. The ids of
            dead letters depend on this name.
        floor: The first position that the source reads. ``None`` = the source settles each message individually.
        completed: The positions above the floor that the former owner completed, as runs.
        deadline: Time up to which the lease certainly holds, in seconds of ``lanes.clock.monotonic``. ``NEVER`` = no
            lease.
        fencing_token: Number of this ownership across processes, 0 … 2⁶³−1, which increases with each owner of the
            partition. ``None`` = the source has no such number.

    Attributes:
        id: Name of the partition.
        reader: Reader of the raw messages of the partition.
        incarnation: See ``Args``.
        floor: See ``Args``.
        completed: See ``Args``.
        deadline: Time up to which the lease certainly holds.
        fencing_token: See ``Args``.
        assignment: Number of the assignment in its consumer, over all partitions: 1, 2, 3 …; 0 before the assignment.
            Rows of a history name an assignment by this number.
        live: Whether the engine applies results of the assignment.
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
        super().__init__()
        self.id = partition_id
        self.reader = reader
        self.incarnation = incarnation
        self.floor = floor
        self.completed = completed
        self.deadline = deadline
        self.fencing_token = fencing_token
        self.assignment: int = 0
        self.live: bool = False
        self.budget = partition_id

    @property
    def epoch(self) -> int:
        """The fencing token; without a fencing token, the number of the assignment.

        Handlers, spans, dead letters, events and the status show the epoch.
        """
        return self.assignment if self.fencing_token is None else self.fencing_token

    def __repr__(self) -> str:
        state = "draining" if self.draining else "live" if self.live else "fenced"
        handlers = f", {self.unended} handlers to end" if self.draining else ""
        return f"<Partition {self.id} assignment {self.assignment} {state}{handlers}>"


class MessageInternals:
    """Attributes of a message for the engine. The private attributes may change.

    Attributes:
        lane: Lane of the message. The initial value is the key, and a source does not change it.
        next: Successor of the message in its lane; None = no successor.
        state: A state of ``lanes.core.lane``.
        ordinal: Number of the message's delivery, if the source commits.
        row: Text in each row of a history about the message; empty without a history.
    """

    __slots__ = ("lane", "next", "ordinal", "row", "state")

    lane: LaneId
    next: Message | None
    ordinal: int
    row: str
    state: int


class Message(MessageInternals):
    """One message, as the source delivers it and as the handler receives it.

    Args:
        partition: The assignment that delivered the message.
        position: Offset or stream sequence.
        key: Bytes of the partition key. ``None`` = no key.
        size: Size in bytes for the bound ``max_in_flight_bytes``.
        raw: The message of the client, for ``Partition.reader``.
        token: Value by which the source settles this delivery. A redelivery replaces the token.

    Attributes:
        partition: The assignment that delivered the message.
        position: Offset or stream sequence.
        key: Bytes of the partition key. ``None`` = no key.
        size: Size in bytes for the bound ``max_in_flight_bytes``.
        raw: The message of the client.
        token: Value by which the source settles this delivery.
        broken: Error of a message that the source cannot read, or that a former owner gave up; None = no such error.
            The runtime calls no handler for a broken message, and the error is the outcome.
        attempt: Number of the attempt. The number starts at 1 in each assignment, or continues with a store of
            attempts.
        data: Result of the consumer's ``decode``; unset without ``decode``.
        received: Time of the delivery, in seconds of the engine's clock.
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
        self.row = ""
        self.data: object
        self.received: float = 0.0
        self.next = None

    @property
    def value(self) -> bytes:
        """The payload, read from the raw message at each access."""
        return self.partition.reader.value(self.raw)

    @property
    def headers(self) -> Sequence[tuple[str, bytes]]:
        """The headers as pairs, in the order in which the broker sent them, if the client keeps that order."""
        return self.partition.reader.headers(self.raw)

    @property
    def subject(self) -> str:
        """The topic (Kafka) or the subject (JetStream) of the message."""
        return self.partition.reader.subject(self.raw)

    @property
    def epoch(self) -> int:
        """A number that increases with each assignment, as in ``partition.epoch``.

        In a cohort the epoch increases across processes, and handlers may use the epoch as a fencing token. Otherwise
        the epoch increases only within this process.
        """
        return self.partition.epoch

    def publish(
        self, target: str, value: bytes | None, *, key: PartitionKey | None = None, headers: OutputHeaders = ()
    ) -> Awaitable[None]:
        """Buffer an output, for async handlers; see ``publish_soon``.

        The call does not block, and its ``await`` does not wait.

        Args:
            target: Name of a topic or subject.
            value: Payload. ``None`` = a record without a value.
            key: Partition key of the output. ``None`` = no key.
            headers: Headers of the output.

        Returns:
            An awaitable that is already done. The output is in the buffer even if the handler does not await the
            result.
        """
        if (outputs := self.partition.outputs) is None:
            raise self._no_publisher()
        outputs.add(self, target, value, key, headers)
        return _BUFFERED

    def publish_soon(
        self, target: str, value: bytes | None, *, key: PartitionKey | None = None, headers: OutputHeaders = ()
    ) -> None:
        """Buffer an output of this message, which the consumer's publisher sends after the handler has succeeded.

        A failed attempt publishes nothing. After the broker has confirmed all outputs of the message, the consumer
        settles the message and starts the next message of the key. The call does not block. Any thread of the handler
        may call this method.

        Args:
            target: Name of a topic or subject.
            value: Payload. ``None`` = a record without a value.
            key: Partition key of the output. ``None`` = no key.
            headers: Headers of the output.

        Raises:
            ConfigError: The consumer has no publisher.
            LanesError: The handler of this message does not run.
            MessageError: The outputs exceed ``Settings.max_outputs`` or ``max_output_bytes``.
            TypeError: An argument has another type.
            ValueError: ``target`` or the name of a header is not printable text.
        """
        if (outputs := self.partition.outputs) is None:
            raise self._no_publisher()
        outputs.add(self, target, value, key, headers)

    def _no_publisher(self) -> ConfigError:
        return ConfigError(
            f"publish at {self.partition.id} position {self.position}: the consumer has no publisher; pass "
            "publisher=… to the consumer"
        )

    def __repr__(self) -> str:
        # A repr ends up in logs, so it shows neither key nor payload.
        return f"<Message {self.partition.id} position {self.position} attempt {self.attempt}>"


class Outcome:
    """The outcome of a handler: ``ACK``, ``ABANDON``, ``RETURN`` or a ``Failure``."""

    __slots__ = ()


ACK: Final = Outcome()
"""The handler succeeded."""

ABANDON: Final = Outcome()
"""The handler was interrupted. The message is neither finished nor failed, and the broker redelivers it."""


RETURN: Final = Outcome()
"""The message returns to the head of its lane, because the lease had expired or other messages interrupted its batch.

The message counts as not started and keeps its ``attempt``. A lower position of its lane that arrives late runs first.
"""


@dataclass(slots=True, eq=False, repr=False)
class Failure(Outcome):
    """A failed attempt.

    Attributes:
        error: The exception.
        chance: Random number for the jitter, in [0, 1). The caller generates this number, because the core generates no
            random numbers.
        delay: Seconds until the next attempt. ``None`` = the backoff of the policy.
        terminal: Whether the message has no further attempt.
        dead_lettered: Whether an earlier owner wrote the dead letter of the message, if the policy writes dead letters.
    """

    error: BaseException
    chance: float = 0.0
    delay: float | None = None
    terminal: bool = False
    dead_lettered: bool = False


class SettlementInternals:
    """Attributes of a settlement for the engine. The private attributes may change.

    Attributes:
        ordinal: Number of the first delivery above the floor of a commit.
    """

    __slots__ = ("ordinal",)

    ordinal: int


class Settlement(SettlementInternals):
    """The acknowledgements, or the commit, of one partition in one call of ``Source.settle``.

    Args:
        partition: The assignment.
        messages: Messages to acknowledge by their tokens, for a source that settles each message individually.
        floor: The next position to read, for a source that commits.
        completed: The completed positions above the floor, as runs of the same snapshot.

    Attributes:
        partition: The assignment.
        messages: Messages to acknowledge by their tokens.
        floor: The next position to read. ``None`` = the source settles each message individually.
        completed: The completed positions above the floor.
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
    """The bounds of the next delivery of a source.

    Attributes:
        messages: Maximum number of messages.
        bytes: Maximum sum of the sizes of the messages, in bytes.
        paused: Partitions that deliver no message.
        full_queues: Physical queues whose partitions deliver no message, including partitions that the broker assigns
            during the delivery. ``paused`` contains the partitions of these queues that the broker assigned earlier.
    """

    messages: int
    bytes: int
    paused: frozenset[Partition] = frozenset()
    full_queues: frozenset[str] = frozenset()

    def closed_to(self, partition: Partition) -> bool:
        """Return whether a partition delivers no message.

        Args:
            partition: An assignment, which the source may not have announced yet.

        Returns:
            Whether the partition is in ``paused``, or its source is in ``full_queues``.
        """
        return partition in self.paused or partition.id.source in self.full_queues


class SettlementError(SourceError):
    """Some settlements of a ``Source.settle`` call have failed, and the source has settled the others.

    The runtime passes the failed settlements again.

    Args:
        text: The reason.
        partitions: The partitions whose settlements have failed.

    Attributes:
        partitions: See ``Args``.
    """

    def __init__(self, text: str, partitions: Collection[Partition]) -> None:
        super().__init__(text, retryable=True)
        self.partitions = partitions
