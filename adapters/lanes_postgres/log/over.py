"""Describes a table of the user that a log reads, and makes the statement that installs the trigger."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import sql

from lanes.arguments import names_unknown_options


@names_unknown_options("lanes_postgres.Columns")
class Columns(NamedTuple):
    """The columns of a table that a log reads. The log returns texts, numbers and JSON values as UTF-8 text.

    Attributes:
        id: Column of the unique id, a ``bigint`` or ``integer``. The order of the ids may differ from the order of the
            messages.
        key: Column of the key. ``None`` = the messages have no order.
        value: Column of the payload.
        time: Column of the message time, a ``timestamptz``.
        subject: Column of the subject. ``None`` = the name of the log.
        headers: Column of the headers, a JSON object of texts. ``None`` = no headers.
    """

    id: str = "id"
    key: str | None = "key"
    value: str = "value"
    time: str = "time"
    subject: str | None = None
    headers: str | None = None


class Over(NamedTuple):
    """The table and the columns of a log."""

    table: str
    columns: Columns

    def migration(self, log: str, partitions: int, schema: str) -> str:
        """Return the statement that creates the log, the trigger on the table, and the view of the messages."""
        statement = sql.SQL("SELECT {}({}, {}::regclass, {}, {})").format(
            sql.Identifier(schema, "lanes_log_over"),
            sql.Literal(log),
            sql.Literal(self.table),
            sql.Literal(partitions),
            sql.SQL(", ").join(sql.Literal(column) for column in self.columns),
        )
        return statement.as_string(None)
