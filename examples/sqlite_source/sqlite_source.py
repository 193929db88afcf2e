"""A source over SQLite. It reads a table as a queue with visibility timeouts, for any number of processes on one
machine.

A process claims a message until a deadline, extends the deadline while the handler waits or runs, and deletes the
finished message. After a crash the deadline passes, and another process claims the message. While a process has claimed
messages of a key, other processes receive no messages of this key. Messages of a key therefore keep their order across
processes. README.md names the limits.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, TypeVar, cast

import anyio

import lanes
from lanes.core.types import Message, Room, Settlement
from lanes.source import Assigned, Delivered, Exhausted, SourceEvent, SourceTraits

T = TypeVar("T")

# AUTOINCREMENT never reuses an id, so a late settlement cannot hit another message. One transaction writes at a time,
# so ids become visible in their order. `attempts` rises with each claim, so it tells one claim from the next.
SCHEMA: Final = """
    PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS queue (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB, value BLOB NOT NULL, headers TEXT NOT NULL DEFAULT '[]',
        attempts INTEGER NOT NULL DEFAULT 0, owner TEXT, deadline REAL NOT NULL DEFAULT 0
    );
    CREATE INDEX IF NOT EXISTS queue_by_key ON queue (key, deadline);
    CREATE TABLE IF NOT EXISTS queue_incarnation (id TEXT NOT NULL);
    INSERT INTO queue_incarnation SELECT hex(randomblob(8)) WHERE NOT EXISTS (SELECT 1 FROM queue_incarnation);
"""
# Skips each key that another process has a claim on. NULL equals nothing, so a message without a key is free.
CLAIMABLE: Final = """
    SELECT id, key, value, headers, attempts + 1 FROM queue AS q
    WHERE deadline <= :now AND NOT EXISTS (
        SELECT 1 FROM queue AS other WHERE other.key = q.key AND other.deadline > :now AND other.owner <> :owner
    ) ORDER BY id LIMIT :limit
"""
CLAIM: Final = "UPDATE queue SET attempts = ?, owner = ?, deadline = ? WHERE id = ?"
ELSEWHERE: Final = "SELECT EXISTS (SELECT 1 FROM queue WHERE deadline <= ? OR owner <> ?)"
SETTLE: Final = "DELETE FROM queue WHERE id = ? AND attempts = ?"
# Never extends a deadline that has passed: another process may have a claim on the key by now.
EXTEND: Final = "UPDATE queue SET deadline = ? WHERE id = ? AND attempts = ? AND deadline > ?"
GIVE_BACK: Final = "UPDATE queue SET deadline = 0 WHERE owner = ?"


class Row(NamedTuple):
    """A message of the table, available as ``message.raw``.

    Attributes:
        id: position in the queue.
        key: key, or None for a message without order.
        value: payload.
        headers: headers as JSON.
        attempts: number of claims, including the current claim.
    """

    id: int
    key: bytes | None
    value: bytes
    headers: str
    attempts: int

    @property
    def size(self) -> int:
        return len(self.key or b"") + len(self.value) + len(self.headers)


class Rows:
    """Reader of the parts of a row."""

    def value(self, raw: object) -> bytes:
        return cast(Row, raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return [(name, bytes.fromhex(value)) for name, value in json.loads(cast(Row, raw).headers)]

    def subject(self, raw: object) -> str:
        return "queue"


def create(path: str | Path) -> None:
    """Create the table in a new or an existing file. Blocks; idempotent."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)


def put(db: sqlite3.Connection, key: bytes | None, value: bytes, headers: Iterable[tuple[str, bytes]] = ()) -> None:
    """Write one message in the caller's transaction. Blocks."""
    encoded = json.dumps([(name, content.hex()) for name, content in headers])
    db.execute("INSERT INTO queue (key, value, headers) VALUES (?, ?, ?)", (key, value, encoded))


