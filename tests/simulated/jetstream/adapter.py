"""``lanes_jetstream`` as an adapter of the harness."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any, Final

from lanes import Settings
from memsource.adapters.runs import Scenario
from tests.simulated.jetstream.broker import JetStreamBroker, Use
from tests.simulated.jetstream.seams import seams

_DURABLE: Final = 0.4
"""Share of the runs in which the members take turns on one durable consumer, in place of a cohort."""

_CHANGED: Final = 0.3
"""Share of the runs in which some processes have other bounds, as during a deployment."""

_WIDE: Final = 0.25
"""Share of the runs with dead letters at the server, deployments, and faults of members that wait."""

_DEPLOYS: Final = ("", "stop", "kill", "kill")
"""Ends of the processes of a durable in a rolling deployment; the cohort has joins, leaves and drains."""

_SMALL: Final = 0.25
"""Share of the runs in which a member has room for few messages, or for fewer than it has partitions."""


class JetStreamAdapter:
    """The side of ``lanes_jetstream``. One object makes one run at a time."""

    name = "jetstream"
    _use: Use = "cohort"
    _requeues = False
    _wide = False

    def scenario(self, drawn: Scenario, rng: Random) -> Scenario:
        """Draw the use of the stream, and the bounds that fit it."""
        self._use = "durable" if rng.random() < _DURABLE else "cohort"
        settings = drawn.settings
        if rng.random() < _SMALL:
            few = rng.choice([1, 1, 2])
            settings = replace(
                settings,
                concurrency=min(few, settings.concurrency),
                max_in_flight=few,
                max_in_flight_per_partition=None,
            )
        others: tuple[Settings, ...] = ()
        if rng.random() < _CHANGED:
            few = rng.choice([1, 2, 4, 12])
            others = (
                replace(
                    settings,
                    concurrency=min(few, settings.concurrency),
                    max_in_flight=few,
                    max_in_flight_per_partition=None,
                ),
            )
        self._requeues = bool(others)
        self._wide = rng.random() < _WIDE
        deploys: Any = rng.choice(_DEPLOYS) if self._wide and self._use == "durable" else ""
        return replace(drawn, settings=settings, others=others, deploys=deploys)

    def broker(self, rng: Random) -> JetStreamBroker:
        self.last = JetStreamBroker(rng, self._use, requeues=self._requeues, wide=self._wide)
        return self.last

    def seams(self) -> AbstractContextManager[object]:
        return seams()
