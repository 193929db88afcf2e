"""PostgreSQL for ``lanes``: positions in the transaction of the effect, so that each message has its effect once."""

from __future__ import annotations

from lanes_postgres.migrations import check_schema, migrate
from lanes_postgres.positions import Positions

__all__ = ["Positions", "check_schema", "migrate"]
