"""Stores the attempts of failed messages: the number of failures of each message, and the state of its lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, LiteralString, cast, get_args

import psycopg
from psycopg import AsyncConnection
from psycopg.types.numeric import Int4, Int8

from lanes.arguments import names_unknown_options
from lanes.attempts import Attempt, AttemptState
from lanes.core.types import Message, Partition
from lanes.errors import ConfigError
from lanes_postgres.cancellation import cancelled_once
from lanes_postgres.errors import lanes_error
from lanes_postgres.names import SCHEMA, check_schema_name, check_subscription
from lanes_postgres.steps import Result, Statement, Steps, compose
from lanes_postgres.topics import Topics
from lanes_postgres.transactions import alone_async

Connect = Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]]

_ERROR_TYPE_LIMIT: Final = 200

# The result is one row with arrays, because a ``Statement`` returns only the first row.
_LOAD: Final[LiteralString] = (
    "SELECT array_agg(position), array_agg(attempts), array_agg(state), array_agg(error_type) "
    "FROM {schema}.lanes_attempts WHERE topic = %s AND partition = %s"
)
_KEEP: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_attempts AS kept (topic, partition, position, attempts, state, error_type, epoch) "
    "VALUES (%s, %s, %s, %s, %s, %s, %s::bigint) ON CONFLICT (topic, partition, position) DO UPDATE "
    "SET attempts = excluded.attempts, state = excluded.state, error_type = excluded.error_type, "
    "epoch = greatest(kept.epoch, excluded.epoch) "
    "WHERE kept.attempts <= excluded.attempts AND (kept.epoch <= excluded.epoch) IS NOT FALSE"
)
_DROP: Final[LiteralString] = (
    "DELETE FROM {schema}.lanes_attempts WHERE topic = %s AND partition = %s AND position = ANY(%s::bigint[]) "
    "AND (epoch <= %s::bigint) IS NOT FALSE"
)


@names_unknown_options("lanes_postgres.PostgresAttempts")
class PostgresAttempts:
    """A store of the failed messages of one subscription, for ``lanes.Consumer(attempts=…)``; see ``lanes.Attempts``.

    The store writes each failure in a separate transaction, independent of the handler's transaction. One call
    deletes the attempts of many settled messages.

    Every write compares the fencing token of the partition, so a former owner changes no row of a newer owner. Every
    call is idempotent. A cancelled call has its whole effect or no effect. The methods raise the same errors as
    ``Positions``.

    Args:
        connect: Function that returns a context manager with a connection, such as ``pool.connection`` of an
            ``AsyncConnectionPool``.
        subscription: Name of the subscription, 1 to 200 characters.
        schema: Schema in which ``migrate`` created the tables.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, connect: Connect, subscription: str, *, schema: str = SCHEMA) -> None:
        check_subscription(subscription)
        check_schema_name(schema)
        if not callable(connect):
            raise ConfigError(f"connect is a {type(connect).__name__}; pass a function, such as pool.connection")
        self._connect = connect
        self._subscription = subscription
        self._schema = schema
        self._topics = Topics(subscription, schema)
        self._load = compose(_LOAD, schema)
        self._keep = compose(_KEEP, schema)
        self._drop = compose(_DROP, schema)

    def __repr__(self) -> str:
        return f"<PostgresAttempts of {self._subscription!r} in the schema {self._schema!r}>"

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        """Return the stored attempts of a partition at its assignment.

        Args:
            partition: The assigned partition.

        Returns:
            The attempts of earlier owners, by position.

        Raises:
            ConfigError: A table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return await self._perform(self._loading(partition))

    async def keep(self, message: Message, attempt: Attempt) -> None:
        """Store the attempts of a message, unless the store has more attempts or an attempt of a newer owner.

        Args:
            message: The failed message.
            attempt: Number of attempts, state of the lane, and type name of the last error.

        Raises:
            ConfigError: ``attempt.state`` is unknown, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        states = get_args(AttemptState)
        if attempt.state not in states:
            raise ConfigError(f"state={attempt.state!r} is unknown; use {', '.join(map(repr, states))}")
        await self._perform(self._keeping(message, attempt))

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        """Delete the attempts of handled messages, and of messages with a confirmed dead letter.

        Args:
            partition: The partition of the messages.
            positions: Positions of the messages whose attempts the call deletes.

        Raises:
            ConfigError: A table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        if positions:
            await self._perform(self._dropping(partition, positions))

    async def _perform(self, steps: Steps[Result]) -> Result:
        return await cancelled_once(self._on_connection(steps))

    async def _on_connection(self, steps: Steps[Result]) -> Result:
        where = f"attempts of {self._subscription!r} in the schema {self._schema!r}"
        try:
            async with self._connect() as connection:
                return await alone_async(connection, steps, where)
        except psycopg.Error as error:
            raise lanes_error(where, error) from error

    def _loading(self, partition: Partition) -> Steps[Mapping[int, Attempt]]:
        topic = yield from self._topic_of(partition)
        found = yield Statement(self._load, (topic, Int8(partition.id.number)))
        if found is None or found[0] is None:
            return {}
        return {
            position: Attempt(attempts, cast(AttemptState, state), error_type)
            for position, attempts, state, error_type in zip(*found, strict=True)
        }

    def _keeping(self, message: Message, attempt: Attempt) -> Steps[None]:
        partition = message.partition
        topic = yield from self._topic_of(partition)
        # The user chooses the name, which may contain characters that PostgreSQL cannot store.
        name = attempt.error_type.replace("\0", "").encode(errors="backslashreplace").decode()[:_ERROR_TYPE_LIMIT]
        place = (topic, Int8(partition.id.number), Int8(message.position))
        values = (Int4(attempt.attempts), attempt.state, name, _epoch(partition))
        yield Statement(self._keep, (*place, *values))

    def _dropping(self, partition: Partition, positions: Sequence[int]) -> Steps[None]:
        topic = yield from self._topic_of(partition)
        yield Statement(self._drop, (topic, Int8(partition.id.number), list(positions), _epoch(partition)))

    def _topic_of(self, partition: Partition) -> Steps[int]:
        return (yield from self._topics.of(partition.id.source, partition.incarnation))


def _epoch(partition: Partition) -> Int8 | None:
    return None if partition.fencing_token is None else Int8(partition.fencing_token)
