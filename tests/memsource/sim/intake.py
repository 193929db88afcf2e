"""A naive second opinion about partitions that deliver nothing although messages wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import anyio

from lanes.observe.status import Status
from memsource.kafka.broker import KafkaBroker
from memsource.sim.world.worker import Worker
from memsource.sim.world.world import World
from tests.memsource.sim.watched import Watched

AFTER: Final = 4.0
"""``Settings.unhealthy_after`` of the consumers."""

_EVERY: Final = 0.25
_PERIOD: Final = 1.0
"""Seconds between two looks of the consumer itself."""

_SLACK: Final = _PERIOD + 2 * _EVERY

_TOLD: Final = AFTER + 3 * _PERIOD + 2 * _EVERY
"""Seconds after which the health has to name a silence.

After a delivery one look finds the delivery, the next one starts the silence, and a look names it once it has lasted
for more than ``AFTER``.
"""


class IntakeOpinion:
    """Compares the health of all workers with the positions and logs of the broker.

    The findings are ``SilenceTold`` (the health does not name a silence), and ``SilenceIsReal`` (the health names a
    silence that is none).
    """

    def __init__(self, world: World, broker: KafkaBroker) -> None:
        self._world = world
        self._broker = broker
        # The epoch and the position at which a partition waits, and since when.
        self._since: dict[tuple[str, str], tuple[tuple[int, int | None], float]] = {}
        self._real: dict[tuple[str, str], float] = {}

    async def compare(self, workers: Iterable[Worker], sources: dict[str, Watched]) -> None:
        """Compare once for each worker, and wait until the next comparison is due."""
        for worker in workers:
            if worker.consumer.ready:
                self._compare(worker, sources[worker.name].positions())
        await anyio.sleep(_EVERY)

    def _compare(self, worker: Worker, positions: dict[str, int]) -> None:
        now, status = self._world.now, worker.consumer.status()
        reasons = worker.consumer.health().reasons
        named = {reason.partition(" delivers nothing for ")[0] for reason in reasons if " delivers nothing " in reason}
        for name, partition in status.partitions.items():
            place = worker.name, name
            position = positions.get(name)
            end = self._readable_end(int(name.rpartition("/")[2]))
            waits = position is not None and position < end and _has_room(status)
            waits = waits and not (partition.ahead_reached or partition.full or partition.draining)
            at = partition.epoch, position
            if not waits:
                self._since.pop(place, None)
            elif self._since.get(place, ((0, -1), 0.0))[0] != at:
                self._since[place] = at, now
            lasted = now - self._since[place][1] if waits else 0.0
            if lasted > AFTER - _SLACK:
                self._real[place] = now
            if lasted > _TOLD and name not in named:
                self._world.find("SilenceTold", f"{place}: silent for {lasted:g} s at {position} of {end}: {reasons}")
            if name in named and now - self._real.get(place, -1e9) > _SLACK:
                self._world.find("SilenceIsReal", f"{place}: {reasons}, and it waited for {lasted:g} s until {end}")

    def _readable_end(self, number: int) -> int:
        """The end of the messages that a client reads: no message from an open transaction on."""
        log, open_at = self._broker.group.topic.log(number), self._broker.transactions.get(number)
        return log.end if open_at is None else open_at


def _has_room(status: Status) -> bool:
    return status.taking and not status.paused and status.in_flight < status.max_in_flight
