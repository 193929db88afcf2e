"""Members of a cohort that share one partition. Tests of orders of events call the methods of ``World``.

The promises are asserted where they would break, with the letters of ``docs/model``:

- (a) One member owns the partition, until its deadline.
- (b) Messages of a key run in order.
- (c) No message is lost.
- (d) A run without faults loses and repeats no message.
- (e) No ack of a lower epoch counts.
- (f) Epochs rise.
- (g) The plan comes into effect.
- (h) No message below a confirmed floor runs again.
- (i) No message written as done runs again.
- (j) No message that was done at a handover runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lanes.core.cohort.actions import Action, LeaseLost, LeaseOwned, LeaseReleased, LeaseRevoked, Unknown, Wait
from lanes.core.cohort.lease_machine import LeaseMachine
from lanes.core.cohort.ledger import DeliveryLedger
from lanes.core.cohort.phases import OWNED
from lanes.core.types import NEVER
from tests.core.cohort.server import MESSAGES, Server

TTL = 10.0
MARGIN = 2.0
KEYS = 2
CALLS = 3000
"""Largest number of actions of a walk, which needs some hundreds; a longer walk fails."""

NewMachine = Callable[..., LeaseMachine]


def others(sequence: int) -> set[int]:
    """The older messages of the same key."""
    return {other for other in MESSAGES if other < sequence and other % KEYS == sequence % KEYS}


class Member:
    """A process that drives a machine.

    ``asked``: the action under way and its time. ``served``: its result, once there is one. ``lag``: the time that its
    clock missed. ``zombies``: the running messages of a lost partition. ``cut``: neither requests nor deliveries pass.
    ``leaving``: the member was stopped.
    """

    def __init__(self, name: str, machine: LeaseMachine, lease: float) -> None:
        self.name = name
        self.machine = machine
        self.lease = lease
        self.ledger = DeliveryLedger()
        self.queue: list[int] = []
        self.running: list[int] = []
        self.zombies: list[int] = []
        self.asked: tuple[Action, float] | None = None
        self.served: tuple[Any] | None = None
        self.lag = 0.0
        self.cut = False
        self.leaving = False


class World:
    """``clean``: no fault has happened so far. ``finished``: the messages whose handlers have ended at least once.

    ``leases``: the lease of each member in seconds, instead of ``TTL``.
    """

    def __init__(
        self, retention: str, machine: NewMachine = LeaseMachine, members: int = 2, *, leases: Sequence[float] = ()
    ) -> None:
        self.server = Server(retention)
        self._new_machine = machine
        self._leases = leases or [TTL] * members
        self.server.marked = int(max(self._leases))
        self.members: list[Member | None] = [None] * members
        self.target = 0
        self.clean = True
        self.bucket_lost = False
        self.lagged = False
        self.finished: set[int] = set()
        self.pulled: tuple[tuple[int, int], str] = ((0, -1), "")
        self.confirmed = 0
        self.calls = 0
        self.repeats = 0
        self.handed: set[int] = set()
        self.seen: list[object] = []
        for number in range(members):
            self.revive(number)

    # --- members and time

    def up(self) -> Iterator[Member]:
        return (member for member in self.members if member is not None)

    def clock(self, member: Member) -> float:
        return self.server.now - member.lag

    def revive(self, number: int) -> None:
        name, ttl = f"member-{number}", self._leases[number]
        machine = self._new_machine(0, name, retention=self.server.retention, ttl=ttl, margin=MARGIN * ttl / TTL)
        self.members[number] = Member(name, machine, ttl)

    def crash(self, number: int) -> None:
        member = self.members[number]
        if member is not None:
            self.clean = False
            if member.asked is not None and member.served is None:
                self.server.air.append((member.asked[0], member.lease))
            self.members[number] = None

    def elapse(self, seconds: float, asleep: Member | None = None) -> None:
        """Let time pass. ``asleep``: a member whose clock misses it, as some clocks do while suspended."""
        self.server.now += seconds
        if asleep is not None:
            asleep.lag += seconds
            self.clean = False
            self.lagged = True
        late = (one for one in self.up() if one.machine.token is not None and one.machine.deadline <= self.clock(one))
        self.clean = self.clean and not any(late)  # the member was frozen

    def tell(self, member: Member) -> None:
        """Let the member read the plan, unless it is cut off."""
        if member.cut:
            return
        member.machine.planned(self.members[self.target] is member, self.clock(member))
        self.react(member)

    def stop(self, member: Member) -> None:
        member.leaving = True
        member.machine.stop(self.clock(member))
        self.react(member)

    def lose_bucket(self) -> None:
        self.clean = False
        self.bucket_lost = True
        self.server.lose_bucket()

    # --- an action in three parts: the choice, the request at the server, the answer

    def count(self) -> None:
        self.calls += 1
        assert self.calls < CALLS, f"(g) the walk does not reach its plan: {self!r}"

    def ask(self, member: Member) -> Action:
        self.count()
        action = member.machine.next(self.clock(member), f"nonce-{self.calls}")
        if not isinstance(action, Wait):
            member.asked = action, self.clock(member)
        phase = member.machine.phase
        self.react(member)
        # The event may lead to an input that ends the wait.
        return action if member.machine.phase == phase or member.asked else self.ask(member)

    def serve(self, member: Member) -> None:
        """Let the request arrive, unless its member is cut off."""
        assert member.asked is not None
        if not member.cut:
            member.served = (self.server.perform(member.asked[0], lease=member.lease),)

    def answer(self, member: Member, *, unknown: bool = False, late: bool = False) -> None:
        """Answer the action. ``unknown``: the member gives up the answer. ``late``: the request may still arrive."""
        assert member.asked is not None
        (action, sent), served = member.asked, member.served
        member.asked = member.served = None
        result = Unknown
        if unknown or member.cut or served is None:
            self.clean = False
            if late and served is None:
                self.server.air.append((action, member.lease))
        else:
            (result,) = served
        member.machine.apply(action, result, self.clock(member), sent)
        self.react(member)

    def act(self, member: Member) -> Action | None:
        """Finish the action under way, or do a whole action; None without an action."""
        if member.asked is None and isinstance(self.ask(member), Wait):
            return None
        assert member.asked is not None
        action = member.asked[0]
        if member.served is None:
            self.serve(member)
        self.answer(member)
        return action

    # --- messages

    def pull(self, member: Member, *, lose: bool = False) -> bool:
        """Deliver a new message, or redeliver a message whose ack is not on its way; False without such a message."""
        self.count()
        name = member.machine.consumer
        if name is None or member.machine.phase != "owned" or member.cut:
            return False
        durable = self.server.durables.get(name)
        if durable is None:
            member.machine.gone("there is no such consumer", self.clock(member))
            self.react(member)
            return True
        here = {*member.queue, *member.running, *durable.acks}
        left = [s for s in self.server.left(durable) if s not in durable.delivered or s not in here]
        if not left:
            return False
        assert (name, durable.nonce) == self.pulled or name > self.pulled[0], f"(f) {name} pulls after {self.pulled}"
        self.pulled = name, durable.nonce
        sequence = min(left, key=lambda s: (s in durable.delivered, s))
        if lose and sequence not in durable.delivered:
            self.clean = False
            durable.missed = True
            durable.delivered.add(sequence)
        elif durable.missed:
            # The member accepts no delivery after the gap.
            member.machine.takeover(member.ledger.snapshot(), self.clock(member))
            self.react(member)
        else:
            durable.delivered.add(sequence)
            if not member.ledger.delivered(sequence):
                durable.acks.add(sequence)
            elif sequence not in (*member.queue, *member.running):
                member.queue.append(sequence)
        return True

    def acks(self, *, lose: bool = False) -> bool:
        """Let all acks arrive, or lose them; False if there are none."""
        moved = False
        for name, durable in self.server.durables.items():
            if durable.acks and not lose:
                assert name >= self.pulled[0], f"(e) an ack of {name} counts after {self.pulled[0]}"
                durable.acked |= durable.acks
            moved = moved or bool(durable.acks)
            durable.acks.clear()
            if any(one.machine.consumer == name and self.clock(one) < one.machine.deadline for one in self.up()):
                self.confirmed = max(self.confirmed, durable.floor)
        self.clean = self.clean and not (lose and moved)
        self.server.forget()
        return moved

    def start(self, member: Member) -> bool:
        """Start the first message that may start, also during a takeover from itself; False without such a message."""
        if self.clock(member) >= member.machine.deadline or member.machine.phase == "draining":
            return False
        busy = {sequence % KEYS for sequence in member.running + member.zombies}
        for sequence in sorted(member.queue):
            if sequence % KEYS not in busy:
                assert others(sequence) <= self.finished, f"(b) {sequence} starts before an older one has ended"
                self.check_repeat(sequence)
                member.queue.remove(sequence)
                member.running.append(sequence)
                return True
            busy.add(sequence % KEYS)
        return False

    def check_repeat(self, sequence: int) -> None:
        if sequence in self.finished:
            self.repeats += 1
            assert not self.clean, f"(d) {sequence} runs again without a fault"
            if not self.bucket_lost and not self.lagged:
                assert sequence > self.confirmed, f"(h) {sequence} runs again, and the floor was {self.confirmed}"
                assert sequence not in self.server.written, f"(i) {sequence} runs again, and was written as done"
                assert sequence not in self.handed, f"(j) {sequence} runs again, and was done at a handover"

    def finish(self, member: Member, number: int = 0) -> bool:
        """End a handler; False if none runs."""
        if not member.running and not member.zombies:
            return False
        of = member.zombies or member.running
        sequence = of.pop(number % len(of))
        assert others(sequence) <= self.finished, f"(b) {sequence} ends before an older one"
        self.finished.add(sequence)
        if of is member.running:
            member.ledger.settled(sequence)
            durable = self.server.durables.get(member.machine.consumer or (0, 0))
            if durable is not None and sequence in durable.delivered and not member.cut:
                durable.acks.add(sequence)
        self.react(member)
        return True

    def checkpoint(self, member: Member) -> None:
        member.machine.checkpoint(member.ledger.save(), self.clock(member))

    def react(self, member: Member) -> None:
        """Act on the events, as a driver does after every call."""
        machine = member.machine
        while machine.events:
            event = machine.events.pop(0)
            self.seen.append(event)
            match event:
                case LeaseOwned(again=False):
                    assert not member.running, "(b) the partition is owned again while its handlers run"
                    assert not member.zombies, "(b) the partition is owned again while its handlers run"
                    member.ledger = DeliveryLedger(event.done)
                case LeaseRevoked():
                    member.queue.clear()
                case LeaseLost(reason):
                    assert not self.clean, f"(d) the partition is lost without a fault: {reason}"
                    member.zombies += member.running
                    member.queue.clear()
                    member.running.clear()
                case LeaseReleased():
                    assert not member.running, "(b) the partition is handed over while its handlers run"
                    done = member.ledger.snapshot()
                    self.handed |= {s for s in MESSAGES if s <= done.highest and s not in done.outstanding}
        if machine.phase == "draining" and not member.running:
            machine.drained(member.ledger.snapshot(), self.clock(member))
        if machine.phase == "fenced" and not member.zombies:
            machine.ended(self.clock(member))
        owners = [one.name for one in self.up() if self.clock(one) < one.machine.deadline]
        assert self.lagged or len(owners) < 2, f"(a) {owners} own the partition at once"
        assert self.server.retention != "interest" or self.server.gone <= self.finished, "(c) a message is lost"

    # --- the end of a walk

    def settle(self) -> None:
        """Continue without faults until the plan is in effect."""
        for member in self.up():
            member.cut = False
        self.calls = 0
        for _ in range(200):
            for number, each in enumerate(self.members):
                if each is None or (each.leaving and each.machine.idle):
                    self.revive(number)
            for member in self.up():
                self.tell(member)
            while self.round():
                pass
            if self.settled():
                return
            waits = [(self.ask(member), member.lag) for member in self.up()]
            until = min(wait.until + lag for wait, lag in waits if isinstance(wait, Wait))
            # Without a time, every member has left.
            self.server.now = max(self.server.now + 0.01, until if until < NEVER else 0.0)
        raise AssertionError(f"(g) the plan does not come into effect: {self!r}")

    def round(self) -> bool:
        """Do every action that needs no time once; False without such an action."""
        moved = False
        for member in self.up():
            while self.act(member) is not None:
                moved = True
            while self.pull(member) or self.start(member) or self.finish(member):
                moved = True
        return self.acks() or moved

    def settled(self) -> bool:
        owner = self.members[self.target]
        name = None if owner is None else owner.machine.consumer
        if name is None or set(self.server.durables) != {name} or self.finished != MESSAGES:
            return False
        return not self.server.left(self.server.durables[name])

    def __repr__(self) -> str:
        phases = [member.machine.phase if member else "down" for member in self.members]
        return f"<World {phases}, planned {self.target}, consumers {self.server.durables}, finished {self.finished}>"


def owned(retention: str = "limits") -> tuple[World, Member]:
    """A world whose first member owns the partition."""
    world = World(retention)
    member = world.members[0]
    assert member is not None
    world.tell(member)
    actions(world, member)
    assert member.machine.phase == OWNED
    return world, member


def actions(world: World, member: Member) -> list[type]:
    """The actions of a member until it needs an input."""
    return [type(action) for action in iter(lambda: world.act(member), None)]


def until(world: World, member: Member, kind: type[Action], key: str = "") -> Action:
    """Act until an action of this kind is requested and not served."""
    while True:
        action = world.ask(member)
        if isinstance(action, kind) and (not key or getattr(action, "key", key) == key):
            return action
        world.serve(member)
        world.answer(member)
