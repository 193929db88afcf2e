"""The contract of a publisher, which sends the outputs of handlers.

The consumer buffers the outputs of a message until its handler has succeeded. The consumer then passes the outputs to
its publisher. The consumer settles the message after the broker has confirmed every output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from lanes.core.types import PartitionId

Headers = Sequence[tuple[str, bytes]]
"""Headers as pairs of name and value, in order."""


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Output:
    """One output of a handler. Its origin and its number identify the output.

    Attributes:
        target: Topic or subject of the output.
        value: Payload. ``None`` = a record without a value, such as a tombstone.
        key: Partition key. ``None`` = no key.
        headers: Headers of the handler.
        trace: Trace context, as further headers. The context differs between attempts, so ``output_id`` does not
            include it.
        number: Number of the output in its attempt, from 1.
        source: Partition of the message whose handler made the output.
        incarnation: See ``Partition``.
        position: Position of the message.
        attempt: Number of the attempt.
        message_key: Key of the message. ``None`` = no key.
        assignment: Number of the assignment of the message's partition; see ``Partition``.
    """

    target: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    trace: Headers
    number: int
    source: PartitionId
    incarnation: str
    position: int
    attempt: int
    message_key: bytes | None
    assignment: int = 0

    @property
    def size(self) -> int:
        """Number of bytes of the key, value and headers."""
        headers = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + headers

    def __repr__(self) -> str:
        # A repr ends up in logs, so it shows neither key nor payload.
        return f"<Output {self.number} of {self.source} position {self.position} to {self.target!r}>"


Report = Callable[[Output, Exception | None], None]
"""A function that takes an output and the error of its send. ``None`` = the broker has confirmed the output."""


class Publisher(Protocol):
    """The sender of outputs for one consumer."""

    async def open(self) -> None:
        """Connect to the broker.

        Raises:
            ConfigError: A setting contradicts the broker.
            SourceError: The client cannot reach the broker.
        """

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        """Send outputs, and wait until the broker has confirmed or refused each of them.

        Calls may overlap. The consumer passes an output only after the broker has confirmed the earlier output of the
        same message, target and key. All outputs of earlier messages of the lane are also confirmed. An output that is
        sent again has the same origin, number and content. A cancelled call may have sent any of the outputs.

        Args:
            outputs: The outputs, one or more. The publisher may send them in any order.
            report: Called once for each output, before the end of this call. Any thread and any callback may call this
                function, which does not block. The consumer sends the output again after a ``SourceError`` with
                ``retryable=True``, and after any exception that is not an error of ``lanes``. Any other error is
                permanent, and the consumer applies the poison policy.

        Raises:
            Exception: Each output without a report has failed with this error.
        """

    async def aclose(self) -> None:
        """Close everything that ``open`` opened. Idempotent."""


class Transacted(NamedTuple):
    """The transactions of a source that commits positions together with outputs.

    Attributes:
        publisher: Publisher that keeps the outputs until their transaction.
        every: Seconds from the end of a handler to the commit of its message, above 0.
        messages: Number of finished messages of a partition that make a commit due at once, 1 or more.
    """

    publisher: Publisher
    every: float
    messages: int


@runtime_checkable
class Transacting(Protocol):
    """An optional part of a source that can commit a position and the outputs of its messages in one transaction."""

    def transacted(self, publisher: Publisher | None) -> Transacted | None:
        """Return the transactions of the source. The consumer calls this method once, before it opens the source.

        With transactions, the consumer opens and uses the returned publisher, and neither opens nor closes the
        publisher of the user.

        Args:
            publisher: Publisher of the user, whose settings the transactions use; None = the user has passed none.

        Returns:
            The transactions; None = the source makes none, and the consumer uses the publisher of the user.

        Raises:
            ConfigError: The source cannot send the outputs of this publisher in its transactions.
        """


def output_id(publisher: str, output: Output) -> str:
    """Return 32 hex digits that identify one output of one message, even if the handler has run again.

    Handlers should make the same outputs at each attempt. The content is part of the identity. A broker that
    deduplicates by the id therefore stores an output whose content differs from an earlier attempt.

    Args:
        publisher: Name of the publisher, so that outputs of two services to one target have different ids.
        output: The output.

    Returns:
        The digits.
    """
    content = blake3()
    for part in (publisher, output.source.source, output.incarnation, output.target):
        _add(content, part.encode())
    content.update(f"{output.source.number}:{output.position}:{output.number};".encode())
    for optional in (output.key, output.value):
        content.update(b"-" if optional is None else b"+")
        _add(content, optional or b"")
    for name, value in output.headers:
        _add(content, name.encode())
        _add(content, value)
    return content.hexdigest(length=16)


def _add(content: blake3, part: bytes) -> None:
    # Without the lengths, ("a", "bc") and ("ab", "c") would have the same id.
    content.update(len(part).to_bytes(8, "little"))
    content.update(part)
