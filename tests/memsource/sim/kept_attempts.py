"""An application with attempts in a store, blocked and parked keys, and outages of the dead letters.

The checks compare each call of the handler with the store:

- ``AttemptsContinue``: an attempt is made again that the store had at the load, or has confirmed since.
- ``KeptBeforeRetry``: a retry starts before the store has confirmed the failed attempt.
- ``BlockedStays``: a message that a former owner has blocked is handled without an unblock.
- ``HandedOver``: a failed attempt is made again after a hand-over, in a run without a fault that could lose it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import anyio

from lanes import Attempt, Message, Partition, Retry, Settings
from lanes.config import Poison
from memsource import App, MemoryAttempts, World, faults

ATTEMPTS: Final = 4

POISONED: Final = 5
"""Distance between the positions that always fail; the position after each fails a few times."""

OUTAGE: Final = faults(rebalance=3, lost=1, letter_fails=12, commit_fails=2, crash=1, freeze=1)
"""Hand-overs and ends of leases while no dead letter is confirmed."""

MOVES: Final = faults(rebalance=8, letter_fails=4)
"""Hand-overs that lose nothing."""

_KEYS: Final = 9
_ACTIONS: Final = 8
_SECONDS: Final = (0.0, 0.02, 0.02, 0.4)
_LOSES_NOTHING: Final = frozenset({"rebalance", "letter_fails", "commit_fails", "redeliver", "clock_jump"})
"""Faults after which each failed attempt is still in the store before its partition has a new owner."""


class Store(MemoryAttempts):
    """A store that records what each assignment has loaded and written."""

    def __init__(self, world: World) -> None:
        super().__init__(self._io)
        self._world = world
        self._rng = random.Random(world.plan.seed)
        self.loaded: dict[Partition, Mapping[int, Attempt]] = {}
        self.confirmed: dict[tuple[Partition, int], int] = {}

    async def _io(self, name: str, _: float) -> None:
        # Concurrent calls end in any order.
        await self._world.io(name, self._rng.choice(_SECONDS))

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        found = await super().load(partition)
        self.loaded[partition] = found
        return found

    async def keep(self, message: Message, attempt: Attempt) -> None:
        await super().keep(message, attempt)
        self.confirmed[message.partition, message.position] = attempt.attempts


class Job:
    """The handler, the store, and the attempts of each message until its success."""

    def __init__(self, world: World, poison: Poison) -> None:
        self.world = world
        self.store = Store(world)
        self.settings = Settings(retry=Retry(attempts=ATTEMPTS, backoff=0.1), poison=poison)
        self.done: set[tuple[int, int]] = set()
        self.calls: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.failed: dict[tuple[int, int], int] = {}
        self.unblocked: set[bytes | None] = set()
        self.calm = {fault.kind for fault in world.plan.faults} <= _LOSES_NOTHING

    def __call__(self) -> App:
        return App(handler=self.handle, settings=self.settings, dead_letters=True, attempts=self.store)

    async def handle(self, message: Message) -> None:
        place = message.partition.id.number, message.position
        # An unsettled success may repeat (at least once).
        if place not in self.done:
            self.calls[place].append(message.attempt)
            self.check(place, message)
        await self.world.io("work", 0.05)
        rest = message.position % POISONED
        if rest == 0 or (rest == 1 and message.attempt < ATTEMPTS):
            self.failed[place] = message.attempt
            raise ValueError("poison")
        self.done.add(place)

    def check(self, place: tuple[int, int], message: Message) -> None:
        """Compare a call with the store."""
        loaded = self.store.loaded[message.partition].get(message.position)
        before = 0 if loaded is None else loaded.attempts
        kept = self.store.confirmed.get((message.partition, message.position), 0)
        what = f"{place} starts attempt {message.attempt}; loaded {loaded}, and kept {kept} since"
        if message.attempt <= max(before, kept):
            self.world.find("AttemptsContinue", what)
        if message.attempt > max(before, kept) + 1 and message.key not in self.unblocked:
            self.world.find("KeptBeforeRetry", what)
        blocked = loaded is not None and loaded.state == "blocked" and self.settings.poison != "skip"
        if blocked and message.key not in self.unblocked:
            self.world.find("BlockedStays", what)
        if self.calm and message.attempt <= self.failed.get(place, 0):
            self.world.find("HandedOver", f"{what}; attempt {self.failed[place]} had failed")

    async def act(self) -> None:
        """Unblock and park keys of random workers."""
        rng = random.Random(self.world.plan.seed)
        for _ in range(_ACTIONS):
            await anyio.sleep(rng.choice([0.0, 0.05, 0.3, 1.0]))
            workers = [one for one in self.world.members if not one.gone and not one.ended.is_set()]
            if workers:
                worker = rng.choice(workers)
                if worker.consumer.ready:
                    with worker.acting():
                        for key in [f"key-{number}" for number in rng.sample(range(_KEYS), 3)]:
                            if rng.random() < 0.5:
                                worker.consumer.park(key)
                            elif worker.consumer.unblock(key):
                                self.unblocked.add(key.encode())

    async def run(self) -> None:
        """Handle traffic while keys are unblocked and parked."""
        self.world.produce("orders", n=40, keys=_KEYS, keyless=0.2, gaps=0.1)
        self.world.workers(2, make=self)
        await self.act()
        await self.world.settled()


async def blocked_and_parked(world: World) -> None:
    """The application, with a poison policy of the plan's seed."""
    policies: list[Poison] = ["skip", "block", "block_and_dlq"]
    await Job(world, policies[world.plan.seed % 3]).run()
