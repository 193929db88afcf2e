"""Checks the trigger that records the order of the commits. Sources skip messages that the trigger has not recorded.

The module also checks a user's table for other faults that silently lose messages.
"""

from __future__ import annotations

from typing import Final, LiteralString, NamedTuple

from psycopg import sql
from psycopg.types.numeric import Int4

from lanes_postgres.log.appending import LogFacts
from lanes_postgres.steps import Statement, Steps, compose

TRIGGER: Final = "lanes_log_ticket"

_FIND: Final[LiteralString] = (
    "SELECT tgenabled::text, tgdeferrable AND tginitdeferred FROM pg_trigger "
    "WHERE tgname = %s AND tgrelid = to_regclass(%s) AND NOT tgisinternal"
)
# A view reads with the rights of its owner. Rows that a policy hides from the owner would look like deleted rows.
_FIND_OVER: Final[LiteralString] = (
    "SELECT rows.relrowsecurity AND NOT (owner.rolsuper OR owner.rolbypassrls) "
    "AND (rows.relforcerowsecurity OR NOT pg_has_role(owner.oid, rows.relowner, 'USAGE')), owner.rolname::text "
    "FROM pg_class AS rows CROSS JOIN pg_class AS view JOIN pg_roles AS owner ON owner.oid = view.relowner "
    "WHERE rows.oid = to_regclass(%s) AND view.oid = to_regclass(%s)"
)

# A replication worker inserts into the table of its subscription. In a partitioned table, the row fires the trigger of
# its own partition.
_FIND_REPLICATED: Final[LiteralString] = (
    "WITH RECURSIVE replicated AS (SELECT srrelid AS relation FROM pg_subscription_rel WHERE srrelid IN ("
    "SELECT to_regclass(%s) UNION SELECT relid FROM pg_partition_tree(to_regclass(%s))) "
    "UNION SELECT inhrelid FROM replicated JOIN pg_inherits ON inhparent = relation) "
    "SELECT min(relation::regclass::text) FROM replicated JOIN pg_trigger ON tgrelid = relation "
    "JOIN pg_class ON pg_class.oid = relation WHERE tgname = %s AND tgenabled = 'O' AND relkind <> 'p'"
)
_FIND_MADE: Final[LiteralString] = (
    "SELECT coalesce(made, 0), ARRAY(SELECT role::regrole::text FROM {schema}.lanes_log_former_owners(id) AS role "
    "ORDER BY 1), ARRAY(SELECT role::regrole::text FROM {schema}.lanes_log_owners(to_regclass(relation)) AS role "
    "WHERE NOT has_function_privilege(role, to_regprocedure(format('%%I.lanes_log_ticket_%%s()', %s::text, id)), "
    "'EXECUTE') ORDER BY 1) FROM {schema}.lanes_logs WHERE id = %s"
)
_MADE: Final = 11
"""Schema version that introduced the current trigger and view of a log over a table."""

_ANEW: Final = "execute the statement of Log.over(…).migration() again, as the owner of the table"


class Fault(NamedTuple):
    """A fault of the trigger, or of the table of the user.

    Attributes:
        text: The fault.
        remedy: Action that repairs the fault.
    """

    text: str
    remedy: str


def checking(schema: str, facts: LogFacts | None = None) -> Steps[Fault | None]:
    """Return the fault of the trigger of a log; None = the trigger orders the messages.

    For a log with its own messages, or with ``facts=None``, the function checks the table to which ``append`` writes.
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
    hidden, owner = found_over
    if hidden:
        return Fault(
            f"the row security of {name} may hide rows from {owner}, the owner of the view {view}, so messages would "
            "be lost",
            f"ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY, or give the view to a user with BYPASSRLS",
        )
    replicated = yield Statement(_FIND_REPLICATED.encode(), (relation, relation, TRIGGER))
    if replicated is not None and replicated[0] is not None:
        return Fault(
            f"{TRIGGER} does not fire for the rows that a logical replication inserts into {replicated[0]}, so they "
            "are never read",
            f"ALTER TABLE {name} ENABLE ALWAYS TRIGGER {TRIGGER}",
        )
    return None


def upkeep(schema: str, facts: LogFacts) -> Steps[Fault | None]:
    """Return the maintenance that an upgrade or a new owner of the table requires; None = no maintenance.

    Sources can read the messages before this maintenance. A log with its own messages needs no maintenance.
    """
    if facts.relation is None:
        return None
    found = yield Statement(compose(_FIND_MADE, schema), (schema, Int4(facts.id)))
    if found is None:
        return None
    made, former, lacking = found
    if made < _MADE:
        return Fault(f"the trigger and the view of {facts.relation} are those of an older lanes", _ANEW)
    if former:
        return Fault(
            f"{', '.join(former)} may forge messages of {facts.relation}, because an owner keeps the right on the "
            "trigger's function",
            _ANEW,
        )
    if lacking:
        return Fault(
            f"{', '.join(lacking)} cannot add a partition to {facts.relation}, because a new owner has no right on the "
            "trigger's function",
            _ANEW,
        )
    return None
