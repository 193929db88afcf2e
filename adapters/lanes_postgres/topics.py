"""Topics: the number of each topic of a subscription, and which making of it the rows are of."""

from __future__ import annotations

from typing import Final, LiteralString

from lanes.errors import ConfigError, SourceError
from lanes_postgres.steps import Statement, Steps, compose

TRIES: Final = 5
"""Looks at a row that is being made or deleted by others, before the transaction is said to be one to repeat."""

_LOOK: Final[LiteralString] = "SELECT id, incarnation FROM {schema}.lanes_topics WHERE subscription = %s AND topic = %s"
_ADD: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_topics (subscription, topic, incarnation) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
)
_ADOPT: Final[LiteralString] = (
    "UPDATE {schema}.lanes_topics SET incarnation = %s WHERE id = %s AND incarnation = '' RETURNING 1"
)


class Topics:
    """The topics of one subscription in one schema. Frozen; performs nothing by itself."""

    def __init__(self, subscription: str, schema: str) -> None:
        self._subscription = subscription
        self._schema = schema
        self._look = compose(_LOOK, schema)
        self._add = compose(_ADD, schema)
        self._adopt = compose(_ADOPT, schema)

    def of(self, topic: str, incarnation: str) -> Steps[int]:
        """The number of a topic, which has one from here on.

        ``incarnation``: "" = not known, and goes with any. Raises ``ConfigError`` for another one than the rows have.
        """
        for _ in range(TRIES):
            found = yield Statement(self._look, (self._subscription, topic))
            if found is None:
                yield Statement(self._add, (self._subscription, topic, incarnation))
                continue
            number, kept = found
            if not incarnation or kept == incarnation:
                return int(number)
            if kept:
                raise ConfigError(
                    f"subscription {self._subscription!r}: messages of {topic!r} are of the topic made as "
                    f"{incarnation!r}, and what the schema {self._schema!r} has is of one made as {kept!r}: positions "
                    "begin anew with a topic, so the old ones would pass new messages for done. Use another "
                    "subscription, or Positions.forget when nothing of the old topic is left to be handled"
                )
            yield Statement(self._adopt, (incarnation, number))
        raise being_changed(self._subscription, topic)


def being_changed(subscription: str, what: str) -> SourceError:
    """What is raised when others change it again and again, or when it cannot be seen although it is there."""
    return SourceError(
        f"subscription {subscription!r}: {what} is being changed by others, or may not be seen by this user: repeat "
        "the transaction",
        retryable=True,
    )
