"""Stores the position of a message in the transaction of its effect."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Final, Literal, LiteralString, overload

from psycopg import AsyncConnection, Connection
from psycopg.types.numeric import Int8

from lanes.arguments import names_unknown_options, shown_value
from lanes.core.types import Message
from lanes.errors import ConfigError
from lanes_postgres.claims import Claims
from lanes_postgres.floors import FloorClaims
from lanes_postgres.names import SCHEMA, check_schema_name, check_subscription
from lanes_postgres.rows import By, row_of
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.transactions import block, inside

_SELECTED: Final[LiteralString] = (
    " AS each USING {schema}.lanes_topics AS of WHERE each.topic = of.id AND of.subscription = %s AND of.topic = %s "
    "AND (%s::bigint IS NULL OR each.partition = %s::bigint) AND (%s::bigint IS NULL OR each.position < %s::bigint)"
)
_FORGET: Final[LiteralString] = (
    "WITH gone AS (DELETE FROM {schema}.lanes_positions" + _SELECTED + " RETURNING 1) SELECT count(*) FROM gone"
)
_FORGET_DEAD_LETTERS: Final[LiteralString] = "DELETE FROM {schema}.lanes_letters" + _SELECTED
_FORGET_ATTEMPTS: Final[LiteralString] = "DELETE FROM {schema}.lanes_attempts" + _SELECTED
_FORGET_TOPIC: Final[LiteralString] = "DELETE FROM {schema}.lanes_topics WHERE subscription = %s AND topic = %s"
_UNFENCE: Final[LiteralString] = (
    "WITH open AS (UPDATE {schema}.lanes_positions SET epoch = NULL FROM {schema}.lanes_topics AS of "
    "WHERE lanes_positions.topic = of.id AND of.subscription = %s AND of.topic = %s AND epoch IS NOT NULL RETURNING 1) "
    "SELECT count(*) FROM open"
)
_UNFENCE_ATTEMPTS: Final[LiteralString] = (
    "UPDATE {schema}.lanes_attempts SET epoch = NULL FROM {schema}.lanes_topics AS of "
    "WHERE lanes_attempts.topic = of.id AND of.subscription = %s AND of.topic = %s AND epoch IS NOT NULL"
)


@names_unknown_options("lanes_postgres.Positions")
class Positions:
    """Records which messages of one subscription have had their effect, in the database of the effects.

    Every method takes the user's ``psycopg.Connection`` or ``AsyncConnection``, for example from a pool, and writes
    only in the transaction of that connection. Threads and tasks may share an instance, because an instance has no
    state between calls. ``pickle`` can copy an instance. After the cancellation of an asynchronous call, the
    surrounding transaction block rolls back.

    Every method raises ``ConfigError`` for a fault that a person must correct. The error stops a consumer after a
    drain. Examples of such faults are missing tables or permissions, a replica, and a transaction that cannot contain
    both the position and the effect. For other faults of the database every method raises ``SourceError``. The
    attribute ``retryable`` of the error is True if the same transaction may succeed later, for example after a lost
    connection, a deadlock or a timeout. Errors of the user's own statements stay unchanged.

    Args:
        subscription: Name of the subscription, 1 to 200 characters, such as the purpose of the effects. Two
            subscriptions on one topic are independent. All processes that run the same handler use the same
            subscription.
        schema: Schema in which ``migrate`` created the tables.
        by: ``"key"`` stores one row for each key, with the position of its last message. ``"message"`` stores one row
            for each message, for ``order="none"``. A message without a key always has its own row. ``"partition"``
            stores no separate row. It moves the position of a ``PostgresSource``, for ``order="serial"`` and
            ``order="partition"``. The source must have the same subscription, database and schema.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, subscription: str, *, schema: str = SCHEMA, by: By | Literal["partition"] = "key") -> None:
        check_subscription(subscription)
        check_schema_name(schema)
        if by not in ("key", "message", "partition"):
            raise ConfigError(f'by={shown_value(by)} is unknown; use "key", "message" or "partition"')
        self._subscription = subscription
        self._schema = schema
        self._by: By | Literal["partition"] = by
        self._claims = Claims(subscription, schema)
        self._floors = FloorClaims(subscription, schema, self._claims)

    def __repr__(self) -> str:
        return f"<Positions of {self._subscription!r} by {self._by} in the schema {self._schema!r}>"

    # --- a transaction around the effect

    @overload
    def once(self, connection: AsyncConnection[Any], message: Message) -> AbstractAsyncContextManager[bool]: ...

    @overload
    def once(self, connection: Connection[Any], message: Message) -> AbstractContextManager[bool]: ...

    def once(
        self, connection: AsyncConnection[Any] | Connection[Any], message: Message
    ) -> AbstractAsyncContextManager[bool] | AbstractContextManager[bool]:
        """Return a transaction around the effect of one message.

        ``async with positions.once(connection, message) as fresh:`` sets ``fresh`` to True if the message must have its
        effect in this block, and to False if the effect happened before. The end of the block commits position and
        effect. An exception in the block rolls back position and effect, and the block raises it again. If the result
        of the COMMIT is unknown, the next attempt reads the stored position.

        Args:
            connection: A connection that is in no transaction.
            message: The message.

        Returns:
            A context manager; asynchronous for an asynchronous connection.
        """
        return block(connection, self._one(message), self._where, "claim()")

    @overload
    def once_all(
        self, connection: AsyncConnection[Any], messages: Sequence[Message]
    ) -> AbstractAsyncContextManager[list[Message]]: ...

    @overload
    def once_all(
        self, connection: Connection[Any], messages: Sequence[Message]
    ) -> AbstractContextManager[list[Message]]: ...

    def once_all(
        self, connection: AsyncConnection[Any] | Connection[Any], messages: Sequence[Message]
    ) -> AbstractAsyncContextManager[list[Message]] | AbstractContextManager[list[Message]]:
        """Return a transaction around the effects of a batch, which commits all effects or none.

        Args:
            connection: A connection that is in no transaction.
            messages: The messages of the batch.

        Returns:
            A context manager with the messages that must have their effect, in the given order.
        """
        return block(connection, self._all(messages), self._where, "claim_all()")

    # --- inside a transaction of the caller

    @overload
    def claim(self, connection: AsyncConnection[Any], message: Message) -> Awaitable[bool]: ...

    @overload
    def claim(self, connection: Connection[Any], message: Message) -> bool: ...

    def claim(self, connection: AsyncConnection[Any] | Connection[Any], message: Message) -> Awaitable[bool] | bool:
        """Return whether a message must have its effect in the open transaction; False = the effect happened before.

        Claim a message once in a transaction, and commit before the handler returns. A connection with autocommit must
        be inside ``connection.transaction()``.

        Args:
            connection: A connection in the user's transaction.
            message: The message.

        Returns:
            Whether the message must have its effect; awaitable for an asynchronous connection.
        """
        return inside(connection, self._one(message), self._where, "Positions.claim", "once()")

    @overload
    def claim_all(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> Awaitable[list[Message]]: ...

    @overload
    def claim_all(self, connection: Connection[Any], messages: Sequence[Message]) -> list[Message]: ...

    def claim_all(
        self, connection: AsyncConnection[Any] | Connection[Any], messages: Sequence[Message]
    ) -> Awaitable[list[Message]] | list[Message]:
        """Return the messages of a batch that must have their effect in the open transaction.

        Args:
            connection: A connection in the user's transaction.
            messages: The messages of the batch.

        Returns:
            The messages in the given order; awaitable for an asynchronous connection.
        """
        return inside(connection, self._all(messages), self._where, "Positions.claim_all", "once_all()")

    # --- for operators

    @overload
    def forget(
        self,
        connection: AsyncConnection[Any],
        topic: str,
        *,
        partition: int | None = None,
        below: int | None = None,
    ) -> Awaitable[int]: ...

    @overload
    def forget(
        self, connection: Connection[Any], topic: str, *, partition: int | None = None, below: int | None = None
    ) -> int: ...

    def forget(
        self,
        connection: AsyncConnection[Any] | Connection[Any],
        topic: str,
        *,
        partition: int | None = None,
        below: int | None = None,
    ) -> Awaitable[int] | int:
        """Delete the subscription's rows of a topic, including the rows of its dead letters and attempts.

        A message without a row has its effect again after a redelivery. Therefore delete only positions below the
        position that every consumer of the subscription has committed. Idempotent.

        Args:
            connection: A connection in the user's transaction.
            topic: Name of the topic.
            partition: Number of the partition whose rows the call deletes; None = all partitions.
            below: Position below which the call deletes rows; None = all positions.

        Returns:
            Number of deleted positions; awaitable for an asynchronous connection.
        """
        return inside(connection, self._forgetting(topic, partition, below), self._where, "Positions.forget")

    @overload
    def unfence(self, connection: AsyncConnection[Any], topic: str) -> Awaitable[int]: ...

    @overload
    def unfence(self, connection: Connection[Any], topic: str) -> int: ...

    def unfence(self, connection: AsyncConnection[Any] | Connection[Any], topic: str) -> Awaitable[int] | int:
        """Delete the epochs of a topic, including the epochs of its attempts, but no position.

        Call this method after the epochs of the topic have restarted. Each effect still happens only once, because the
        call does not delete the positions. Idempotent.

        Args:
            connection: A connection in the user's transaction.
            topic: Name of the topic.

        Returns:
            Number of positions that had an epoch; awaitable for an asynchronous connection.
        """
        return inside(connection, self._unfencing(topic), self._where, "Positions.unfence")

    def _one(self, message: Message) -> Steps[bool]:
        if self._by == "partition":
            return self._floors.one(message)
        return self._claims.one(message, row_of(message, self._by))

    def _all(self, messages: Sequence[Message]) -> Steps[list[Message]]:
        if self._by == "partition":
            return self._floors.all(messages)
        return self._claims.all(messages, [row_of(message, self._by) for message in messages])

    def _forgetting(self, topic: str, partition: int | None, below: int | None) -> Steps[int]:
        of, end = (None if number is None else Int8(number) for number in (partition, below))
        selected = (self._subscription, topic, of, of, end, end)
        count = yield Statement(compose(_FORGET, self._schema), selected)
        yield Statement(compose(_FORGET_DEAD_LETTERS, self._schema), selected)
        yield Statement(compose(_FORGET_ATTEMPTS, self._schema), selected)
        if partition is None and below is None:
            yield Statement(compose(_FORGET_TOPIC, self._schema), (self._subscription, topic))
        return 0 if count is None else int(count[0])

    def _unfencing(self, topic: str) -> Steps[int]:
        count = yield Statement(compose(_UNFENCE, self._schema), (self._subscription, topic))
        yield Statement(compose(_UNFENCE_ATTEMPTS, self._schema), (self._subscription, topic))
        return 0 if count is None else int(count[0])

    @property
    def _where(self) -> str:
        return f"subscription {self._subscription!r} in the schema {self._schema!r}"
