"""Stores partition states in PostgreSQL. A state contains a position, and an epoch that fences former owners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, LiteralString, overload

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.types.numeric import Int8

from lanes.arguments import names_unknown_options, shown_value
from lanes.errors import ConfigError, SourceError
from lanes.ownership import Fenced, State, StateChange, StateKey, StateLocked, StateStore
from lanes_postgres.attempts import Connect
from lanes_postgres.cancellation import cancelled_once
from lanes_postgres.errors import lanes_error
from lanes_postgres.names import SCHEMA, check_schema_name, check_subscription
from lanes_postgres.rows import LEAST, MOST
from lanes_postgres.steps import Result, Statement, Steps, compose
from lanes_postgres.transactions import alone_async, each_async, inside

_KEY: Final[LiteralString] = "subscription, source, partition, incarnation"
_KEYS: Final[LiteralString] = "unnest(%s::text[], %s::text[], %s::bigint[], %s::text[]) WITH ORDINALITY"
_OF: Final[LiteralString] = (
    " WHERE kept.subscription = new.subscription AND kept.source = new.source "
    "AND kept.partition = new.partition AND kept.incarnation = new.incarnation "
)

# The results are single rows with arrays, because a ``Statement`` returns only the first row. The finished ranges are
# text, because PostgreSQL cannot aggregate arrays of different lengths.
_READ: Final[LiteralString] = (
    "SELECT array_agg(of.index), array_agg(kept.epoch), array_agg(kept.floor), array_agg(kept.completed::text) "
    "FROM " + _KEYS + " AS of (" + _KEY + ", index) JOIN {schema}.lanes_states AS kept USING (" + _KEY + ")"
)
# A server that loses confirmed commits in a crash would assign the same epoch twice, so commit synchronously. The
# transaction of a frozen handler may lock the row for hours, and the claims of other partitions would wait. A member
# that is frozen before its COMMIT would also keep the lock. A store is one statement, so it needs no such limit.
_CLAIMS: Final[LiteralString] = (
    "SET LOCAL idle_in_transaction_session_timeout TO '5s'; SET LOCAL synchronous_commit TO on; "
    "SET LOCAL lock_timeout TO '10ms'"
)
_CLAIM: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_states (" + _KEY + ", floor) VALUES (%s, %s, %s, %s, %s) "
    "ON CONFLICT (" + _KEY + ") DO UPDATE SET epoch = DEFAULT RETURNING epoch, floor, completed::text"
)
_STORE: Final[LiteralString] = (
    "WITH stored AS (UPDATE {schema}.lanes_states AS kept "
    "SET floor = new.floor, completed = new.completed::bigint[], stored = clock_timestamp() "
    "FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::text[]) "
    "WITH ORDINALITY AS new ("
    + _KEY
    + ", epoch, floor, completed, index)"
    + _OF
    # Neither lock nor write the row of an already stored state, because a transaction of a handler may have locked the
    # row.
    + "AND kept.epoch = new.epoch AND (kept.floor < new.floor OR kept.floor = new.floor "
    "AND kept.completed <> new.completed::bigint[]) RETURNING new.index) SELECT array_agg(index) FROM stored"
)
_LOCK: Final[LiteralString] = (
    "SELECT epoch FROM {schema}.lanes_states "
    "WHERE subscription = %s AND source = %s AND partition = %s AND incarnation = %s FOR NO KEY UPDATE"
)
_FIND_LOG: Final[LiteralString] = "SELECT 1 FROM {schema}.lanes_logs WHERE incarnation = %s"


@names_unknown_options("lanes_postgres.PostgresStates")
class PostgresStates:
    """Stores the states of partitions in the table ``lanes_states``; see ``lanes.ownership.StateStore``.

    ``store_in`` writes a state in the caller's transaction; see ``lanes.ownership.StoresInTransaction``. The methods
    raise the same errors as ``Positions``.

    ``claim`` returns after the server has written the commit to disk, even with ``synchronous_commit=off``. After a
    failover to a standby that lacks the last commits, an epoch may repeat.

    Args:
        connect: Function that returns a context manager with a connection, such as ``pool.connection`` of an
            ``AsyncConnectionPool``.
        schema: Schema in which ``migrate`` created the tables.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, connect: Connect, *, schema: str = SCHEMA) -> None:
        check_schema_name(schema)
        if not callable(connect):
            raise ConfigError(f"connect is a {type(connect).__name__}; pass a function, such as pool.connection")
        self._connect = connect
        self._schema = schema
        self._read = compose(_READ, schema)
        self._claim = compose(_CLAIM, schema)
        self._store = compose(_STORE, schema)
        self._lock = compose(_LOCK, schema)

    def __repr__(self) -> str:
        return f"<PostgresStates in the schema {self._schema!r}>"

    async def read(self, keys: Sequence[StateKey]) -> Mapping[StateKey, State]:
        """Read states; see ``lanes.ownership.StateStore.read``.

        Args:
            keys: Names of the states.

        Returns:
            The states by name. The result omits states that no owner has claimed.

        Raises:
            ConfigError: A key is invalid, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return await self._perform(self._reading(keys)) if keys else {}

    async def claim(self, key: StateKey, start: int) -> State:
        """Raise the epoch of a state and return the state; see ``lanes.ownership.StateStore.claim``.

        Args:
            key: Name of the state.
            start: Floor of a new state, if the state does not exist yet.

        Returns:
            The state with its new epoch.

        Raises:
            StateLocked: A transaction holds the row of the state.
            ConfigError: The key is invalid, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        try:
            return await self._perform(self._claiming(key, start), alone_async)
        except SourceError as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise StateLocked(
                    f"{self._where}: a transaction holds the row of {key.partition} of {key.subscription!r}; claim "
                    "again after the transaction"
                ) from error
            raise

    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        """Write the states whose epochs are unchanged, in one statement; see ``lanes.ownership.StateStore.store``.

        Args:
            changes: At most one change for each key.

        Returns:
            One answer for each change; False = the store refused the change, because another process owns the
            partition.

        Raises:
            ConfigError: A key is invalid, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return await self._perform(self._storing(changes)) if changes else []

    @overload
    def store_in(self, connection: AsyncConnection[Any], change: StateChange) -> Awaitable[None]: ...

    @overload
    def store_in(self, connection: Connection[Any], change: StateChange) -> None: ...

    def store_in(
        self, connection: AsyncConnection[Any] | Connection[Any], change: StateChange
    ) -> Awaitable[None] | None:
        """Write a state in the open transaction; see ``lanes.ownership.StoresInTransaction.store_in``.

        Args:
            connection: A connection in the user's transaction.
            change: The change.

        Returns:
            Nothing; awaitable for an asynchronous connection.

        Raises:
            Fenced: Another process owns the partition.
            ConfigError: The connection is in no transaction, a key is invalid, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return inside(connection, self._storing_in(change), self._where, "PostgresStates.store_in")

    async def _perform(
        self,
        steps: Steps[Result],
        perform: Callable[[AsyncConnection[Any], Steps[Result], str], Awaitable[Result]] = each_async,
    ) -> Result:
        return await cancelled_once(self._on_connection(steps, perform))

    async def _on_connection(
        self, steps: Steps[Result], perform: Callable[[AsyncConnection[Any], Steps[Result], str], Awaitable[Result]]
    ) -> Result:
        try:
            async with self._connect() as connection:
                return await perform(connection, steps, self._where)
        except psycopg.Error as error:
            raise lanes_error(self._where, error) from error

    def _reading(self, keys: Sequence[StateKey]) -> Steps[Mapping[StateKey, State]]:
        found = yield Statement(self._read, _columns(keys))
        if found is None or found[0] is None:
            return {}
        return {
            keys[index - 1]: State(epoch, floor, runs_of(completed))
            for index, epoch, floor, completed in zip(*found, strict=True)
        }

    def _claiming(self, key: StateKey, start: int) -> Steps[State]:
        yield Statement(_CLAIMS.encode())
        found = yield Statement(self._claim, (*_row(key), Int8(start)))
        assert found is not None, "INSERT … ON CONFLICT DO UPDATE returns a row"
        epoch, floor, completed = found
        return State(epoch, floor, runs_of(completed))

    def _storing(self, changes: Sequence[StateChange]) -> Steps[list[bool]]:
        # All transactions lock the rows in the same order, which makes deadlocks unlikely.
        order = sorted(range(len(changes)), key=lambda index: changes[index].key)
        found = yield self._statement([changes[index] for index in order])
        stored = {order[index - 1] for index in (found and found[0]) or ()}
        missing = [key for index, (key, _) in enumerate(changes) if index not in stored]
        if not missing:
            return [True] * len(changes)
        # The epoch differs, or a later call of the same owner has stored a higher floor. An epoch never repeats, so no
        # lock is necessary. Two owners that have exchanged partitions therefore do not wait for each other.
        now = yield from self._reading(missing)
        return [
            index in stored or (key in now and now[key].epoch == state.epoch)
            for index, (key, state) in enumerate(changes)
        ]

    def _storing_in(self, change: StateChange) -> Steps[None]:
        found = yield self._statement([change])
        if found is not None and found[0] is not None:
            return
        # Lock the row for a lower floor too, so that the next claim waits for the effects of this transaction.
        found = yield Statement(self._lock, _row(change.key))
        if found is None or found[0] != change.state.epoch:
            now = "is deleted" if found is None else f"has epoch {found[0]}"
            raise Fenced(
                f"{self._where}: {change.key.partition} of {change.key.subscription!r} was acquired with epoch "
                f"{change.state.epoch}, but its state now {now}; another process handles the message"
            )

    def _statement(self, changes: Sequence[StateChange]) -> Statement:
        states = [state for _, state in changes]
        return Statement(
            self._store,
            (
                *_columns([key for key, _ in changes]),
                [state.epoch for state in states],
                [state.floor for state in states],
                [array_of(state.completed) for state in states],
            ),
        )

    @property
    def _where(self) -> str:
        return f"states in the schema {self._schema!r}"


