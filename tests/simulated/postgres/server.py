"""A simulated PostgreSQL server: sessions, advisory locks, row locks, and the transactions with these locks.

A session ends by its client, by ``PostgresServer.terminate``, with the server, or after its idle timeout. The server
then frees the locks of the session. Each call is one statement and receives the present time. A call that must wait for
another transaction raises ``Blocked``; repeat the call after a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from tests.simulated.postgres.log import ReferenceLog


class Blocked(Exception):
    """A statement waits for the end of the transaction of another session."""


class UniqueViolation(Exception):
    """A row with this key exists."""


class RowRefused(Exception):
    """A trigger refuses the change of a row."""


class Session:
    """One session of a server.

    Args:
        server: The server.
        pid: Number of the session's process on the server.
        owner: Name of the client.
        now: Present time, in seconds.

    Attributes:
        server: The server.
        pid: Number of the session's process on the server.
        owner: Name of the client.
        open: Whether the session is open.
        timeout: Seconds without a statement after which the session ends; 0 = never.
        asked_at: Time of the last statement.
        in_transaction: Whether the session is in a transaction block.
        waits: Whether a blocked statement of the transaction waits for another transaction; False = the statement
            fails.
        blocked: Whether a statement waits for another transaction.
        in_transaction_timeout: Seconds without a statement after which a transaction block ends its session; 0 = never.
        listens: Whether the session receives notifications.
        on_notify: Function that the server calls with the pid of the notifying session and the text of the
            notification.
        on_end: Function that the server calls at the end of the session.
    """

    def __init__(self, server: PostgresServer, pid: int, owner: str, now: float) -> None:
        self.server = server
        self.pid = pid
        self.owner = owner
        self.open = True
        self.timeout = 0.0
        self.asked_at = now
        self.in_transaction = False
        self.waits = True
        self.in_transaction_timeout = 0.0
        self.blocked = False
        self.listens = False
        self.on_notify: Callable[[int, str], None] = lambda pid, text: None
        self.on_end: Callable[[], None] = lambda: None
        self._notes: list[str] = []
        self._changes: dict[Hashable, Any] = {}
        self._rows: set[Hashable] = set()
        self._shared: set[Hashable] = set()

    @property
    def ends_at(self) -> float:
        """Time at which the server ends the session, unless the session sends a statement before."""
        timeout = self.in_transaction_timeout if self.in_transaction else self.timeout
        return self.asked_at + timeout if self.open and timeout and not self.blocked else math.inf

    # --- transactions

    def begin(self) -> None:
        """Begin a transaction block."""
        self.in_transaction = True

    def commit(self) -> None:
        """Make the changes of the transaction visible, and free its locks."""
        rows = self.server.rows
        for key, row in self._changes.items():
            self.server.on_row(self, key, rows.get(key), row)
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        for text in self._notes:
            self.server.notify(self.pid, text)
        self._free()

    def roll_back(self) -> None:
        """Forget the changes of the transaction, and free its locks."""
        self._free()

    def _free(self) -> None:
        self.in_transaction = False
        self.waits = True
        self.in_transaction_timeout = 0.0
        self._notes.clear()
        self._changes.clear()
        self._rows.clear()
        self._shared.clear()
        self.server.changed()

    def statement_ends(self) -> None:
        """Commit a statement outside of a transaction block."""
        if not self.in_transaction:
            self.commit()

    # --- rows

    def get(self, key: Hashable) -> Any:
        """Return the row that this session sees; None = no row."""
        return self._changes[key] if key in self._changes else self.server.rows.get(key)

    def rows(self, kind: str) -> list[tuple[Any, Any]]:
        """Return the rows that this session sees whose key is a tuple of ``kind`` and more, with their keys."""
        seen = {**self.server.rows, **self._changes}
        return [
            (key, row) for key, row in seen.items() if row is not None and isinstance(key, tuple) and key[0] == kind
        ]

    def lock_row(self, key: Hashable) -> None:
        """Lock a row until the end of the transaction. Raises ``Blocked`` while another transaction has the row."""
        if any(key in other._rows for other in self.server.sessions if other is not self):
            raise Blocked
        self._rows.add(key)

    def put(self, key: Hashable, row: Any) -> None:
        """Write a row; None deletes the row. Raises ``RowRefused``, and ``Blocked`` like ``lock_row``."""
        self.lock_row(key)
        if key in self.server.refused:
            raise RowRefused
        self._changes[key] = row

    def insert(self, key: Hashable, row: Any) -> None:
        """Write a new row. Raises ``UniqueViolation`` if the row exists, and ``Blocked`` like ``lock_row``."""
        self.lock_row(key)
        if self.get(key) is not None:
            raise UniqueViolation
        self._changes[key] = row

    # --- advisory locks

    def try_lock(self, key: int) -> bool:
        """Take a lock of the session. Returns False if another session has the lock."""
        holder = self.server.locks.get(key)
        if holder is not None and holder is not self:
            return False
        self.server.locks[key] = self
        return True

    def unlock(self, key: int) -> bool:
        """Free a lock of the session. Returns False if the session does not have the lock."""
        if self.server.locks.get(key) is not self:
            return False
        del self.server.locks[key]
        return True

    def locked(self) -> list[int]:
        """The locks of the session."""
        return [key for key, holder in self.server.locks.items() if holder is self]

    def unlock_all(self) -> None:
        """Free all locks of the session."""
        for key in self.locked():
            del self.server.locks[key]

    def notify(self, text: str) -> None:
        """Notify the listening sessions at the end of the transaction."""
        self._notes.append(text)

    def lock_until_commit(self, key: Hashable) -> None:
        """Take a lock of the transaction. Raises ``Blocked`` while another transaction has the lock."""
        if any(key in other._shared for other in self.server.sessions if other is not self):
            raise Blocked
        self._shared.add(key)


class PostgresServer:
    """A server with one log, and rows by their keys.

    Args:
        log: The log.

    Attributes:
        log: The log.
        up: Whether the server runs.
        sessions: The open sessions, the oldest first.
        rows: The committed rows.
        locks: Advisory lock -> session that holds the lock.
        refused: Keys of the rows whose changes a trigger refuses.
        on_expiry: Function that the server calls with a session after its idle timeout, before its end.
        changed: Function that the server calls at the end of a transaction, so that blocked statements may continue.
        on_row: Function that the server calls with the session, the key, the former and the new row of each committed
            change.
    """

    def __init__(self, log: ReferenceLog) -> None:
        self.log = log
        self.up = True
        self.sessions: list[Session] = []
        self.rows: dict[Hashable, Any] = {}
        self.locks: dict[int, Session] = {}
        self.refused: set[Hashable] = set()
        self.changed: Callable[[], None] = lambda: None
        self.on_expiry: Callable[[Session], None] = lambda session: None
        self.on_row: Callable[[Session, Hashable, Any, Any], None] = lambda session, key, before, after: None
        self._epochs = 0
        self._ids = 0
        self._pids = 0

    def __repr__(self) -> str:
        return f"<PostgresServer {len(self.sessions)} sessions, {len(self.locks)} locks>"

    def connect(self, owner: str, now: float) -> Session:
        """Begin a session for a client."""
        assert self.up, "a client asks first"
        self._pids += 1
        session = Session(self, self._pids, owner, now)
        self.sessions.append(session)
        return session

    def terminate(self, session: Session) -> None:
        """End a session: roll its transaction back, and free its locks. Idempotent."""
        if not session.open:
            return
        session.open = False
        session.unlock_all()
        self.sessions.remove(session)
        session.roll_back()
        session.on_end()

    def stop(self) -> None:
        """End all sessions, and accept none until ``start``."""
        self.up = False
        for session in list(self.sessions):
            self.terminate(session)

    def start(self) -> None:
        """Accept sessions again. The server still has the committed rows and messages."""
        self.up = True

    def next_epoch(self) -> int:
        """Return a number that the server has never returned, even after a roll-back."""
        self._epochs += 1
        return self._epochs

    def next_id(self) -> int:
        """Return a unique number for a new row."""
        self._ids += 1
        return self._ids

    def notify(self, pid: int, text: str) -> None:
        """Notify the listening sessions, on behalf of the session with this pid."""
        for session in list(self.sessions):
            if session.listens:
                session.on_notify(pid, text)

    def sequence(self, by: Session | None = None) -> int:
        """Give positions to the visible messages, and notify the listening sessions. Return the number of batches."""
        count = self.log.sequence()
        if count:
            self.notify(by.pid if by is not None else 0, "")
        return count

    def next_at(self) -> float:
        """Return the time at which the next session ends by its idle timeout; infinity = none."""
        return min((session.ends_at for session in self.sessions), default=math.inf)

    def advance(self, now: float) -> None:
        """End the sessions whose idle timeout has passed."""
        for session in [each for each in self.sessions if each.ends_at <= now]:
            self.on_expiry(session)
            self.terminate(session)

    def of(self, owner: str) -> Iterable[Session]:
        """Return the open sessions of a client."""
        return [session for session in self.sessions if session.owner == owner]
