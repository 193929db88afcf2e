"""Attempts in a store, through crashes, rebalances and failures of the store, are bounded and never lost."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from lanes import Message, Retry, Settings
from memsource import App, MemoryAttempts, World, faults, simulate
from memsource.sim.plans.plan import FAULT_KINDS

ATTEMPTS = 4
ALL = faults(**{kind: 2 if kind in ("crash", "rebalance", "redeliver", "io_fails") else 1 for kind in FAULT_KINDS})
CRASHES = faults(crash=3, rebalance=2, commit_fails=1, letter_fails=1, slow=1)
POISONED = 5
"""Distance between the positions that always fail; the position after each fails a few times."""


class Job:
    """The handler, the store, and the attempts of each message until its success."""

    def __init__(self, world: World, poison: str) -> None:
        self.world = world
        self.store = MemoryAttempts(world.io, seconds=0.02)
        self.settings = Settings(retry=Retry(attempts=ATTEMPTS, backoff=0.1), poison=poison)  # type: ignore[arg-type]
        self.letters = poison in ("skip", "block_and_dlq")
        self.done: set[tuple[int, int]] = set()
        self.calls: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def __call__(self) -> App:
        return App(handler=self.handle, settings=self.settings, dead_letters=self.letters, attempts=self.store)

    async def handle(self, message: Message) -> None:
        place = message.partition.id.number, message.position
        # An unsettled success may repeat (at least once).
        if place not in self.done:
            self.calls[place].append(message.attempt)
        await self.world.io("work", 0.05)
        rest = message.position % POISONED
        if rest == 0 or (rest == 1 and message.attempt < ATTEMPTS):
            raise ValueError("poison")
        self.done.add(place)


@pytest.mark.long
@pytest.mark.parametrize("poison", ["skip", "block", "block_and_dlq"])
def test_no_checker_finds_anything_with_kept_attempts(poison: str) -> None:
    @simulate(runs=8, faults=ALL, seed=500, partitions=3)
    async def test(world: World) -> None:
        world.produce("orders", n=40, keys=9, keyless=0.2, gaps=0.1)
        world.workers(2, make=Job(world, poison))
        await world.settled()

    test()


@pytest.mark.long
@pytest.mark.parametrize("personality", ["kafka", "jetstream"])
def test_a_message_has_its_attempts_once_and_one_more_for_each_crash(personality: Any) -> None:
    crashed = went_on = 0

    @simulate(runs=24, faults=CRASHES, seed=70, partitions=3, personalities=[personality])
    async def test(world: World) -> None:
        nonlocal crashed, went_on
        job = Job(world, "skip")
        world.produce("orders", n=30, keys=6)
        world.workers(2, make=job)
        await world.settled()
        crashes = world.injection.happened["fault: crash"]
        crashed += crashes
        for attempts in job.calls.values():
            assert attempts == sorted(attempts), "attempts never fall"
            assert attempts[-1] <= ATTEMPTS
            assert len(attempts) <= ATTEMPTS + crashes
            went_on += len(attempts) > len(set(attempts))
        given_up = {letter.position for letter in world.dead_letters}
        assert all(position % POISONED == 0 for position in given_up), "a success at the last attempt is kept"
        world.check(state=lambda: sorted({(letter.partition, letter.position) for letter in world.dead_letters}))

    test()
    assert crashed > 8
    assert went_on > 0
