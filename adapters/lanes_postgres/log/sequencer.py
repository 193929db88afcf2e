"""Gives positions to committed messages. The SQL function ``lanes_log_sequence`` contains the algorithm."""

from __future__ import annotations

from typing import Final, LiteralString

from psycopg.types.numeric import Int4

from lanes_postgres.steps import Statement, Steps, compose

BATCHES: Final = 5_000
"""Maximum number of batches to which one call gives positions."""

_SEQUENCE: Final[LiteralString] = "SELECT {schema}.lanes_log_sequence(%s)"


_LOOK: Final[LiteralString] = "SELECT done, ends FROM {schema}.lanes_log_look(%s, %s, %s)"


def looking(schema: str, log: int, partitions: int) -> Steps[tuple[int | None, list[int]]]:
    """Give positions to committed messages like ``sequencing``, and find the ends of the partitions of a log.

    Returns the number of batches, and the next position of each partition.
    """
    found = yield Statement(compose(_LOOK, schema), (Int4(BATCHES), Int4(log), Int4(partitions)))
    assert found is not None, "a function returns a row"
    done, ends = found
    return done, ends


def sequencing(schema: str) -> Steps[int | None]:
    """Give positions to committed messages of all logs of a schema, in a separate transaction.

    Returns the number of batches; ``None`` = another session gives positions now.
    """
    found = yield Statement(compose(_SEQUENCE, schema), (Int4(BATCHES),))
    assert found is not None, "a function returns a row"
    count: int | None = found[0]
    return count
