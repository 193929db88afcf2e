"""Topics: a recreated topic is refused, and forget deletes rows that are no longer needed."""

from __future__ import annotations

import psycopg
import pytest

from lanes.errors import ConfigError
from lanes_postgres import Positions
from tests.postgres.tables import Effects, handle, message, partition

Connection = psycopg.Connection


def test_a_recreated_topic_is_refused(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    first, second, unknown = (partition(incarnation=name) for name in ("made-1", "made-2", ""))
    assert handle(positions, connection, effects, message(5, b"k", unknown), message(6, b"k", first)) == [True, True]
    with pytest.raises(ConfigError, match=r"'made-2'.*'made-1'.*Positions\.forget"):
        handle(positions, connection, effects, message(7, b"k", second))
    # A source without an incarnation, such as history from a table, has the same rows.
    assert handle(positions, connection, effects, message(6, b"k", unknown), message(7, b"k", unknown)) == [False, True]
    with connection.transaction():
        assert positions.forget(connection, "orders") == 1
    assert handle(positions, connection, effects, message(1, b"k", second)) == [True]


def test_forget_deletes_the_selected_rows(connection: Connection, effects: Effects) -> None:
    positions, others = Positions("books", schema=effects.schema), Positions("mails", schema=effects.schema)
    messages = [message(position, None, partition(number)) for number in (0, 1) for position in (1, 2, 3)]
    assert all(handle(positions, connection, effects, *messages) + handle(others, connection, effects, *messages))
    with connection.transaction():
        assert positions.forget(connection, "orders", partition=0, below=3) == 2
        assert positions.forget(connection, "orders", partition=0, below=3) == 0
        assert positions.forget(connection, "orders", below=2) == 1
        assert positions.forget(connection, "no such topic") == 0
    assert handle(positions, connection, effects, *messages) == [True, True, False, True, False, False]
    with connection.transaction():
        assert positions.forget(connection, "orders") == 6
    assert not any(handle(others, connection, effects, *messages))
    assert effects.kept()["lanes_topics"] == 1
