"""The call that gives positions to committed messages. The function ``lanes_log_sequence`` has the algorithm."""

from __future__ import annotations

from typing import Final, LiteralString

from psycopg.types.numeric import Int4

from lanes_postgres.steps import Statement, Steps, compose

BATCHES: Final = 5_000
"""Number of batches that one call gives positions to, at most."""

_SEQUENCE: Final[LiteralString] = "SELECT {schema}.lanes_log_sequence(%s)"


def sequencing(schema: str) -> Steps[int | None]:
    """Give positions to committed messages of all logs of a schema, in a transaction of its own.

    Returns the number of batches; ``None`` = another session gives positions at this moment.
    """
    found = yield Statement(compose(_SEQUENCE, schema), (Int4(BATCHES),))
    assert found is not None, "a function returns a row"
    count: int | None = found[0]
    return count
