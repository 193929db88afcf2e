"""The outputs of running handlers. A buffer stores the outputs until the attempt of the handler has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from lanes.arguments import kind_of
from lanes.core.lane import RUNNING
from lanes.core.publishing import Produced
from lanes.core.types import ACK, LaneId, Message, Outcome, OutputHeaders, Partition, PartitionKey, key_bytes
from lanes.errors import LanesError, MessageError
from lanes.observe.otel import carrier
from lanes.outputs.publisher import Headers, Output

_Chain = tuple[str, bytes | None]
"""Target and key, whose outputs the broker receives in order."""

_OVERHEAD: Final = 500
"""Bytes of memory of an output besides its key, value and headers, about."""


class Outputs:
    """The outputs of one attempt.

    Args:
        message: The message whose handler makes the outputs.

    Attributes:
        message: See ``Args``.
        made: Number of outputs.
        size: Sum of the sizes of the outputs, in bytes.
        next: The outputs to send in the next turn of the loop.
        sending: Number of outputs that the publisher is sending.
        confirmed: Number of confirmed outputs that the metrics do not count yet.
        error: The error of a failed send; None = no send has failed. A permanent error replaces another error.
    """

    __slots__ = ("_chains", "_only", "confirmed", "error", "made", "message", "next", "sending", "size")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.made = 0
        self.size = 0
        self.next: list[Output] = []
        self.sending = 0
        self.confirmed = 0
        self.error: Exception | None = None
        # Most messages have one output, which needs no chain.
        self._only: Output | None = None
        self._chains: dict[_Chain, deque[Output]] | None = None

    def add(self, output: Output, size: int) -> None:
        """Append an output of a size in bytes."""
        self.made += 1
        self.size += size
        chains = self._chains
        if chains is None:
            if self._only is None:
                self._only = output
                return
            self._chains = chains = {(self._only.target, self._only.key): deque([self._only])}
            self._only = None
        chains.setdefault((output.target, output.key), deque()).append(output)

    def heads(self) -> list[Output]:
        """Return the first unconfirmed output of each target and key."""
        if self._only is not None:
            return [self._only]
        return [] if self._chains is None else [chain[0] for chain in self._chains.values()]

    def confirm(self, output: Output) -> Output | None:
        """Remove a confirmed head, and return the next output of the same target and key. ``None`` = no output."""
        if output is self._only:
            self._only = None
            return None
        assert self._chains is not None, "the outputs of the publisher are heads"
        chain = self._chains[output.target, output.key]
        chain.popleft()
        if chain:
            return chain[0]
        del self._chains[output.target, output.key]
        return None

    def __repr__(self) -> str:
        return f"<Outputs {self.made} of {self.message!r}>"


class OutputBuffer:
    """The outputs of the attempts that run now. Handlers in threads may call ``add`` concurrently.

    Args:
        most: Maximum number of outputs of one attempt.
        most_bytes: Maximum sum of the sizes of the outputs of one attempt, in bytes.
        traced: Whether the outputs carry the trace context of the handler.

    Attributes:
        attempts: The outputs by message. A message without outputs has no entry.
    """

    def __init__(self, most: int, most_bytes: int, *, traced: bool) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._traced = traced
        self._lock = threading.Lock()
        self.attempts: dict[Message, Outputs] = {}

    def add(
        self,
        message: Message,
        target: str,
        value: bytes | None,
        key: PartitionKey | None,
        headers: OutputHeaders,
    ) -> None:
        """Buffer an output of a running handler; see ``Message.publish_soon``."""
        if message.state != RUNNING:
            raise LanesError(
                f"{_place(message)}: the handler of this message does not run; publish in the handler, and await the "
                "tasks that it starts"
            )
        if not isinstance(target, str) or not target:
            raise TypeError(
                f"{_place(message)}: target is {kind_of(target) if target else 'empty'}; pass the name of a topic or "
                'subject, such as "invoices"'
            )
        if not target.isprintable():
            raise ValueError(f"{_place(message)}: target has a control character or half a character; correct the name")
        if value is not None and not isinstance(value, bytes):
            raise TypeError(
                f"{_place(message)}: value is {kind_of(value)}; pass bytes, such as json.dumps(…).encode(), or None "
                "for a record without a value"
            )
        pairs = _pairs(headers, message) if headers else ()
        named = key if key is None or type(key) is bytes else key_bytes(key)
        size = (0 if named is None else len(named)) + (0 if value is None else len(value))
        trace = [(name, text.encode()) for name, text in carrier().items()] if self._traced else ()
        if trace and pairs:
            # A handler may pass on the headers of its message, among them the trace context of the sender.
            replaced = {name.lower() for name, _ in trace}
            pairs = tuple(pair for pair in pairs if pair[0].lower() not in replaced)
        for name, text in pairs:
            size += len(name) + len(text)
        partition = message.partition
        with self._lock:
            outputs = self.attempts.get(message)
            made, before = (0, 0) if outputs is None else (outputs.made, outputs.size)
            if made >= self._most:
                raise MessageError(
                    f"{_place(message)}: the handler has published max_outputs={self._most} outputs already; publish "
                    "fewer outputs for a message, or raise Settings(max_outputs=…)"
                )
            output = Output(
                target=target,
                value=value,
                key=named,
                headers=pairs,
                trace=trace,
                number=made + 1,
                source=partition.id,
                incarnation=partition.incarnation,
                position=message.position,
                attempt=message.attempt,
                message_key=message.key,
                assignment=partition.assignment,
            )
            if before + size > self._most_bytes:
                raise MessageError(
                    f"{_place(message)}: the outputs of the handler would have {before + size} bytes, above "
                    f"max_output_bytes={self._most_bytes}; publish less for a message, or raise "
                    "Settings(max_output_bytes=…)"
                )
            if outputs is None:
                outputs = self.attempts[message] = Outputs(message)
            outputs.add(output, size)

    def taken(self, message: Message) -> Outcome:
        """Remove the outputs of a handler that has succeeded, and return the outcome of the message."""
        outputs = self.attempts.pop(message, None)
        return ACK if outputs is None else Produced(outputs, outputs.size + _OVERHEAD * outputs.made)

    def taken_of(self, batch: Sequence[Message], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Remove the outputs of a batch, and return the outcomes of its messages.

        A message after a message with outputs of the same lane waits for these outputs. Its outcome is therefore also
        ``Produced``, even without outputs.
        """
        found: list[Outcome] = []
        publishing: set[tuple[Partition, LaneId]] = set()
        for message, outcome in zip(batch, outcomes, strict=True):
            # Each message leaves the buffer, also a message whose outcome does not count.
            made, lane = self.taken(message), (message.partition, message.lane)
            if outcome is ACK and made is ACK and message.lane is not None and lane in publishing:
                made = Produced(Outputs(message), 0)
            if outcome is ACK and made is not ACK:
                publishing.add(lane)
            found.append(made if outcome is ACK else outcome)
        return found

    def drop(self, message: Message) -> None:
        """Drop the outputs of an attempt that has not succeeded. Idempotent."""
        self.attempts.pop(message, None)


def _place(message: Message) -> str:
    return f"publish at {message.partition.id} position {message.position}"


def _pairs(headers: OutputHeaders, message: Message) -> Headers:
    pairs: list[tuple[str, bytes]] = []
    for pair in headers.items() if isinstance(headers, Mapping) else headers:
        named = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not named:
            raise TypeError(
                f"{_place(message)}: headers has {kind_of(pair)}; pass a dict, or pairs, of names and bytes"
            )
        if not isinstance(pair[1], bytes | str):
            raise TypeError(
                f"{_place(message)}: the value of header {pair[0]!a} is {kind_of(pair[1])}; pass bytes or a str"
            )
        if not pair[0] or not pair[0].isprintable():
            raise ValueError(
                f"{_place(message)}: a header's name is empty, or has a control character or half a character; correct "
                "the name"
            )
        pairs.append((pair[0], pair[1].encode() if isinstance(pair[1], str) else pair[1]))
    return tuple(pairs)
