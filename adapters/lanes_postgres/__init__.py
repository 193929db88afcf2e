"""PostgreSQL for ``lanes``: positions in the transaction of the effect, so that each message has its effect once; and
the attempts of failed messages, for the next owner of their partition."""

from __future__ import annotations

from lanes_postgres.attempts import PostgresAttempts
from lanes_postgres.migrations import check_schema, migrate
from lanes_postgres.positions import Positions

__all__ = ["Positions", "PostgresAttempts", "check_schema", "migrate"]
