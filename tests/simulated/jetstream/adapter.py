"""``lanes_jetstream`` as an adapter of the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, Final

from lanes import Settings
from memsource.adapters.runs import SLOW, STUCK, Scenario
from tests.simulated.jetstream.broker import JetStreamBroker
from tests.simulated.jetstream.events import Extras, Use
from tests.simulated.jetstream.reports import reported
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

_REMOVES: Final = 0.15
"""Share of the runs in which the stream removes messages."""

_FORBIDS: Final = 0.1
"""Share of the runs in which the user of the members loses a permission for a while."""

_SEVERAL: Final = 0.3
"""Share of the runs with a durable in which several processes run at once, to share it or to compete for it."""

_SHRINKS: Final = 0.25
"""Share of the runs with a durable in which some processes have room for fewer messages than others leave behind."""

_TIGHT: Final = 0.15
"""Share of the runs with a cohort whose partitions have bounds below the room of the member, and slow handlers."""

_OFTEN_SLOW: Final = 0.4
"""Share of the handlers that take long in such a run."""

_LOSES: Final = 0.1
_LATER: Final = ((11.0, 3),) * 4
"""Share of the runs with a durable in which the server loses deliveries before and long after the end of a connection,
and the traffic that such a run has in addition."""

_FLICKERS: Final = 0.15
_MOMENTS: Final = (0.03, 0.1, 0.3)
"""Share of the runs with a durable in which a user pauses and resumes a member in each moment, so that takeovers are
cancelled; and the seconds of a moment."""


class JetStreamAdapter:
    """The parts that ``lanes_jetstream`` supplies to a run. One object makes one run at a time."""

    name = "jetstream"
    _use: Use = "cohort"
    _requeues = False
    _wide = False
    _extras = Extras()

    def scenario(self, drawn: Scenario, rng: Random) -> Scenario:
        """Draw the use of the stream, and the bounds that fit this use."""
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
        # Each further draw follows the earlier ones, so that most seeds keep their runs.
        self._extras = Extras(removes=rng.random() < _REMOVES, forbids=rng.random() < _FORBIDS)
        if self._use == "durable" and rng.random() < _SEVERAL:
            self._use = rng.choice(["shared", "contended"])
        # Two processes that compete for a moment, and a process whose acknowledgements are denied, leave more messages
        # than the next process has room for.
        self._requeues |= self._use == "contended" or self._extras.forbids
        if self._use == "shared":
            settings = replace(settings, order="none")
            others = tuple(replace(each, order="none") for each in others)
        if self._use == "durable" and rng.random() < _SHRINKS:
            many, few = rng.choice([6, 12]), rng.choice([1, 2])
            alike = replace(settings, max_in_flight_per_partition=None, max_ahead=50)
            settings = replace(alike, concurrency=rng.choice([1, 2, 4]), max_in_flight=many)
            others = (replace(alike, concurrency=1, max_in_flight=few),)
            deploys, self._requeues = rng.choice(_DEPLOYS), True
        if self._use == "durable" and rng.random() < _LOSES:
            self._extras = replace(self._extras, loses=True)
            further = sum(count for _, count in _LATER)
            drawn = replace(drawn, waves=(*drawn.waves, *_LATER), outcomes=(*drawn.outcomes, *(further * (0,))))
        if self._use == "cohort" and rng.random() < _TIGHT:
            # A partition at its bound keeps what has arrived, while other partitions take the whole room.
            settings = replace(settings, concurrency=2, max_in_flight=4, max_in_flight_per_partition=rng.choice([1, 2]))
            slow = [rng.choice((SLOW, STUCK)) if rng.random() < _OFTEN_SLOW else each for each in drawn.outcomes]
            drawn = replace(drawn, outcomes=tuple(slow), keys=12)
        flickers = 0.0
        if self._use == "durable" and rng.random() < _FLICKERS:
            self._extras, flickers = replace(self._extras, loses=True), rng.choice(_MOMENTS)
        return replace(drawn, settings=settings, others=others, deploys=deploys, flickers=flickers)

    def broker(self, rng: Random) -> JetStreamBroker:
        options: Any = {"requeues": self._requeues, "wide": self._wide, "extras": self._extras}
        self.last = JetStreamBroker(rng, self._use, **options)
        return self.last

    @contextmanager
    def seams(self) -> Iterator[None]:
        with seams(), reported(lambda pulls, text: self.last.judge_gap(pulls, text)):
            yield
