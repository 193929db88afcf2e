"""A dead letter that is handled again has its effect once, even after later messages of its key."""

from __future__ import annotations

import psycopg
import pytest

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import message_of
from lanes.errors import ConfigError
from lanes_postgres import Positions, PostgresDeadLetters
from tests.postgres.tables import Effects, handle, message, partition

Connection = psycopg.Connection


def dead_letter(position: int, key: bytes | None = b"k") -> Message:
    return message_of(
        DeadLetter(
            id="i",
            source="orders",
            partition=0,
            position=position,
            subject="s",
            key=key,
            value=b"",
            headers=(),
            attempts=5,
            error_type="E",
            error_text="",
            epoch=1,
            time=0.0,
        )
    )


@pytest.mark.parametrize("by", ["key", "message"])
def test_a_dead_letter_has_its_effect_once_after_later_messages(
    by: str, connection: Connection, effects: Effects
) -> None:
    positions = Positions("books", schema=effects.schema, by=by)  # type: ignore[arg-type]
    live = [message(number, b"k", partition(epoch=9)) for number in (4, 6)]
    assert handle(positions, connection, effects, *live) == [True, True]
    # Message 5 became a dead letter in the meantime; message 6 did not, so the dead letter of 6 is false.
    assert handle(positions, connection, effects, dead_letter(5), dead_letter(5), dead_letter(6)) == [
        True,
        False,
        False,
    ]
    assert effects.all() == [4, 6, 5]
    # The epoch of a dead letter is that of the assignment that gave the message up.
    assert handle(positions, connection, effects, dead_letter(8), dead_letter(8)) == [True, False]
    with pytest.raises(ZeroDivisionError), positions.once(connection, dead_letter(3)):
        raise ZeroDivisionError
    assert handle(positions, connection, effects, dead_letter(3), dead_letter(3)) == [True, False]


def test_a_handled_dead_letter_counts_for_its_redelivered_message(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert handle(positions, connection, effects, dead_letter(5), message(5), message(6), dead_letter(5)) == [
        *(True, False, True, False)
    ]
    assert handle(positions, connection, effects, dead_letter(2, None), message(2, None), dead_letter(2, None)) == [
        *(True, False, False)
    ]
    batch = [dead_letter(1), message(7), dead_letter(5), dead_letter(9, b"other")]
    with positions.once_all(connection, batch) as fresh:
        assert fresh == [batch[0], batch[1], batch[3]]
    assert handle(positions, connection, effects, message(10, b"other"), dead_letter(9, b"other")) == [True, False]


@pytest.mark.parametrize(
    "address", ["postgresql://u:s3cret@h/db", "host=h", "user=u password=s3cret", "Password = s3cret"]
)
def test_swapped_arguments_are_refused_without_the_password(address: str) -> None:
    with pytest.raises(ConfigError, match="pass the connection string first") as refused:
        PostgresDeadLetters("parcels", address)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("name", ["", 201 * "x", "a\0b", "\ud800"])
def test_a_name_that_the_table_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="must be a str of 1 to 200 characters, without zero bytes; use the name of the sub"
    ):
        PostgresDeadLetters("", name)
