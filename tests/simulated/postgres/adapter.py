"""``lanes_postgres`` as an adapter of the harness."""

from __future__ import annotations

from contextlib import AbstractContextManager
from random import Random
from typing import Final

from tests.simulated.postgres.broker import PostgresBroker
from tests.simulated.postgres.seams import seams

_WRITES: Final = 0.3
"""Share of the runs with dead letters in the table."""

_LATE: Final = 0.5
"""Share of the runs in which transactions become visible late."""


class PostgresAdapter:
    """The parts that ``lanes_postgres`` supplies to a run. One object makes one run at a time."""

    name = "postgres"

    def broker(self, rng: Random) -> PostgresBroker:
        writes, late = rng.random() < _WRITES, rng.random() < _LATE
        self.last = PostgresBroker(rng, writes=writes, late=late)
        return self.last

    def seams(self) -> AbstractContextManager[None]:
        return seams()
