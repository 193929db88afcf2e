"""Orders of events: numbered random orders, and an order with a fault at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from lanes.core.cohort.actions import Wait
from lanes.core.cohort.lease_machine import LOOK_SECONDS, LeaseMachine
from lanes.core.types import NEVER
from tests.core.cohort.pairs import PHASES, Kind, LeasePhase, Pairs, phase_of
from tests.core.cohort.world import MARGIN, TTL, Member, NewMachine, World

STEPS = ["act"] * 8 + ["part"] * 2 + ["pull"] * 3 + ["start", "finish", "acks", "tell", "move"] * 2
STEPS += ["checkpoint", "time", "seen", "land"]

FaultKind = Kind | Literal["late", "crash", "delivery lost", "acks lost", "sleep"]
"""A fault of a walk. ``late``: a request arrives after its member has given it up. ``sleep``: a freeze in which the
clock of the member stops too."""

_WEIGHTS: Final[dict[FaultKind, int]] = {
    "request lost": 3,
    "reply lost": 3,
    "late": 2,
    "cut off": 3,
    "freeze": 3,
    "crash": 1,
    "delivery lost": 1,
    "acks lost": 1,
}

_OF_REQUESTS: Final[frozenset[FaultKind]] = frozenset({"request lost", "reply lost", "late"})

_DEPENDENT: Final = 0.6
"""Probability that a second fault is aimed at what a fault has made delicate."""

_RETRIES: Final = (0, 1, 1, 2, 3)
"""Numbers of the member's actions from a fault to its dependent fault."""

_PATIENCE: Final = 12
"""Number of further actions for which a dependent fault waits for the phase on which its walk concentrates."""

_AROUND: Final = (0.9, 1.1)
"""Factors of a lease: a fault ends shortly before the end of a lease, or shortly after it."""

_WAITED_FOR: Final = (0.0, 0.0, MARGIN / 2, 1.5 * MARGIN, TTL / 2)
"""Seconds that a member waits for an answer before it gives the request up."""

_LEASES: Final = ((), (), (TTL, TTL * 2, TTL / 2), (TTL / 2, TTL * 3, TTL))


@dataclass
class Aim:
    """A dependent fault: it happens to a member after this number of its actions."""

    kind: FaultKind
    number: int
    after: int


