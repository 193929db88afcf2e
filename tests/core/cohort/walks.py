"""Orders of events: numbered random orders, and an order with a fault at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from lanes.core.cohort.actions import Wait
from lanes.core.cohort.lease_machine import LeaseMachine
from tests.core.cohort.world import MARGIN, TTL, NewMachine, World

STEPS = ["act"] * 8 + ["part"] * 2 + ["pull"] * 3 + ["start", "finish", "acks", "tell", "move"] * 2
STEPS += ["checkpoint", "time", "seen", "land"]
FAULTS = ["crash", "unknown", "unknown", "late", "late", "freeze", "freeze", "lose", "lose acks"]
SOMETIMES = ["bucket", "sleep"]


class Walk:
    """A random order of events in a new world; the order ends when the plan is in effect."""

    def __init__(self, seed: int, retention: str, machine: NewMachine = LeaseMachine, members: int = 2) -> None:
        self.random = Random(f"{retention} {seed}")
        self.world = World(retention, machine, members)
        self.faults = self.random.choice([0, 1, 2, 3, 4])
        self.kinds = FAULTS + self.random.choice([[], [], ["bucket"] * 3, ["sleep"] * 3])
        self.awake = list(range(members))

    def run(self, steps: int = 70) -> World:
        for member in self.world.up():
            self.world.tell(member)
        for _ in range(steps):
            if self.faults and self.random.random() < 0.1:
                self.faults -= 1
                self.step(self.random.choice(self.kinds))
            else:
                self.step(self.random.choice(STEPS))
        self.world.settle()
        return self.world

    def step(self, step: str) -> None:
        world, random = self.world, self.random
        number = random.choice(self.awake)
        member = world.members[number]
        if step == "time":
            world.elapse(random.choice([0.01, 0.3, 1, TTL / 3]))
        elif step == "land":
            world.server.land(random.randrange(9))
        elif step in ("acks", "lose acks"):
            world.acks(lose=step == "lose acks")
        elif step == "bucket":
            world.lose_bucket()
        elif step == "move":
            world.target = random.randrange(len(world.members))
            if random.random() < 0.8:
                for awake in self.awake:
                    if (one := world.members[awake]) is not None:
                        world.tell(one)
        elif member is None:
            world.revive(number)
        elif step == "act":
            for _ in range(random.choice([1, 3, 20])):
                if world.act(member) is None:
                    break
        elif step == "part":
            self.part()
        elif step in ("unknown", "late"):
            if member.asked is not None or not isinstance(world.ask(member), Wait):
                if random.random() < 0.4 and member.served is None:
                    world.serve(member)
                world.answer(member, unknown=True, late=step == "late")
        elif step == "crash":
            world.crash(number)
        elif step in ("freeze", "sleep"):
            self.freeze(number, asleep=step == "sleep")
        elif step == "seen":
            member.machine.seen(world.server.durables, world.clock(member))
            world.react(member)
        elif step == "finish":
            world.finish(member, random.randrange(2))
        elif step == "lose":
            world.pull(member, lose=True)
        else:
            {"pull": world.pull, "start": world.start, "tell": world.tell, "checkpoint": world.checkpoint}[step](member)

    def part(self, number: int | None = None) -> None:
        """Do the next part of an action."""
        member = self.world.members[self.random.choice(self.awake) if number is None else number]
        if member is None:
            return
        if member.asked is None:
            self.world.ask(member)
        elif member.served is None:
            self.world.serve(member)
        else:
            self.world.answer(member)

    def freeze(self, number: int, *, asleep: bool) -> None:
        """Freeze one member during an action, longer than its lease, while the others continue."""
        world, random = self.world, self.random
        if len(self.awake) == 1:
            return
        for _ in range(random.randrange(3)):
            self.part(number)
        self.awake.remove(number)
        world.target = random.choice(self.awake) if random.random() < 0.8 else number
        for lapse in (0.3, TTL - MARGIN, MARGIN, TTL / 2, TTL):
            world.elapse(lapse, world.members[number] if asleep else None)
            self.step("move" if random.random() < 0.2 else "tell")
            for _ in range(random.randrange(12)):
                self.step(random.choice(STEPS))
        self.awake.append(number)


class Scenario:
    """One order with two members, three moves and a takeover, and a fault at call number ``at``."""

    def __init__(self, retention: str, machine: NewMachine, at: int, fault: Fault) -> None:
        self.world = World(retention, machine)
        self.calls = 0
        self._at = at
        self._fault = fault

    def run(self) -> World:
        world = self.world
        self.move(0)
        self.work(0, 4, finish=2)
        self.checkpoint(0)
        self.work(0, 1, finish=1, acks=False)
        self.move(1)
        self.work(1, 3, finish=2)
        self.drive(1)
        self.work(1, 1, lose=True)
        self.work(1, 1)  # the member finds the gap
        self.drive(1)
        world.elapse(TTL / 3)
        self.drive(1)
        self.work(1, 2, finish=1, acks=False)
        self.move(0)
        world.settle()
        return world

    def move(self, target: int) -> None:
        """Change the plan, end the handlers of the old owner, and let the new one own the partition."""
        self.world.target = target
        for number in (1 - target, target):
            self.drive(number)
        old = self.world.members[1 - target]
        while old is not None and self.world.finish(old, 1):
            self.drive(1 - target)
        self.world.elapse(0.3)
        self.drive(target)

    def drive(self, number: int) -> None:
        """Tell a member the plan, and let it act."""
        world = self.world
        if (member := world.members[number]) is not None:
            world.tell(member)
        while True:
            self.calls += 1
            if self.calls == self._at:
                self._fault(self, number)
            member = world.members[number]
            if member is None or world.act(member) is None:
                return

    def work(self, number: int, pulls: int, *, finish: int = 0, lose: bool = False, acks: bool = True) -> None:
        member = self.world.members[number]
        if member is None:
            return
        for _ in range(pulls):
            self.world.pull(member, lose=lose)
            self.world.start(member)
        for _ in range(finish):
            # The second message ends before the first, so the ledger has a hole.
            self.world.finish(member, 1)
            self.world.start(member)
        if acks:
            self.world.acks()

    def checkpoint(self, number: int) -> None:
        if (member := self.world.members[number]) is not None:
            self.world.checkpoint(member)
            self.drive(number)

    def usurp(self, number: int) -> None:
        """While a member is frozen, let the other member read the plan, acquire the partition and get messages."""
        self.world.target = number
        self.drive(number)
        for lapse in (0.3, TTL - MARGIN, MARGIN, TTL, MARGIN):
            self.world.elapse(lapse)
            self.drive(number)
        self.work(number, 3, finish=1)


Fault = Callable[[Scenario, int], None]


def ask(world: World, number: int, parts: int) -> bool:
    """Advance an action to asked (1) or served (2); False without an action."""
    member = world.members[number]
    if member is None or (parts and isinstance(world.ask(member), Wait)):
        return False
    if parts > 1:
        world.serve(member)
    return True


def unanswered(parts: int, comes: str) -> Fault:
    """Lose the answer; ``comes`` says when the request arrives: never, soon, during a handover, or after it."""

    def fault(scenario: Scenario, number: int) -> None:
        world = scenario.world
        member = world.members[number]
        if member is None or not ask(world, number, parts):
            return
        world.answer(member, unknown=True, late=comes != "never")
        world.elapse(0.3)
        if comes == "soon":
            for _ in range(2):
                world.act(member)
            world.server.land(0)
        elif comes in ("handover", "late"):
            scenario.drive(number)
            scenario.work(number, 2, finish=1, acks=False)
            world.target = 1 - number
            world.tell(member)
            while comes == "handover" and member.machine.phase != "releasing":
                if world.act(member) is None and not world.finish(member):
                    break
            if comes == "late":
                scenario.move(1 - number)
            world.server.land(0)

    return fault


def slow(scenario: Scenario, number: int) -> None:
    """Delay the answer by a third of the lease, then freeze the member."""
    world = scenario.world
    member = world.members[number]
    if member is not None and ask(world, number, 2):
        world.elapse(TTL / 3)
        world.answer(member)
        world.target = 1 - number
        scenario.drive(1 - number)
        world.elapse(TTL * 2 / 3 + 0.2)
        scenario.drive(1 - number)


def hasty(scenario: Scenario, number: int) -> None:
    """Let a message and the acks arrive during an action, which is unlikely and no fault."""
    ask(scenario.world, number, 1)
    scenario.work(number, 1)


def frozen(parts: int, *, asleep: bool = False, bucket: bool = False, back: bool = False) -> Fault:
    """Freeze a member for longer than its lease. ``back``: the plan names the member when it wakes up."""

    def fault(scenario: Scenario, number: int) -> None:
        world = scenario.world
        member = world.members[number]
        if member is None or not ask(world, number, parts):
            return
        world.clean = False
        if bucket:
            world.lose_bucket()
        before = world.server.now
        scenario.usurp(1 - number)
        if asleep:
            world.elapse(0.0, member)
            member.lag = world.server.now - before
        if back:
            world.target = number
        # First the action that the member chose before the freeze.
        for _ in range(9):
            if world.act(member) is None:
                break
        scenario.work(number, 2, finish=2)

    return fault


def crashed(parts: int, *, comes: bool = False) -> Fault:
    """Kill the process and start it again at once under the same name."""

    def fault(scenario: Scenario, number: int) -> None:
        ask(scenario.world, number, parts)
        scenario.world.crash(number)
        if comes:
            scenario.move(1 - number)
            scenario.world.server.land(0)
        scenario.world.revive(number)

    return fault


def leaving(scenario: Scenario, number: int) -> None:
    """Stop the member in any phase, and start it again when it is idle."""
    world = scenario.world
    member = world.members[number]
    if member is None:
        return
    member.machine.stop(world.clock(member))
    world.react(member)
    while world.act(member) is not None or world.finish(member):
        pass
    assert member.machine.idle, f"(g) the stopped member is still {member.machine.phase}"
    world.revive(number)


def bucket_lost(scenario: Scenario, number: int) -> None:
    """Lose the bucket while the plan names the other member."""
    scenario.world.lose_bucket()
    scenario.world.target = 1 - number
    scenario.drive(1 - number)
    scenario.work(1 - number, 1)


def nothing(scenario: Scenario, number: int) -> None:
    """No fault."""


EVERY_FAULT: list[Fault] = [
    *(unanswered(1, comes) for comes in ("never", "soon", "handover", "late")),
    unanswered(2, "never"),
    slow,
    hasty,
    *(frozen(parts) for parts in range(3)),
    *(frozen(parts, back=True) for parts in range(3)),
    *(frozen(parts, asleep=True) for parts in range(3)),
    *(frozen(parts, bucket=True) for parts in (0, 1)),
    *(crashed(parts) for parts in range(3)),
    crashed(1, comes=True),
    leaving,
    bucket_lost,
]


def scenarios(retention: str, machine: NewMachine = LeaseMachine, *, step: int = 1) -> Iterator[World]:
    """The scenario with every fault at every call, or at each ``step``-th call."""
    plain = Scenario(retention, machine, 0, nothing)
    yield plain.run()
    for at in range(1, plain.calls + 1, step):
        for fault in EVERY_FAULT:
            yield Scenario(retention, machine, at, fault).run()
