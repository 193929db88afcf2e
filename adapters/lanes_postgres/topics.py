"""Stores the topics of a subscription, each with its number and its incarnation."""

from __future__ import annotations

from typing import Final, LiteralString

from lanes.errors import ConfigError, SourceError
from lanes_postgres.steps import Statement, Steps, compose

TRIES: Final = 5
"""Maximum number of reads of a row that other transactions change. After these reads the call raises a retryable
error."""

_FIND: Final[LiteralString] = "SELECT id, incarnation FROM {schema}.lanes_topics WHERE subscription = %s AND topic = %s"
_ADD: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_topics (subscription, topic, incarnation) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
)
_ADOPT: Final[LiteralString] = (
    "UPDATE {schema}.lanes_topics SET incarnation = %s WHERE id = %s AND incarnation = '' RETURNING 1"
)


class Topics:
    """The topics of one subscription in one schema. Immutable; performs no I/O."""

    def __init__(self, subscription: str, schema: str) -> None:
        self._subscription = subscription
        self._schema = schema
        self._find = compose(_FIND, schema)
        self._add = compose(_ADD, schema)
        self._adopt = compose(_ADOPT, schema)

    def of(self, topic: str, incarnation: str) -> Steps[int]:
        """Return the number of a topic, and register a new topic.

        An ``incarnation`` of "" is unknown, and matches every incarnation. Raises ``ConfigError`` if the stored rows
        belong to another incarnation of the topic.
        """
        for _ in range(TRIES):
            found = yield Statement(self._find, (self._subscription, topic))
            if found is None:
                yield Statement(self._add, (self._subscription, topic, incarnation))
                continue
            number, kept = found
            if not incarnation or kept == incarnation:
                return int(number)
            if kept:
                raise ConfigError(
                    f"subscription {self._subscription!r}: the topic {topic!r} was created again as {incarnation!r}, "
                    f"and the schema {self._schema!r} has positions of {kept!r}, so new messages would count as done. "
                    "Use another subscription, or call Positions.forget after the old topic is handled"
                )
            yield Statement(self._adopt, (incarnation, number))
        raise being_changed(self._subscription, topic)


def being_changed(subscription: str, what: str) -> SourceError:
    """Return the error for a row that other transactions change repeatedly, or that the database user may not read."""
    return SourceError(
        f"subscription {subscription!r}: other transactions change {what}, or this user may not see it; repeat the "
        "transaction",
        retryable=True,
    )