class Walk:
    """A random order of events in a new world; the order ends when the plan is in effect.

    Each walk draws the kinds of its faults (swarm testing). After a fault, often a second fault
    is aimed at what the first one made delicate. Most walks concentrate on one phase. ``pairs`` counts which
    fault followed which other fault, and in which phase.
    """

    def __init__(self, seed: int, retention: str, machine: NewMachine = LeaseMachine, members: int = 2) -> None:
        rng = self.random = Random(f"{retention} {seed}")
        # A generator of its own, so that a walk has the same events whether its members wait or not.
        self.patience = Random(f"patience of {retention} {seed}")
        self.world = World(retention, machine, members, leases=rng.choice(_LEASES)[:members])
        self.focus = rng.choice(PHASES) if rng.random() < 0.7 else None
        self.faults = rng.choice([0, 1, 2, 3, 4] if self.focus is None else [3, 5, 8])
        drawn: list[FaultKind] = [kind for kind in _WEIGHTS if rng.random() < 0.5]
        if rng.random() < 0.4:
            drawn.append("bucket lost")
        if rng.random() < 0.1:
            drawn.append("sleep")
        self.drawn = drawn or list(_WEIGHTS)
        self.aims: list[Aim] = []
        self.pairs = Pairs()
        self.awake = list(range(members))

    def run(self, steps: int = 70) -> World:
        for member in self.world.up():
            self.world.tell(member)
        for _ in range(steps):
            number = self.chosen()
            self.approach(number)
            kind = self.due(number)
            if kind is None:
                self.step(self.random.choice(STEPS), number)
            else:
                self.fault(kind, number)
        self.world.settle()
        return self.world

    def chosen(self) -> int:
        """The member of the next step: rather a member in the phase on which the walk concentrates, or not idle."""
        numbers = self.awake
        for wanted in ({self.focus} - {None}, set(PHASES)):
            near = [each for each in numbers if (one := self.world.members[each]) and self.phase(one) in wanted]
            if near and self.random.random() < 0.5:
                numbers = near
        return self.random.choice(numbers)

    def approach(self, number: int) -> None:
        """Lead an owner into the phase on which the walk concentrates."""
        member = self.world.members[number]
        if member is None or self.phase(member) != "steady" or self.random.random() > 0.2:
            return
        if self.focus == "renewal":
            self.world.elapse(member.lease / 3)
        elif self.focus == "handover":
            self.world.target = (number + 1) % len(self.world.members)
            self.tell()
        elif self.focus == "leave":
            self.world.stop(member)

    def step(self, step: str, number: int) -> None:
        """Let a member do a step in which nothing fails."""
        world, random = self.world, self.random
        member = world.members[number]
        if step == "time":
            world.elapse(random.choice([0.01, 0.3, 1, TTL / 3]))
        elif step == "land":
            world.server.land(random.randrange(9))
        elif step == "acks":
            world.acks()
        elif step == "move":
            world.target = random.randrange(len(world.members))
            if random.random() < 0.8:
                self.tell()
        elif member is None or (member.leaving and member.machine.idle):
            world.revive(number)
        elif step == "act":
            here = self.focus is not None and self.phase(member) == self.focus
            for _ in range(random.choice([1, 1, 3] if here else [1, 3, 20] if self.focus is None else [20])):
                if world.act(member) is None or (not here and self.phase(member) == self.focus):
                    break
        elif step == "part":
            self.part(number)
        elif step == "seen":
            if not member.cut:
                member.machine.seen(world.server.durables, world.clock(member))
                world.react(member)
        elif step == "finish":
            world.finish(member, random.randrange(2))
        elif step == "tell" and random.random() < 0.1:
            world.stop(member)
        else:
            {"pull": world.pull, "start": world.start, "tell": world.tell, "checkpoint": world.checkpoint}[step](member)

    def tell(self) -> None:
        """Let every member that is awake read the plan."""
        for number in self.awake:
            if (member := self.world.members[number]) is not None:
                self.world.tell(member)

    def part(self, number: int) -> None:
        """Do the next part of an action."""
        member = self.world.members[number]
        if member is None:
            return
        if member.asked is None:
            self.world.ask(member)
        elif member.served is None and not member.cut:
            self.world.serve(member)
        else:
            self.world.answer(member)

    # --- faults

    def phase(self, member: Member) -> LeasePhase | None:
        return phase_of(member.machine, self.world.clock(member))

    def due(self, number: int) -> FaultKind | None:
        """The fault that happens to a member now; None = no fault."""
        member = self.world.members[number]
        if member is None:
            return None
        here = self.focus is None or self.phase(member) == self.focus
        for aim in self.aims:
            if aim.number == number:
                aim.after -= 1
                if aim.after < (0 if here else -_PATIENCE):
                    self.aims.remove(aim)
                    return aim.kind
        if not self.faults:
            return None
        rate = 0.1 if self.focus is None else 0.6 if here else 0.02
        if self.random.random() >= rate:
            return None
        self.faults -= 1
        return self.random.choices(self.drawn, [_WEIGHTS.get(kind, 3) for kind in self.drawn])[0]

    def fault(self, kind: FaultKind, number: int) -> None:
        """Let a fault happen to a member, and perhaps aim a second fault at the member."""
        world, member = self.world, self.world.members[number]
        if member is None:
            return
        self.happen(kind, number, member)
        if self.random.random() < _DEPENDENT:
            aim = Aim(self.dependent(kind), number, self.random.choice(_RETRIES))
            if self.random.random() < 0.3:
                self.aims.append(aim)
                return
            if (back := world.members[number]) is not None:
                # The member pauses before a retry.
                world.elapse(LOOK_SECONDS * bool(aim.after))
                for _ in range(aim.after):
                    world.act(back)
            self.fault(aim.kind, number)

    def happen(self, kind: FaultKind, number: int, member: Member) -> None:
        world = self.world
        if kind in _OF_REQUESTS:
            self.lose(member, kind)
        elif kind == "bucket lost":
            for each in world.up():
                self.note(each, kind)
            world.lose_bucket()
        elif kind == "crash":
            world.crash(number)
        elif kind == "delivery lost":
            world.pull(member, lose=True)
        elif kind == "acks lost":
            world.acks(lose=True)
        elif len(self.awake) > 1:
            for _ in range(0 if kind == "cut off" else self.random.randrange(3)):
                self.part(number)
            self.away(number, kind)

    def dependent(self, first: FaultKind) -> FaultKind:
        """Draw a fault that is aimed at what the fault ``first`` has made delicate."""
        kinds: list[FaultKind] = ["request lost", "reply lost", "cut off", "cut off", "freeze", "crash"]
        if "bucket lost" in self.drawn:
            kinds += ["bucket lost", "bucket lost"]
        if first in _OF_REQUESTS:
            # The same fault again on the retry, or a lost retry.
            kinds += [first, first, "request lost"]
        return self.random.choice(kinds)

    def note(self, member: Member, kind: Kind) -> None:
        phase = self.phase(member)
        self.pairs.note(self.world.server.now, member.name, kind, () if phase is None else (phase,))

    def lose(self, member: Member, kind: FaultKind) -> None:
        """Lose the request under way or the next one, or its reply."""
        world, random = self.world, self.random
        if member.asked is None and isinstance(world.ask(member), Wait):
            # The next request is a renewal, or the write of a ledger.
            phase = self.phase(member)
            if phase == "steady" and self.focus != "steady" and random.random() < 0.5:
                world.elapse(member.lease / 3)
            else:
                world.checkpoint(member)
            if isinstance(world.ask(member), Wait):
                return
        if member.served is None and random.random() < 0.4:
            # Otherwise the write of a renewal is seldom lost, because its read comes first.
            world.act(member)
            if isinstance(world.ask(member), Wait):
                return
        if kind == "reply lost":
            if member.served is None:
                world.serve(member)
        elif member.served is not None:
            kind = "reply lost"
        if not member.cut and (kind == "request lost" or kind == "reply lost"):
            self.note(member, kind)
        world.elapse(self.patience.choice(_WAITED_FOR))
        world.answer(member, unknown=True, late=kind == "late")

    def away(self, number: int, kind: FaultKind) -> None:
        """Freeze a member or cut it off until about a deadline, while the others continue."""
        world, random = self.world, self.random
        member = world.members[number]
        if member is None or member.cut:
            return
        if kind == "cut off" or kind == "freeze":
            self.note(member, kind)
        member.cut = kind == "cut off"
        if not member.cut:
            self.awake.remove(number)
        world.target = random.choice([each for each in range(len(world.members)) if each != number])
        if random.random() < 0.15:
            world.target = number
        for moment in self.moments(member):
            world.elapse(max(0.0, moment - world.server.now), member if kind == "sleep" else None)
            self.step("move" if random.random() < 0.2 else "tell", random.choice(self.awake))
            if member.cut:
                for _ in range(random.randrange(4)):
                    world.act(member)
            for _ in range(random.randrange(8)):
                self.step(random.choice(STEPS), random.choice(self.awake))
            if random.random() < 0.9:
                self.drive(world.target)
        member.cut = False
        if number not in self.awake:
            self.awake.append(number)

    def drive(self, number: int) -> None:
        """Let a member act until it has to wait."""
        member = self.world.members[number]
        if member is not None and number in self.awake:
            self.world.tell(member)
            while self.world.act(member) is not None:
                pass
            self.world.pull(member)
            self.world.start(member)

    def moments(self, member: Member) -> Sequence[float]:
        """The times at which the others act while a member is frozen or cut off: many are about a deadline."""
        random, now, lease = self.random, self.world.server.now, member.lease
        deadline, expiry = member.machine.deadline + member.lag, self.world.server.expiry
        times = {now + 0.3, now + lease * random.choice(_AROUND), now + lease + MARGIN, now + 2.5 * lease}
        # Shortly before the deadline of the member, and shortly after the end of its lease at the server.
        times |= {time for time in (deadline - 0.1, deadline + 0.1, expiry + 0.5) if now < time < NEVER}
        chosen = random.sample(sorted(times), random.randint(1, len(times)))
        if now < expiry < NEVER and random.random() < 0.7:
            chosen.append(expiry + 0.1)
        return sorted(chosen)


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


def scenarios(retention: str, machine: NewMachine = LeaseMachine, *, step: int = 1, first: int = 1) -> Iterator[World]:
    """The scenario without a fault, then with every fault at every call, or at each ``step``-th call.

    The faults at call ``first`` and later calls come before those at earlier calls.
    """
    plain = Scenario(retention, machine, 0, nothing)
    yield plain.run()
    calls = range(1, plain.calls + 1, step)
    for at in sorted(calls, key=lambda call: call < first):
        for fault in EVERY_FAULT:
            yield Scenario(retention, machine, at, fault).run()
