"""A table of the user that a log reads, and the statement that installs its trigger."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import sql


class Columns(NamedTuple):
    """The columns of a table that a log reads. A text, a number or a JSON value becomes its text in UTF-8.

    Attributes:
        id: A unique ``bigint`` or ``integer``. Its order may differ from the order of the messages.
        key: The key. ``None`` = the messages have no key, so they have no order.
        value: The payload.
        time: The time of the message, a ``timestamptz``.
        subject: The subject. ``None`` = the name of the log.
        headers: A JSON object of texts. ``None`` = no headers.
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
        """Return the statement that makes the log, its trigger and its view."""
        statement = sql.SQL("SELECT {}({}, {}::regclass, {}, {})").format(
            sql.Identifier(schema, "lanes_log_over"),
            sql.Literal(log),
            sql.Literal(self.table),
            sql.Literal(partitions),
            sql.SQL(", ").join(sql.Literal(column) for column in self.columns),
        )
        return statement.as_string(None)
