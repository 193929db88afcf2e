"""A source over SQLite: a table as a queue with visibility timeouts, for any number of processes of one machine.

A message is claimed until a deadline, which moves on while its handler waits or runs, and deleted when it is done. One
whose process died comes again behind its deadline. While a process has a claim on a key, all messages of that key are
for this process alone: so the order within a key is kept across processes. README.md says what that is worth.
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

# AUTOINCREMENT: an id is never used again, so a late settlement cannot mean another message. One transaction writes at
# a time, so ids become visible in their order. `attempts` rises with every claim: it tells one claim from the next.
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
# A key that another process has a claim on is left to it, whole. NULL equals nothing, so it is free.
CLAIMABLE: Final = """
    SELECT id, key, value, headers, attempts + 1 FROM queue AS q
    WHERE deadline <= :now AND NOT EXISTS (
        SELECT 1 FROM queue AS other WHERE other.key = q.key AND other.deadline > :now AND other.owner <> :owner
    ) ORDER BY id LIMIT :limit
"""
CLAIM: Final = "UPDATE queue SET attempts = ?, owner = ?, deadline = ? WHERE id = ?"
ELSEWHERE: Final = "SELECT EXISTS (SELECT 1 FROM queue WHERE deadline <= ? OR owner <> ?)"
SETTLE: Final = "DELETE FROM queue WHERE id = ? AND attempts = ?"
# Never one that has passed: another process may have a claim on its key by now.
EXTEND: Final = "UPDATE queue SET deadline = ? WHERE id = ? AND attempts = ? AND deadline > ?"
GIVE_BACK: Final = "UPDATE queue SET deadline = 0 WHERE owner = ?"


class Row(NamedTuple):
    """A message of the table, as ``message.raw`` has it. ``attempts``: how often it was claimed, this time included."""

    id: int
    key: bytes | None
    value: bytes
    headers: str
    attempts: int

    @property
    def size(self) -> int:
        return len(self.key or b"") + len(self.value) + len(self.headers)


class Rows:
    """Reads a row when a handler asks for it."""

    def value(self, raw: object) -> bytes:
        return cast(Row, raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return [(name, bytes.fromhex(value)) for name, value in json.loads(cast(Row, raw).headers)]

    def subject(self, raw: object) -> str:
        return "queue"


def create(path: str | Path) -> None:
    """Make the table in a new or an existing file. Blocks; idempotent."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)


def put(db: sqlite3.Connection, key: bytes | None, value: bytes, headers: Iterable[tuple[str, bytes]] = ()) -> None:
    """Write one message, in the caller's transaction. Blocks."""
    encoded = json.dumps([(name, content.hex()) for name, content in headers])
    db.execute("INSERT INTO queue (key, value, headers) VALUES (?, ?, ?)", (key, value, encoded))


class SqliteSource:
    """The queue of one file, which ``create`` has made.

    ``visibility``: seconds that a claim holds, more than 0; they are extended for as long as the message is held.
    ``poll``: seconds between two looks into an empty table, more than 0. ``now``: seconds of a clock that all processes
    share and that goes on behind a restart of the machine: the wall clock; one that jumps ahead repeats messages.
    """

    def __init__(
        self, path: str | Path, *, visibility: float = 30.0, poll: float = 0.05, now: Callable[[], float] = time.time
    ) -> None:
        if not (visibility > 0 and poll > 0):
            raise lanes.ConfigError(f"{visibility=}, {poll=}: must be numbers of seconds above 0")
        self._path, self._visibility, self._poll, self._now = Path(path), visibility, poll, now
        self._owner = uuid.uuid4().hex
        self._connection: sqlite3.Connection | None = None
        self._one = anyio.CapacityLimiter(1)  # calls come beside each other, and a connection does one thing at a time
        self._assigned = self._finite = self._exhausted = self._released = False

    def finish(self) -> None:
        """End once all that the table has is with this source. Idempotent, does not block."""
        self._finite = True

    async def open(self) -> SourceTraits:
        incarnation = await anyio.to_thread.run_sync(self._connect, limiter=self._one)
        self._partition = lanes.Partition(lanes.PartitionId("queue", 0), Rows(), incarnation)
        every = self._visibility / 3  # so that one may fail
        return SourceTraits(name=self._path.name, extend_interval=every, partitions=1, exclusive=False)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        if not self._assigned:
            self._assigned = True
            return [Assigned(self._partition)]
        if self._exhausted or min(room.messages, room.bytes) <= 0 or self._partition in room.paused:
            await anyio.sleep_forever()  # no ownership changes here: cancelled, and called again, once there is room
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
        self._released = True  # no claim behind this one: what is claimed already is given back
        await self._transact(lambda db: db.execute(GIVE_BACK, (self._owner,)))

    async def aclose(self) -> None:
        await anyio.to_thread.run_sync(self._close, limiter=self._one)

    async def _transact(self, work: Callable[[sqlite3.Connection], T], *if_busy: T) -> T:
        """Do it in one transaction, or return ``if_busy`` where that is given and another process writes for too long.

        A cancelled call waits for its thread and returns what that has done: so nothing that was claimed gets lost.
        """

        def transact() -> T:
            if self._connection is None:
                raise lanes.SourceError(f"{self._path}: not open")
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
        now = self._now()  # with the lock: what passed while the call waited for that is over
        db.executemany(EXTEND, [(now + self._visibility, each.position, each.token, now) for each in messages])

    def _claim(self, db: sqlite3.Connection, room: Room) -> list[Row] | None:
        """What fits into the room, claimed; None once all that there is is with this source."""
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
        uri = f"{self._path.absolute().as_uri()}?mode=rw"  # makes no file
        try:
            self._connection = sqlite3.connect(uri, 1.0, isolation_level=None, check_same_thread=False, uri=True)
            return str(self._connection.execute("SELECT id FROM queue_incarnation").fetchone()[0])
        except sqlite3.Error as error:
            raise lanes.ConfigError(f"{self._path}: {error}: call create() on it first") from error

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


async def main() -> None:
    """A worker that is cancelled in the middle, then two that share what is left, each with keys of its own.

    Leaves nothing behind: python examples/sqlite_source/sqlite_source.py
    """
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
                gone.cancel()  # not told to stop: what it has stays claimed, until its deadline

        async def worker() -> None:
            source = SqliteSource(path, visibility=0.5)
            source.finish()
            await lanes.run(source, handler, settings=lanes.Settings(concurrency=20, max_in_flight=50))

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
