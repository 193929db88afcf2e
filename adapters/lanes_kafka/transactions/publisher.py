"""The publisher of a source with transactions, which keeps outputs for the commit of their positions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import anyio

from lanes.core.types import Partition, Settlement
from lanes.errors import ConfigError, SourceError
from lanes.outputs.publisher import Output, Report
from lanes.source import SettlementError
from lanes_kafka.client.commits import can_carry
from lanes_kafka.client.group_snapshot import GroupSnapshot
from lanes_kafka.topic_names import is_topic
from lanes_kafka.transactions.coverage import Coverage
from lanes_kafka.transactions.performer import TransactionThread
from lanes_kafka.transactions.requests import Counts, Request
from lanes_kafka.transactions.waiting import WaitingOutputs

BUFFER_BYTES: Final = 64 * 1024 * 1024
"""Size of the outputs that wait for their transaction, in bytes, from which on handlers wait."""

_RECORD_OVERHEAD: Final = 512
"""Bytes of a record besides its key, value and headers, at most."""

_MESSAGE_MAX: Final = "message.max.bytes"
_DEFAULT_MAX: Final = 1_000_000

Settle = Callable[[Sequence[Settlement]], Awaitable[None]]
"""A function that sends settlements to the client's thread, and waits for the answer."""


class TransactionalPublisher:
    """Keeps the outputs of finished messages, and commits them together with positions.

    Args:
        settings: Configuration of the producer.
        admin: Configuration of the source's admin client.
        group: Id of the group.
        name: Name of the source, for errors and log lines.
        snapshot: Function that returns the newest snapshot of the source's group.
        prepare: Function that checks, in the client's thread, the topic ids and the ownership of settlements.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        admin: Mapping[str, Any],
        group: str,
        name: str,
        snapshot: Callable[[], GroupSnapshot],
        prepare: Settle,
    ) -> None:
        self._name = name
        self._prepare = prepare
        self._limit = 0
        self._most = int(settings.get(_MESSAGE_MAX, _DEFAULT_MAX))
        self._waiting = WaitingOutputs(BUFFER_BYTES)
        self._moved = anyio.Event()
        # The newest request of each partition, until its outcome is known.
        self._pending: dict[Partition, tuple[Request, anyio.Event]] = {}
        # The newest position of each owned partition that the broker has confirmed.
        self._stored: dict[Partition, Coverage] = {}
        self._thread = TransactionThread(settings, admin, group, name, snapshot, self._ended)

    def __repr__(self) -> str:
        return f"<TransactionalPublisher {self._thread.transactional_id!r}>"

    @property
    def counts(self) -> Counts:
        """The transactions of this process."""
        return self._thread.counts

    # --- lanes.outputs.publisher.Publisher

    async def open(self) -> None:
        """Start the producer, which ends the transaction of a former process with the same id.

        Raises:
            ConfigError: The broker or the client refuses transactions, or the publisher names another cluster.
            SourceError: No broker answers.
        """
        try:
            await self._thread.open()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._thread.aclose()
            raise

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        """Keep outputs for the transaction with the position of their message.

        An output is reported when the object has taken it. The call waits while the object has no room.

        Args:
            outputs: The outputs.
            report: Called once for each output.
        """
        left: Sequence[Output] = outputs
        while left:
            waiting: list[Output] = []
            for output in left:
                refusal = self._refusal(output)
                if refusal is not None:
                    if not refusal.retryable:
                        self._waiting.refuse(output)
                    report(output, refusal)
                elif self._waiting.has_room(output):
                    self._waiting.add(output)
                    report(output, None)
                else:
                    waiting.append(output)
            left = waiting
            if left:
                await self._moved.wait()

    def _refusal(self, output: Output) -> SourceError | None:
        if not self._thread.is_open:
            return SourceError(f"{self._name}: the transactions have ended", retryable=True)
        if not is_topic(output.target):
            return SourceError(
                f"output to {output.target!r}: the target is no topic; use 1 to 249 letters, digits, '.', '_' and '-'"
            )
        size = output.size + sum(len(name) + len(value) for name, value in output.trace) + _RECORD_OVERHEAD
        if size > self._most:
            return SourceError(
                f"output to {output.target!r}: its key, value and headers have {output.size} bytes, and "
                f"{_MESSAGE_MAX} of the publisher is {self._most}; publish less, or raise {_MESSAGE_MAX} of the "
                "publisher and max.message.bytes of the topic"
            )
        if not self._waiting.accepts(output):
            return SourceError(f"{self._name}: the partition of the message was given up", retryable=True)
        if self._waiting.has_refused(output):
            return SourceError(
                f"output to {output.target!r}: another output of the same attempt was refused, so the attempt "
                "publishes nothing"
            )
        return None

    async def aclose(self) -> None:
        """Abort the present transaction unless its commit was sent, and end the producer. Idempotent."""
        await self._thread.aclose()
        self._move()

    # --- the source

    def opened(self, limit: int) -> None:
        """Set the limit of the metadata of a commit, when the source is open.

        Args:
            limit: Maximum number of UTF-16 units.

        Raises:
            ConfigError: The limit is too small for a single message.
        """
        if not can_carry(limit):
            raise ConfigError(
                f"{self._name}: transactions=… needs metadata of commits, and the broker's offset.metadata.max.bytes "
                "is too small for a single finished message; raise it to 4096"
            )
        self._limit = limit

    def assigned(self, partition: Partition) -> None:
        """Accept the outputs of a new assignment."""
        assert partition.floor is not None, "only a source that commits has transactions"
        self._waiting.assign(partition)
        self._stored[partition] = Coverage(partition.floor, tuple(partition.completed), "")

    def gone(self, partition: Partition) -> None:
        """Drop the outputs of a lost or released partition. No transaction commits them from now on. Idempotent.

        The broker decides about a transaction whose commit was sent before.
        """
        if partition in self._pending:
            self._pending[partition][0].answer.given_up = True
        self._stored.pop(partition, None)
        if self._waiting.owns(partition):
            self._waiting.forget(partition.id)
            self._move()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit positions with the outputs that they cover; see ``lanes.source.Source.settle``.

        A cancelled call aborts the transaction, unless its commit was sent. Its outcome then decides about the outputs.

        Args:
            settlements: Positions to commit.

        Raises:
            SettlementError: Some of the positions are not committed.
            SourceError: No position is committed.
        """
        for each in settlements:
            if each.partition in self._pending:
                # A cancelled call has left a transaction, and its outcome decides what this call sends.
                await self._pending[each.partition][1].wait()
        if self._thread.too_large:
            self._thread.too_large = False
            self.opened(self._limit // 2)
        requests = []
        for each in settlements:
            coverage = self._coverage(each)
            outputs = self._waiting.covered(each.partition, coverage)
            requests.append(Request(each.partition, coverage, outputs, self._thread.answer()))
        await self._prepare([_settlement(each.partition, each.coverage) for each in requests])
        if not all(self._waiting.owns(each.partition) for each in requests):
            raise self._given_up()
        for request in requests:
            self._pending[request.partition] = request, anyio.Event()
            self._thread.submit(request)
        await self._outcome(requests)

    def _coverage(self, settlement: Settlement) -> Coverage:
        assert settlement.floor is not None, "a source that commits gets positions"
        if settlement.partition not in self._stored:
            raise self._given_up()
        stored = self._stored[settlement.partition]
        coverage = stored.extended(settlement.floor, settlement.completed, self._limit)
        if coverage is None:
            raise SourceError(
                f"{self._name}: {settlement.partition.id}: the broker's offset.metadata.max.bytes is too small for the "
                "messages that a transaction has committed above the position; set it back to its former value, and "
                "start again"
            )
        return coverage

    def _given_up(self) -> SourceError:
        return SourceError(f"{self._name}: not committed: a partition was given up meanwhile", retryable=True)

    async def _outcome(self, requests: Sequence[Request]) -> None:
        failed: dict[Partition, SourceError] = {}
        try:
            for request in requests:
                try:
                    await request.answer.wait()
                except SourceError as error:
                    failed[request.partition] = error
        except BaseException:
            for request in requests:
                request.answer.given_up = True
            raise
        permanent = next((error for error in failed.values() if not error.retryable), None)
        if permanent is not None:
            raise permanent
        if failed:
            raise SettlementError(str(next(iter(failed.values()))), failed.keys())

    def _ended(self, request: Request) -> None:
        """Process the outcome of a request, on the event loop."""
        self._waiting.remove(request.partition, request.arrived or ())
        if request.committed and request.partition in self._stored:
            self._stored[request.partition] = request.coverage
            self._waiting.settled(request.partition, request.coverage)
        _, ended = self._pending.pop(request.partition)
        ended.set()
        self._move()

    def _move(self) -> None:
        moved, self._moved = self._moved, anyio.Event()
        moved.set()


def _settlement(partition: Partition, coverage: Coverage) -> Settlement:
    return Settlement(partition, [], coverage.floor, coverage.runs)