class SqliteSource:
    """A source that reads the queue of an SQLite file. A program must call ``create`` before the source opens.

    Args:
        path: the file.
        visibility: seconds until a claim ends without an extension, above 0. The source extends the claim while the
            message is in flight.
        poll: seconds between two queries of an empty table, above 0.
        now: clock in seconds that all processes share and that survives a restart of the machine. A forward jump of the
            clock repeats messages.

    Raises:
        lanes.ConfigError: ``visibility`` or ``poll`` is not above 0.
    """

    def __init__(
        self, path: str | Path, *, visibility: float = 30.0, poll: float = 0.05, now: Callable[[], float] = time.time
    ) -> None:
        if not (visibility > 0 and poll > 0):
            raise lanes.ConfigError(f"{visibility=}, {poll=}: must be numbers of seconds above 0")
        self._path, self._visibility, self._poll, self._now = Path(path), visibility, poll, now
        self._owner = uuid.uuid4().hex
        self._connection: sqlite3.Connection | None = None
        self._one = anyio.CapacityLimiter(1)  # calls overlap, and a connection does one thing at a time
        self._assigned = self._finite = self._exhausted = self._released = False

    def finish(self) -> None:
        """End the source after the last message of the table. Idempotent; does not block."""
        self._finite = True

    async def open(self) -> SourceTraits:
        incarnation = await anyio.to_thread.run_sync(self._connect, limiter=self._one)
        self._partition = lanes.Partition(lanes.PartitionId("queue", 0), Rows(), incarnation)
        every = self._visibility / 3  # one extension may fail
        return SourceTraits(name=self._path.name, extend_interval=every, partitions=1, exclusive=False)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        if not self._assigned:
            self._assigned = True
            return [Assigned(self._partition)]
        if self._exhausted or min(room.messages, room.bytes) <= 0 or self._partition in room.paused:
            await (
                anyio.sleep_forever()
            )  # ownership never changes; the engine cancels and repeats the call when there is room
        while True:
            rows: list[Row] | None = await self._transact(lambda db: self._claim(db, room), [])
            if rows:
                run = [Message(self._partition, row.id, row.key, row.size, row, row.attempts) for row in rows]
                return [Delivered(self._partition, run, sum(row.size for row in rows))]
            if self._finite and rows is None:
                self._exhausted = True
                return [Exhausted()]
            await anyio.sleep(self._poll)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        claims = [(message.position, message.token) for each in settlements for message in each.messages]
        await self._transact(lambda db: db.executemany(SETTLE, claims))

    async def extend(self, messages: Sequence[Message]) -> None:
        await self._transact(lambda db: self._extend(db, messages), None)

    async def release(self, partition: lanes.Partition) -> None:
        self._released = True  # forbids new claims, because the next line frees all claims
        await self._transact(lambda db: db.execute(GIVE_BACK, (self._owner,)))

    async def aclose(self) -> None:
        await anyio.to_thread.run_sync(self._close, limiter=self._one)

    async def _transact(self, work: Callable[[sqlite3.Connection], T], *if_busy: T) -> T:
        """Run ``work`` in one transaction, or return ``if_busy`` when another process writes for over a second.

        A cancelled call waits for its thread and returns the thread's result, so the source loses no claimed message.
        """

        def transact() -> T:
            if self._connection is None:
                raise lanes.SourceError(f"{self._path}: the source is not open; call open() first")
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back
                return work(self._connection)

        try:
            return await anyio.to_thread.run_sync(transact, limiter=self._one)
        except sqlite3.Error as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if busy and if_busy:
                return if_busy[0]
            raise lanes.SourceError(f"{self._path}: {error}", retryable=busy) from error

    def _extend(self, db: sqlite3.Connection, messages: Sequence[Message]) -> None:
        now = self._now()  # read with the lock held: deadlines that passed during the wait have expired
        db.executemany(EXTEND, [(now + self._visibility, each.position, each.token, now) for each in messages])

    def _claim(self, db: sqlite3.Connection, room: Room) -> list[Row] | None:
        """Claim the rows that fit into the room; return None if this source has already claimed every row."""
        now, size, rows = self._now(), 0, list[Row]()
        if self._released:
            return rows
        for row in map(Row._make, db.execute(CLAIMABLE, {"now": now, "owner": self._owner, "limit": room.messages})):
            size += row.size
            if rows and size > room.bytes:
                break
            rows.append(row)
        db.executemany(CLAIM, [(row.attempts, self._owner, now + self._visibility, row.id) for row in rows])
        return rows if rows or db.execute(ELSEWHERE, (now, self._owner)).fetchone()[0] else None

    def _connect(self) -> str:
        uri = f"{self._path.absolute().as_uri()}?mode=rw"  # creates no file
        try:
            self._connection = sqlite3.connect(uri, 1.0, isolation_level=None, check_same_thread=False, uri=True)
            return str(self._connection.execute("SELECT id FROM queue_incarnation").fetchone()[0])
        except sqlite3.Error as error:
            raise lanes.ConfigError(f"{self._path}: {error}: call create() with this path first") from error

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


async def main() -> None:
    """Cancel a worker during its run. Two new workers share the remaining messages, each with its own keys."""
    seen: list[tuple[bytes | None, int]] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "queue.db"
        create(path)
        with closing(sqlite3.connect(path)) as connection, connection:
            for number in range(1_000):
                put(connection, b"customer-%d" % (number % 50), b"%d" % number)

        async def handler(message: lanes.Message) -> None:
            await anyio.sleep(0.001)
            seen.append((message.key, int(message.value)))
            if len(seen) == 200:
                gone.cancel()  # cancelled without a drain: its messages stay claimed until their deadlines

        async def worker() -> None:
            source = SqliteSource(path, visibility=0.5)
            source.finish()
            settings = lanes.Settings(concurrency=20, max_in_flight=50, on_cancel="stop")
            await lanes.run(source, handler, settings=settings)

        with anyio.CancelScope() as gone:
            await worker()
        before = len(seen)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker)
            tasks.start_soon(worker)

    repeats = len(seen) - len(set(seen))
    for key in {key for key, _ in seen}:
        firsts = list(dict.fromkeys(number for name, number in seen if name == key))
        assert firsts == sorted(firsts), f"{key!r} was handled in another order: {firsts}"
    assert len(set(seen)) == 1_000, "a message got lost"
    after = len(seen) - before
    print(
        f"{before} messages, one worker cancelled, {after} more: 1000 handled, in order within 50 keys, {repeats} twice"
    )


if __name__ == "__main__":
    anyio.run(main)
