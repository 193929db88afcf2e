"""The reference log: transactions append messages, and a sequencer gives positions to visible messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class StoredRow(NamedTuple):
    """A message of the log.

    Attributes:
        key: Key; None = no key.
        subject: Subject.
        value: Payload.
        time: Time of the message, in seconds since the epoch.
    """

    key: bytes | None
    subject: str
    value: bytes
    time: float


@dataclass(eq=False)
class Batch:
    """The messages of one partition in one transaction.

    Attributes:
        partition: Number of the partition.
        rows: The messages.
    """

    partition: int
    rows: tuple[StoredRow, ...]


@dataclass(eq=False)
class Transaction:
    """A transaction that appends messages. A transaction is *running* until ``ReferenceLog.commit`` or ``roll_back``.

    Attributes:
        batches: The appended batches.
        tickets: The tickets of the batches; empty before the transaction is at its COMMIT.
    """

    batches: list[Batch] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)


class _Hole(NamedTuple):
    """A ticket that was not visible, and the transactions that ran when the sequencer noticed the ticket."""

    ticket: int
    running: frozenset[Transaction]


class ReferenceLog:
    """A log whose positions follow the order of the tickets that transactions take at their COMMIT.

    A COMMIT has two parts. ``at_commit`` takes the tickets, and ``commit`` makes the messages visible. Other
    transactions may take tickets, and the sequencer may run, between the two parts.

    Args:
        partitions: Number of partitions.

    Attributes:
        running: The transactions that have not ended.
        on_position: Function that the log calls with the partition and the first position of each batch.
    """

    def __init__(self, partitions: int) -> None:
        self.running: set[Transaction] = set()
        self.on_position: Callable[[int, int], None] = lambda partition, position: None
        self._rows: list[dict[int, StoredRow]] = [{} for _ in range(partitions)]
        self._ends = [0] * partitions
        self._tickets = 0
        # Ticket -> batch, of the committed batches without a position.
        self._pending: dict[int, Batch] = {}
        self._highest = 0
        self._holes: list[_Hole] = []

    # --- appenders

    def begin(self) -> Transaction:
        """Begin a transaction."""
        transaction = Transaction()
        self.running.add(transaction)
        return transaction

    def at_commit(self, transaction: Transaction) -> None:
        """Take a ticket for each batch of a transaction. ``commit`` makes the batches visible."""
        for _ in transaction.batches:
            self._tickets += 1
            transaction.tickets.append(self._tickets)

    def commit(self, transaction: Transaction) -> None:
        """Make the messages of a transaction visible, after ``at_commit``."""
        self.running.remove(transaction)
        self._pending.update(zip(transaction.tickets, transaction.batches, strict=True))

    def roll_back(self, transaction: Transaction) -> None:
        """End a transaction and discard its messages. The transaction's tickets stay unused."""
        self.running.remove(transaction)

    def append(self, partition: int, rows: Iterable[StoredRow]) -> None:
        """Append messages in a separate transaction, which commits at once."""
        transaction = self.begin()
        transaction.batches.append(Batch(partition, tuple(rows)))
        self.at_commit(transaction)
        self.commit(transaction)

    # --- the sequencer

    def sequence(self) -> int:
        """Give the next positions to the visible batches, in the order of their tickets. Return the number of batches.

        A hole is an invisible ticket below the highest visible ticket. A later call finds the batch of the hole, and
        gives the batch the next position. The log forgets a hole when all transactions that ran at its discovery have
        ended, because the transaction of the hole was one of them.
        """
        holes = {hole.ticket for hole in self._holes}
        found = sorted(ticket for ticket in self._pending if ticket > self._highest or ticket in holes)
        before, self._highest = self._highest, max([self._highest, *found])
        running = frozenset(self.running)
        self._holes = [hole for hole in self._holes if hole.ticket not in found and hole.running & running]
        self._holes += [
            _Hole(ticket, running) for ticket in range(before + 1, self._highest + 1) if ticket not in found
        ]
        for ticket in found:
            batch = self._pending.pop(ticket)
            position = self._ends[batch.partition]
            for index, row in enumerate(batch.rows):
                self._rows[batch.partition][position + index] = row
            self._ends[batch.partition] += len(batch.rows)
            self.on_position(batch.partition, position)
        return len(found)

    # --- readers

    @property
    def ends(self) -> list[int]:
        """The next position of each partition."""
        return list(self._ends)

    @property
    def firsts(self) -> list[int]:
        """The lowest stored position of each partition; the next position for a partition without messages."""
        return [min(rows, default=end) for rows, end in zip(self._rows, self._ends, strict=True)]

    @property
    def waiting(self) -> list[Batch]:
        """The batches that are visible and have no position."""
        return list(self._pending.values())

    def read(self, partition: int, start: int, most: int) -> list[tuple[int, StoredRow]]:
        """Return at most ``most`` messages at or above a position, with their positions."""
        rows = self._rows[partition]
        return [(position, rows[position]) for position in range(start, self._ends[partition]) if position in rows][
            :most
        ]

    def rows(self, partition: int) -> Mapping[int, StoredRow]:
        """Return the messages of a partition by their positions."""
        return self._rows[partition]

    def since(self, time: float) -> dict[int, int]:
        """Return the first position with a message of this time or later, by partition."""
        found = {}
        for partition, rows in enumerate(self._rows):
            positions = [position for position, row in rows.items() if row.time >= time]
            if positions:
                found[partition] = min(positions)
        return found

    def trim(self, partition: int, below: int) -> None:
        """Delete the messages below a position, except the last message. Idempotent."""
        rows = self._rows[partition]
        for position in [each for each in rows if each < min(below, self._ends[partition] - 1)]:
            del rows[position]
