"""A cohort under faults that the seed of a plan draws, and its invariants."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Final

import anyio
import anyio.lowlevel

from lanes import Message, Nak
from lanes.cohort.roster import Roster
from lanes.core.cohort.records import drain_key
from memsource.jetstream.cohort_source import CohortPersonality
from memsource.jetstream.link import TIMEOUT, LinkFault
from memsource.sim.loop.event_loop import GROUP
from memsource.sim.loop.virtual import until
from memsource.sim.plans.traffic import Traffic
from memsource.sim.world.worker import App
from memsource.sim.world.world import TAIL, World
from tests.cohort.cases import BRIEF, DEPENDENT, FAILS_ONCE, LAST, SLOW, STEPS, VERY_SLOW, Case, case_of
from tests.memsource.sim.app import staying

__all__ = ["app"]

_LATE: Final = (0.05, 1.0, 4.0, 15.0)
"""Maximum delay of a late write in seconds."""

_CHANGES: Final = {"join": 1, "leave": 1, "stop": 2, "drain": 1}
"""Number of new plans that an action may cause."""

_LAST: Final = 8.0
"""Virtual seconds that a message waits for the drain whose limit it nearly reaches."""

_SETTLES: Final = 900.0
"""Virtual seconds of a run: twice the longest freeze, and the remaining work."""

_CONVERGES: Final = 120.0
"""Virtual seconds without a fault after which every partition has one owner."""


async def app(world: World) -> None:
    """A run with all faults, after which every message is finished and every partition has one owner."""
    await _Cohort(world, case_of(world.plan.seed)).run()


class _Cohort:
    def __init__(self, world: World, case: Case) -> None:
        assert isinstance(world.broker, CohortPersonality)
        self.world = world
        self.broker = world.broker
        self.case = case
        self.clean = not world.plan.faults and not len(world.plan.schedule)
        self.leaving: set[str] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.done: set[tuple[str, object, int]] = set()
        self.published = 0
        self.app = App(handler=self.handle, settings=case.settings)
        n = case.n if world.plan.limit is None else min(case.n, world.plan.limit)
        self.items = Traffic(n=n, keys=case.keys, skew=1.0).items(world.plan.seed, case.partitions)
        self.broker.before = self.before
        # The second faults are drawn apart, so that the case of a seed does not depend on them.
        self.dependent = Random(f"dependent {world.plan.seed}") if world.plan.seed >= DEPENDENT else None
        self.again: dict[str, LinkFault] = {}

    # --- the run

    async def run(self) -> None:
        world, case = self.world, self.case
        world.workers(case.members, self.app)
        if case.retention == "interest":
            # A message before the first durable is delivered to no member.
            await self.set_up()
        wave = len(self.items) // (len(case.actions) + 1)
        for delay, action, number in case.actions:
            # Partitions move in the middle of the work.
            self.publish(wave)
            await anyio.sleep(delay)
            self.act(action, number)
        self.publish(len(self.items))
        await world.settled(_SETTLES)
        await self.converge()
        self.rise()
        if any(case.targets):
            await self.balance()
        if self.clean:
            self.settle()
        world.check(state=lambda: sorted(self.handled))

    async def set_up(self) -> None:
        await until(lambda: len(self.broker.stream.created) >= self.case.partitions, TAIL)

    def publish(self, count: int) -> None:
        for item in self.items[self.published : self.published + count]:
            self.world.publish(bytes([self.case.kinds[item.index]]), key=item.key, partition=item.partition)
        self.published = min(len(self.items), self.published + count)

    def act(self, action: str, number: int) -> None:
        workers = staying(self.world, self.leaving)
        if action == "publish":
            self.publish(number)
        elif action == "join":
            if len(workers) < 4:
                self.world.workers(1, self.app)
        elif action == "drain":
            self.broker.rebalance(self.world.now)
        elif workers and (action == "stop" or len(workers) > 1):
            worker = workers[number % len(workers)]
            self.leaving.add(worker.name)
            with worker.acting():
                worker.consumer.stop()
            if action == "stop":
                self.world.workers(1, self.app)

    async def converge(self) -> None:
        """Without faults, every partition gets one owner and one durable."""
        if await until(lambda: not self.apart(), self.frozen() + _CONVERGES):
            return
        self.world.find("Converges", f"{_CONVERGES:g} s without a fault: {self.apart()}")

    def frozen(self) -> float:
        """The seconds until every member is awake."""
        awake = max((worker.frozen_until for worker in staying(self.world, self.leaving)), default=0.0)
        return max(0.0, awake - self.world.now)

    def rise(self) -> None:
        """Every ownership of a partition has a higher token than all before it."""
        highest: dict[int, int] = {}
        for number, token, member in self.broker.owned:
            if token <= highest.get(number, 0):
                self.world.find("EpochsRise", f"partition {number}: {member} got {token} behind {highest[number]}")
            highest[number] = token

    async def balance(self) -> None:
        """Without faults, the members exceed their targets by as few partitions as possible."""
        said = ""

        def balanced() -> bool:
            nonlocal said
            said = self.excess()
            return not said

        if not await until(balanced, self.frozen() + _CONVERGES):
            self.world.find("LeastExcess", f"{_CONVERGES:g} s without a fault: {said}")

    def excess(self) -> str:
        """The partitions above the targets, if a plan with fewer is possible; "" = as few as possible."""
        alive = {worker.name for worker in staying(self.world, self.leaving)}
        sources = [source for source in self.broker.members if source.member in alive and source.alive]
        if not all(source.membership.target_honoured for source in sources):
            # With a member that runs the former code, the plan ignores targets.
            former = any(self.broker.roster_of(source) is not Roster for source in sources)
            return "" if former else "a plan without targets, although every member knows targets"
        count = len(self.broker.partitions)
        wishes = {
            source.member: self.broker.bucket.read(drain_key(source.member), self.world.now) for source in sources
        }
        willing = [source for source in sources if not wishes[source.member].value] or sources
        limits = sorted((source.membership.settings.consumer_target or count for source in willing), reverse=True)
        least = max(0, count - sum(limits[: self.case.cohort.active_members]))
        owned = {source.member: len(source.owned) for source in sources}
        over = sum(
            max(0, len(source.owned) - (source.membership.settings.consumer_target or count)) for source in sources
        )
        return "" if over == least else f"{over} partitions above the targets instead of {least}: {owned}"

    def settle(self) -> None:
        """A new plan needs a change of the members, or of the set of drained members.

        A member that leaves plans once more. If the remaining members use newer rules, they change that plan.
        """
        generation = max(source.membership.generation for source in self.broker.members)
        most = self.case.members + sum(_CHANGES.get(action, 0) for _, action, _ in self.case.actions)
        most *= 1 + any(self.case.former)
        if generation > most:
            self.world.find("PlansSettle", f"{generation} plans for {most} changes")

    def apart(self) -> str:
        """The partitions with a wrong number of owners or durables; "" = none."""
        alive = {worker.name for worker in staying(self.world, self.leaving)}
        sources = [source for source in self.broker.members if source.member in alive and source.alive]
        owned = Counter(number for source in sources for number in source.owned)
        wrong = {number: owned[number] for number in self.broker.partitions if owned[number] != 1}
        durables = {number: names for number in owned if len(names := self.broker.stream.names(number)) != 1}
        said = [f"owners of partitions: {wrong}"] if wrong else []
        return "; ".join([*said, f"durables: {durables}"] if durables else said)

    # --- faults of the links to the servers

    async def before(self, member: str, writes: bool) -> LinkFault | None:
        world = self.world
        worker = next(each for each in reversed(world.members) if each.name == member)
        await worker.reach()
        if worker.slow_until > world.now:
            # A call that takes longer than its timeout arrives late.
            return LinkFault("late", worker.slow) if worker.slow > TIMEOUT else None
        if not writes:
            return None
        failing = world.injection.take("commit_fails", member)
        if failing is not None:
            world.happens(failing, member)
            fault = LinkFault("reply lost" if failing.amount >= 1 else "request lost")
            self.follow(member, fault)
            return fault
        if member in self.again:
            return self.again.pop(member)
        late = world.strikes("io_fails", member)
        return None if late is None else LinkFault("late", _LATE[late.target % len(_LATE)])

    def follow(self, member: str, fault: LinkFault) -> None:
        """Aim a second fault at what a lost request or reply has made delicate."""
        rng = self.dependent
        if rng is None or rng.random() < 0.3:
            return
        if rng.random() < 0.3:
            # The same fault on the retry.
            self.again[member] = fault
            return
        source = next(each for each in reversed(self.broker.members) if each.member == member)
        lease, now = self.case.cohort.lease, self.world.now
        ends = [lease, lease * 4 / 3, self.case.cohort.drain_within]
        begins, span = rng.choice([0.0, 0.01, 0.3, 2.5, lease / 3]), rng.choice(ends) * rng.choice([0.9, 1.1])

        def cut(at: float) -> None:
            source.link.cut = True
            self.broker.later(at + span, heal)

        def heal(at: float) -> None:
            source.link.cut = False
            # The source has a new connection, as after a restart of the server.
            source._restarts -= 1
            source.poke()

        self.broker.later(now + begins, cut)

    # --- the handler

    async def handle(self, message: Message) -> None:
        number, member = message.partition.id.number, GROUP.get() or ""
        self.starts(member, number, message)
        kind = message.value[0]
        if kind == STEPS:
            for _ in range(message.position % 4):
                await anyio.lowlevel.checkpoint()
        elif kind == BRIEF:
            await anyio.sleep(0.2)
        elif kind == SLOW:
            await anyio.sleep(1.5)
        elif kind == LAST:
            await self.last(number, member)
        elif kind == VERY_SLOW:
            try:
                await anyio.sleep(12.0)
            finally:
                # A cancelled handler has some work to finish.
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.1 * (message.position % 3))
        elif kind == FAILS_ONCE and message.attempt == 1:
            raise Nak(delay=0.5)
        self.done.add((member, message.partition, message.position))
        self.handled[number, message.position] += 1
        if self.clean and not any(self.case.drift) and self.handled[number, message.position] > 1:
            self.world.find("RepeatsNothing", f"{number}/{message.position} ran twice, and nothing had gone wrong")

    async def last(self, number: int, member: str) -> None:
        """Return just before the limit of a drain; without a drain, after some seconds."""
        source = next(each for each in reversed(self.broker.members) if each.member == member)
        keeper = source.membership._keepers[number]
        if await until(lambda: keeper._drain_by < math.inf, _LAST):
            await anyio.sleep(max(0.0, keeper._drain_by - keeper._clock() - 0.01))

    def starts(self, member: str, number: int, message: Message) -> None:
        """No handler starts under an ownership after a newer ownership has begun."""
        newest, owner = max((token, member) for at, token, member in self.broker.owned if at == number)
        if message.epoch != newest:
            what = f"partition {number}: {member} starts position {message.position} under epoch {message.epoch}"
            self.world.find("NewestOwner", f"{what}, and {owner} owns it under {newest}")
        if (member, message.partition, message.position) in self.done:
            self.world.find("RunsOnce", f"{number}/{message.position} runs again where it had ended")
