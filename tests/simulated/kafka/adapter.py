"""``lanes_kafka`` as an adapter of the harness: its broker, and the replacements of its thread, queue and clock."""

from __future__ import annotations

import concurrent.futures
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import lanes_kafka.broker
import lanes_kafka.client.intake
import lanes_kafka.client.mailbox
import lanes_kafka.client.membership
import lanes_kafka.client.prefetch
import lanes_kafka.client.read_rest
import lanes_kafka.client.thread
import lanes_kafka.client.topics
import lanes_kafka.dead_letters.producer
from memsource.adapters.runs import Scenario
from memsource.adapters.threads import SteppedQueue, SteppedThread, monotonic, replaced, sleep, wait
from memsource.sim.loop.event_loop import GROUP
from tests.simulated.kafka.broker import SimulatedKafka
from tests.simulated.kafka.events import Extras

POLL: Final = 1.0
"""Seconds that a turn of an idle thread takes, unless a command or a change at the broker ends it. The adapter's own
0.02 s would be most of a run."""

ANSWER_POLL: Final = 0.1
"""Seconds between two polls while commits wait, for the same reason longer than in the adapter."""

REST: Final = 0.2
"""Seconds of the rest between small reads. The messages of a run arrive with longer pauses than in the adapter's own
0.01 s."""

ASK_EVERY: Final = 4.0
"""Seconds between two regular questions for the topic ids, for the same reason. Each commit asks too."""

_RETAINS: Final = 0.2
"""Share of the runs in which retention deletes messages."""

_CUTS_DRAINS: Final = 0.2
"""Share of the runs in which members are cut off in their drains."""

_FORBIDS: Final = 0.15
"""Share of the runs in which the user of the members loses a permission for a while."""

_WRITES: Final = 0.25
"""Share of the runs with dead letters at the broker."""


_WAKES: Final = 0.2
"""Share of the runs in which members wake from freezes that are about as long as a session."""


_RECREATES: Final = 0.15
"""Share of the runs in which the topic is deleted and created again."""

_STATIC: Final = 0.2
"""Share of the runs with static members."""

_LAGS: Final = 0.12
"""Share of the runs in which commits arrive after their timeout."""

_DEAFENS: Final = 0.5
"""Share of the runs with long freezes in which a client gets no answer after a freeze."""

_FORGETS: Final = 0.1
"""Share of the runs in which clients forget questions."""

_POLLS: Final = 0.1
"""Share of the runs with a ``max.poll.interval.ms`` that is hardly longer than the longest drain."""


class KafkaAdapter:
    """The parts that ``lanes_kafka`` supplies to a run. One object makes one run at a time."""

    name = "kafka"
    _extras = Extras()

    def scenario(self, drawn: Scenario, rng: Random) -> Scenario:
        """Draw the events of the broker that only some runs have, and the traffic of these runs."""
        # Each further draw follows the earlier ones, so that most seeds keep their runs.
        self._extras = Extras(
            retains=rng.random() < _RETAINS,
            writes=rng.random() < _WRITES,
            cuts_drains=rng.random() < _CUTS_DRAINS,
            forbids=rng.random() < _FORBIDS,
            wakes=rng.random() < _WAKES,
            recreates=rng.random() < _RECREATES,
            static=rng.random() < _STATIC,
        )
        if self._extras.static:
            # Static members are meant for deployments that stop or end one process after the other.
            drawn = replace(drawn, deploys=rng.choice(["stop", "stop", "kill"]))
        self._extras = replace(self._extras, lags=rng.random() < _LAGS)
        self._extras = replace(self._extras, polls=rng.random() < _POLLS)
        self._extras = replace(self._extras, forgets=rng.random() < _FORGETS)
        if self._extras.wakes:
            self._extras = replace(self._extras, deafens=rng.random() < _DEAFENS)
        if self._extras.polls:
            self._extras = replace(self._extras, cuts_drains=True)
            drawn = replace(drawn, settings=replace(drawn.settings, drain_timeout=4.0))
        if self._extras.retains:
            # Retention deletes messages below the positions that an owner has handed over.
            drawn = replace(drawn, rebalances=True)
        if self._extras.cuts_drains:
            # The commit of a gap after the last message is the last step of a drain.
            return replace(drawn, ends=True, rebalances=True)
        return drawn

    def broker(self, rng: Random) -> SimulatedKafka:
        self.last = SimulatedKafka(rng, extras=self._extras)
        # ``seams`` puts the real limits back.
        limits: Any = lanes_kafka.client
        limits.thread.BATCH, limits.prefetch.READ_AHEAD = self.last.batch, self.last.read_ahead
        return self.last

    def seams(self) -> AbstractContextManager[object]:
        time = SimpleNamespace(monotonic=monotonic, sleep=sleep)
        futures = SimpleNamespace(wait=wait, Future=concurrent.futures.Future)
        client, producer = lanes_kafka.client, lanes_kafka.dead_letters.producer
        return replaced(
            (client.thread, "threading", SimpleNamespace(Thread=SteppedThread)),
            (client.thread, "AdminClient", self._admin),
            (client.thread, "POLL", POLL),
            (client.thread, "_ANSWER_POLL", ANSWER_POLL),
            (client.read_rest, "REST", REST),
            # Each run draws these two.
            (client.thread, "BATCH", client.thread.BATCH),
            (client.prefetch, "READ_AHEAD", client.prefetch.READ_AHEAD),
            (client.mailbox, "SimpleQueue", SteppedQueue),
            (client.topics, "time", time),
            (client.topics, "ASK_EVERY", ASK_EVERY),
            (client.intake, "time", time),
            (client.membership, "time", time),
            (lanes_kafka.broker, "time", time),
            (lanes_kafka.broker, "AdminClient", self._admin),
            (lanes_kafka.broker, "concurrent", SimpleNamespace(futures=futures)),
            (producer, "threading", SimpleNamespace(Thread=SteppedThread)),
            (producer, "SimpleQueue", SteppedQueue),
            (producer, "Producer", self._producer),
            (producer, "monotonic", monotonic),
        )

    def _admin(self, settings: dict[str, Any]) -> Any:
        return self.last.admin(_member())

    def _producer(self, settings: dict[str, Any]) -> Any:
        return self.last.producer(_member(), settings)


def _member() -> str:
    member = GROUP.get()
    assert member is not None, "only members have clients"
    return member
