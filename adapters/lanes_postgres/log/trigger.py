"""The trigger that gives each append its place in the order of the commits. Without it a message is never read."""

from __future__ import annotations

from typing import Final, LiteralString, NamedTuple

from psycopg import sql

from lanes_postgres.steps import Statement, Steps

TRIGGER: Final = "lanes_log_ticket"

_FIND: Final[LiteralString] = (
    "SELECT tgenabled::text, tgdeferrable AND tginitdeferred FROM pg_trigger "
    "WHERE tgname = %s AND tgrelid = to_regclass(%s) AND NOT tgisinternal"
)


class Fault(NamedTuple):
    """A fault of the trigger.

    Attributes:
        text: The fault.
        remedy: How to mend it.
    """

    text: str
    remedy: str


def checking(schema: str, relation: str | None = None) -> Steps[Fault | None]:
    """Return the fault of the trigger; None = the trigger orders the messages.

    ``relation`` = the quoted name of a user's table; None = the table of the logs with their own messages.
    """
    name = sql.Identifier(schema, "lanes_log_messages").as_string(None) if relation is None else relation
    missing = "migrate a new schema" if relation is None else "execute the statement of Log.over(…).migration()"
    found = yield Statement(_FIND.encode(), (TRIGGER, name))
    if found is None:
        return Fault(f"{TRIGGER} is missing on {name}, so appended messages are never read", missing)
    if found[0] not in ("O", "A"):
        return Fault(
            f"{TRIGGER} is disabled on {name}, so appended messages are never read",
            f"ALTER TABLE {name} ENABLE TRIGGER {TRIGGER}",
        )
    if not found[1]:
        return Fault(
            f"{TRIGGER} on {name} is not deferred, so messages have no order of commits", "migrate a new schema"
        )
    return None
