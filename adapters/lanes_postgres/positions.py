"""Positions: each message has its effect once, because effect and position are one transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Final, LiteralString, overload

from psycopg import AsyncConnection, Connection
from psycopg.types.numeric import Int8

from lanes.core.types import Message
from lanes.errors import ConfigError
from lanes_postgres.claims import Claims
from lanes_postgres.names import SCHEMA, check_schema_name, check_subscription
from lanes_postgres.rows import By, row_of
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.transactions import block, inside

__all__ = ["Positions"]

_SELECTED: Final[LiteralString] = (
    " AS each USING {schema}.lanes_topics AS of WHERE each.topic = of.id AND of.subscription = %s AND of.topic = %s "
    "AND (%s::bigint IS NULL OR each.partition = %s::bigint) AND (%s::bigint IS NULL OR each.position < %s::bigint)"
)
_FORGET: Final[LiteralString] = (
    "WITH gone AS (DELETE FROM {schema}.lanes_positions" + _SELECTED + " RETURNING 1) SELECT count(*) FROM gone"
)
_FORGET_LETTERS: Final[LiteralString] = "DELETE FROM {schema}.lanes_letters" + _SELECTED
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


class Positions:
    """Which messages have had their effect, of one subscription, in tables beside the effects themselves.

    ``subscription``: what the effects are for, 1 to 200 characters. Two of them on one topic know nothing of each
    other; all processes, and every way to run one handler, share one. ``schema``: where ``migrate`` made the tables.
    ``by``: ``"key"`` keeps one row a key, the position of its last message; ``"message"`` one row a message, for
    ``order="none"``. A message without a key always has a row of its own.

    Every method takes the user's ``psycopg.Connection`` or ``AsyncConnection``, which a pool may have given, and acts
    in its transaction alone. Nothing is kept between calls: an instance may be shared by threads and tasks, and
    pickled. With the async one everything that is awaited may be cancelled: then the transaction is rolled back.

    All raise ``ConfigError`` where somebody has to change something (no tables, no permission, a replica, a
    transaction that cannot hold both), which stops a consumer in order; and ``SourceError`` for the rest, with
    ``retryable=True`` where the same transaction may succeed the next time (no connection, a serialization failure, a
    deadlock, a timeout). Errors of the user's own statements are left as they are.
    """

    def __init__(self, subscription: str, *, schema: str = SCHEMA, by: By = "key") -> None:
        check_subscription(subscription)
        check_schema_name(schema)
        if by not in ("key", "message"):
            raise ConfigError(f'by={by!r} is unknown: use "key" or "message"')
        self._subscription = subscription
        self._schema = schema
        self._by: By = by
        self._claims = Claims(subscription, schema)

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
        """A transaction around the effect of one message: ``async with positions.once(connection, message) as fresh:``.

        ``fresh``: the message is to have its effect in this block; False = it had it. The end of the block commits
        both; an exception rolls both back and goes on. The connection must be in no transaction yet. Where the result
        of the COMMIT is not known, the next attempt finds out.
        """
        steps = self._claims.one(message, row_of(message, self._by))
        return block(connection, steps, self._where)

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
        """The same for a batch: the messages that are to have their effect, in the order given; all, or none."""
        steps = self._claims.all(messages, [row_of(message, self._by) for message in messages])
        return block(connection, steps, self._where)

    # --- inside a transaction of the caller's own

    @overload
    def claim(self, connection: AsyncConnection[Any], message: Message) -> Awaitable[bool]: ...

    @overload
    def claim(self, connection: Connection[Any], message: Message) -> bool: ...

    def claim(self, connection: AsyncConnection[Any] | Connection[Any], message: Message) -> Awaitable[bool] | bool:
        """Whether the message is to have its effect in the transaction that is open; False = it had it.

        Claim a message once in a transaction, and commit that before the handler returns. A connection with autocommit
        has to be inside ``connection.transaction()``.
        """
        steps = self._claims.one(message, row_of(message, self._by))
        return inside(connection, steps, self._where)

    @overload
    def claim_all(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> Awaitable[list[Message]]: ...

    @overload
    def claim_all(self, connection: Connection[Any], messages: Sequence[Message]) -> list[Message]: ...

    def claim_all(
        self, connection: AsyncConnection[Any] | Connection[Any], messages: Sequence[Message]
    ) -> Awaitable[list[Message]] | list[Message]:
        """The same for a batch: the messages that are to have their effect, in the order given."""
        steps = self._claims.all(messages, [row_of(message, self._by) for message in messages])
        return inside(connection, steps, self._where)

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
        """Delete the rows of a topic, of one partition, or of positions ``below``; returns how many.

        Safe for what never comes again, dead letters included: below the position that every consumer of the
        subscription has committed. A message whose row is gone has its effect again. Idempotent.
        """
        return inside(connection, self._forgetting(topic, partition, below), self._where)

    @overload
    def unfence(self, connection: AsyncConnection[Any], topic: str) -> Awaitable[int]: ...

    @overload
    def unfence(self, connection: Connection[Any], topic: str) -> int: ...

    def unfence(self, connection: AsyncConnection[Any] | Connection[Any], topic: str) -> Awaitable[int] | int:
        """Forget the epochs of a topic, those of kept attempts too, and no position; returns of how many positions.

        For epochs that begin anew. Effects stay exactly once: positions alone see to that. Idempotent.
        """
        return inside(connection, self._unfencing(topic), self._where)

    def _forgetting(self, topic: str, partition: int | None, below: int | None) -> Steps[int]:
        of, end = (None if number is None else Int8(number) for number in (partition, below))
        selected = (self._subscription, topic, of, of, end, end)
        count = yield Statement(compose(_FORGET, self._schema), selected)
        yield Statement(compose(_FORGET_LETTERS, self._schema), selected)
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