async def are_beside(states: StateStore, schema: str, incarnation: str) -> bool:
    """Return whether SQL statements about a log can read the states, because both are in one schema and database.

    ``incarnation`` is the identity of the log. Raises ``ConfigError`` and ``SourceError`` like ``PostgresStates``.
    """
    if not isinstance(states, PostgresStates) or states._schema != schema:
        return False

    def finding() -> Steps[bool]:
        return (yield Statement(compose(_FIND_LOG, schema), (incarnation,))) is not None

    return await states._perform(finding())


def _row(key: StateKey) -> tuple[str, str, Int8, str]:
    _check(key)
    return key.subscription, key.partition.source, Int8(key.partition.number), key.incarnation


def _columns(keys: Sequence[StateKey]) -> tuple[list[str], list[str], list[int], list[str]]:
    for key in keys:
        _check(key)
    return (
        [key.subscription for key in keys],
        [key.partition.source for key in keys],
        [key.partition.number for key in keys],
        [key.incarnation for key in keys],
    )


def _check(key: StateKey) -> None:
    check_subscription(key.subscription)
    for name, text in (("source", key.partition.source), ("incarnation", key.incarnation)):
        if "\0" in text:
            raise ConfigError(
                f"the {name} {shown_value(text)} of a state has a zero byte, which PostgreSQL cannot store; rename it"
            )
    if not LEAST <= key.partition.number <= MOST:
        raise ConfigError(f"the partition number {key.partition.number} of a state is beyond 64 bits; use a lower one")


def array_of(runs: Sequence[tuple[int, int]]) -> str:
    """Return the text of an array with the start and the end of each range."""
    return "{" + ",".join(f"{start},{end}" for start, end in runs) + "}"


def runs_of(array: str) -> tuple[tuple[int, int], ...]:
    bounds = [int(bound) for bound in array.strip("{}").split(",") if bound]
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))
