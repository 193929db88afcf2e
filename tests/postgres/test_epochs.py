"""Epochs fence former owners: a lower fencing token is refused, and restarted epochs need unfence."""

from __future__ import annotations

import psycopg
import pytest

from lanes.errors import ConfigError, SourceError
from lanes_postgres import Positions
from tests.postgres.tables import Effects, handle, message, partition

Connection = psycopg.Connection


def test_a_lower_epoch_is_refused_and_an_equal_or_higher_one_passes(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert handle(positions, connection, effects, message(1, b"k", partition(epoch=7))) == [True]
    zombie = partition(epoch=6)
    with pytest.raises(SourceError, match=r"orders/0 position 2 has epoch 6.*with epoch 7") as refused:
        handle(positions, connection, effects, message(2, b"k", zombie))
    assert not refused.value.retryable
    assert handle(positions, connection, effects, message(1, b"k", zombie)) == [False], "the message had its effect"
    assert handle(positions, connection, effects, message(1, b"other", zombie)) == [True]
    assert handle(positions, connection, effects, message(2, b"k", partition(epoch=7))) == [True]
    assert handle(positions, connection, effects, message(3, b"k", partition(epoch=8))) == [True]
    with pytest.raises(SourceError, match="epoch 8"):
        handle(positions, connection, effects, message(4, b"k", partition(epoch=7)))
    assert effects.all() == [1, 1, 2, 3]


def test_a_partition_without_an_epoch_is_not_fenced(connection: Connection, effects: Effects) -> None:
    # A Kafka group and a Spark job have no token that rises across owners, so only positions count.
    positions = Positions("books", schema=effects.schema)
    assert handle(positions, connection, effects, message(1, b"k", partition(epoch=7)), message(2)) == [True, True]
    kafka = partition()
    kafka.assignment = 1
    assert handle(positions, connection, effects, message(2, b"k", kafka), message(3, b"k", kafka)) == [False, True]
    with pytest.raises(SourceError, match="epoch 7"):
        handle(positions, connection, effects, message(4, b"k", partition(epoch=6)))


def test_restarted_epochs_stop_the_consumer_until_unfence(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert handle(positions, connection, effects, message(1, b"k", partition(epoch=7))) == [True]
    owned = partition(epoch=1, live=True)
    with pytest.raises(ConfigError, match=r"this process owns the partition.*Positions\.unfence"):
        handle(positions, connection, effects, message(2, b"k", owned))
    with connection.transaction():
        assert positions.unfence(connection, "orders") == 1
        assert positions.unfence(connection, "orders") == 0
    assert handle(positions, connection, effects, message(1, b"k", owned), message(2, b"k", owned)) == [False, True]
