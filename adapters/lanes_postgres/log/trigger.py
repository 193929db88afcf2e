"""The trigger that gives each append its place in the order of the commits. Without it a message is never read.

A table of the user has more ways to lose messages silently, which are looked at here too.
"""

from __future__ import annotations

from typing import Final, LiteralString, NamedTuple

from psycopg import sql

from lanes_postgres.log.appending import LogFacts
from lanes_postgres.steps import Statement, Steps

TRIGGER: Final = "lanes_log_ticket"

_FIND: Final[LiteralString] = (
    "SELECT tgenabled::text, tgdeferrable AND tginitdeferred FROM pg_trigger "
    "WHERE tgname = %s AND tgrelid = to_regclass(%s) AND NOT tgisinternal"
)
# A view reads with the rights of its owner. Rows that a policy hides from the owner would look like deleted rows.
_FIND_OVER: Final[LiteralString] = (
    "SELECT rows.relrowsecurity AND NOT (owner.rolsuper OR owner.rolbypassrls) "
    "AND (rows.relforcerowsecurity OR NOT pg_has_role(owner.oid, rows.relowner, 'USAGE')), owner.rolname::text, "
    "EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = rows.oid) "
    "FROM pg_class AS rows CROSS JOIN pg_class AS view JOIN pg_roles AS owner ON owner.oid = view.relowner "
    "WHERE rows.oid = to_regclass(%s) AND view.oid = to_regclass(%s)"
)


class Fault(NamedTuple):
    """A fault of the trigger, or of the table of the user.

    Attributes:
        text: The fault.
        remedy: How to mend it.
    """

    text: str
    remedy: str


def checking(schema: str, facts: LogFacts | None = None) -> Steps[Fault | None]:
    """Return the fault of the trigger of a log; None = the trigger orders the messages.

    ``facts`` = None, or those of a log with its own messages: the table of the messages of ``append``.
    """
    relation = None if facts is None else facts.relation
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
    if facts is None or relation is None:
        return None
    view = sql.Identifier(schema, facts.messages).as_string(None)
    found_over = yield Statement(_FIND_OVER.encode(), (relation, view))
    if found_over is None:
        return Fault(f"the view {view} of {name} is missing, so its rows cannot be read", missing)
    hidden, owner, subscribed = found_over
    if hidden:
        return Fault(
            f"the row security of {name} may hide rows from {owner}, the owner of the view {view}, so messages would "
            "be lost",
            f"ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY, or give the view to a user with BYPASSRLS",
        )
    if subscribed and found[0] == "O":
        return Fault(
            f"{TRIGGER} does not fire for the rows that a logical replication inserts into {name}, so they are never "
            "read",
            f"ALTER TABLE {name} ENABLE ALWAYS TRIGGER {TRIGGER}",
        )
    return None
