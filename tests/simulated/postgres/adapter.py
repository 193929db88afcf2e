"""``lanes_postgres`` as an adapter of the harness."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Final

from memsource.adapters.runs import Scenario
from memsource.checkers import Checker, MakeChecker, UnownedNeverFed
from memsource.history.timeline import Timeline
from tests.simulated.postgres.broker import PostgresBroker
from tests.simulated.postgres.ranged import RangedBroker
from tests.simulated.postgres.seams import seams

_WRITES: Final = 0.3
"""Share of the runs with dead letters in the table."""

_KEEPS_ATTEMPTS: Final = 0.4
"""Share of the runs with ranges whose members share a store of attempts."""

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


class RangesAdapter:
    """``lanes_postgres`` whose members own ranges of slots. One object makes one run at a time."""

    name = "ranges"

    def scenario(self, drawn: Scenario, rng: Random) -> Scenario:
        """Return a scenario with an order by key, and in most runs with messages without a key."""
        keyless = rng.choice([0.0, 0.1, 0.3, 0.3, 0.9])
        workers = rng.choice([1, 2, 2, 3, 3])
        keys = rng.choice([1, 3, 6, 12, 12])
        settings = replace(drawn.settings, order="key", keyless=rng.choice(["any", "any", "one_lane"]))
        kept = rng.random() < _KEEPS_ATTEMPTS
        return replace(drawn, settings=settings, keyless=keyless, workers=workers, keys=keys, keeps_attempts=kept)

    def broker(self, rng: Random) -> RangedBroker:
        writes, late = rng.random() < _WRITES, rng.random() < _LATE
        self.last = RangedBroker(rng, writes=writes, late=late)
        return self.last

    def checkers(self) -> Sequence[MakeChecker]:
        """Return the checkers of a run beside those of every run."""
        return (self._unowned,)

    def _unowned(self, timeline: Timeline) -> Checker:
        broker = self.last
        return UnownedNeverFed(timeline, owners=broker.owners, consumers=broker.consumers(), claims=broker.claims)

    def seams(self) -> AbstractContextManager[None]:
        return seams()
