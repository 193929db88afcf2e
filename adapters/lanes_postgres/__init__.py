"""Uses PostgreSQL as a broker, and as a store of exactly-once effects, attempts and partition states.

Reading order: ``log`` (an ordered log), ``subscription`` (its source), ``ring`` (ranges of slots with owners),
``dead_letters``, ``positions``, ``claims``, ``floors``, ``rows``, ``topics``, ``attempts``, ``states``,
``advisory_locks``, ``lock_session``, ``address``, ``connecting``, ``cancellation``, ``transactions``, ``steps``,
``migrations``, ``errors``, ``names``; and the folder ``cli``.
"""

from __future__ import annotations

try:
    import psycopg  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "psycopg":
        raise
    raise ImportError(
        "lanes_postgres needs psycopg: pip install '.[postgres]' in the checkout of lanes",
        name="psycopg",
    ) from error
except ImportError as error:
    if "no pq wrapper" not in str(error):
        raise
    raise ImportError(
        "psycopg finds no libpq, the C library of PostgreSQL: pip install 'psycopg[binary]', or install libpq with the "
        "packages of the system",
        name="psycopg",
    ) from error

from lanes_postgres.advisory_locks import AdvisoryLocks
from lanes_postgres.attempts import PostgresAttempts
from lanes_postgres.dead_letters import PostgresDeadLetters
from lanes_postgres.log.appending import Log, Record
from lanes_postgres.log.over import Columns
from lanes_postgres.migrations import check_schema, migrate
from lanes_postgres.positions import Positions
from lanes_postgres.ring.range_map import RangeEvent, RangeMap, RangeMember
from lanes_postgres.states import PostgresStates
from lanes_postgres.subscription.source import PostgresSource

__all__ = [
    "AdvisoryLocks",
    "Columns",
    "Log",
    "Positions",
    "PostgresAttempts",
    "PostgresDeadLetters",
    "PostgresSource",
    "PostgresStates",
    "RangeEvent",
    "RangeMap",
    "RangeMember",
    "Record",
    "check_schema",
    "migrate",
]
