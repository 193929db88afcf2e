"""Consumers under faults in virtual time, and everything that was wrong in the end, by the name of what found it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes import Consumer, History, Message, Nak, Retry, Settings, SourceError, Term
from lanes.core.types import Partition, PartitionId
from memsource import GroupSource, MemoryBroker, MemoryDeadLetters, MemorySource, check, read
from memsource.checkers import checkers_within
from memsource.group import Group
from memsource.topic import Record
from tests.mutants.plans import (
    FAILS,
    FAILS_ONCE,
    KEYS,
    MAX_AHEAD,
    PARTITIONS,
    REVOKE_TIMEOUT,
    SLOW,
    STUBBORN,
    TERMINAL,
    TROUBLE,
    VERY_SLOW,
    Plan,
)
from tests.mutants.watched import Watched

ACK_WAIT = 6.0
AT_ONCE = 0.05
"""Seconds of virtual time by which nothing is late."""
TAIL = 4_000.0
"""Virtual seconds without a fault, after which everything has to be handled and settled."""


class World:
    """One run of a plan. ``findings``: check -> the first thing it found."""

    def __init__(self, plan: Plan, directory: str) -> None:
        self.plan = plan
        self.findings: dict[str, str] = {}
        self.broker = MemoryBroker(PARTITIONS, ack_wait=ACK_WAIT)
        self.group = Group(PARTITIONS, cooperative=plan.cooperative)
        self.letters = MemoryDeadLetters(self.broker)
        self.members: list[Member] = []
        self.revoked: set[int] = set()
        self.directory = directory
        self.joined = 0
        self.hung = False
        self._ticks = 0
        self._traffic = iter(plan.traffic)
        self._published: list[Record] = []
        self._ended: set[tuple[Partition, int]] = set()
        self._attempts: Counter[tuple[Partition, int]] = Counter()
        self._handled: Counter[tuple[PartitionId, int]] = Counter()
        self._tasks: TaskGroup

    def find(self, check: str, what: str) -> None:
        """Note what a check has found."""
        self.findings.setdefault(check, what)

    def clock(self) -> float:
        """Rises with every look, so that the rows of all members are in one order."""
        self._ticks += 1
        return anyio.current_time() + self._ticks * 1e-6

    def publish(self, count: int | None = None) -> None:
        """Publish the next ``count`` messages, None = all that are left."""
        for key, kind in islice(self._traffic, count):
            self._published.append((self.group if self.plan.commits else self.broker).publish(bytes([kind]), key=key))

    @property
    def unfinished(self) -> int:
        return self.group.unfinished if self.plan.commits else self.broker.unfinished

    # --- the handler

    async def handle(self, message: Message) -> None:
        """What becomes of a message is in its value."""
        if (message.partition, message.position) in self._ended:
            self.find("RunsOnce", f"position {message.position} runs again in the assignment in which it had ended")
        self._attempts[message.partition, message.position] += 1
        attempt = self._attempts[message.partition, message.position]
        if self.plan.batch is None and message.attempt != attempt:
            self.find("AttemptsCount", f"position {message.position}: attempt {message.attempt} is the {attempt}. call")
        kind = message.value[0]
        plan = self.plan
        if plan.clean and kind in ({VERY_SLOW, STUBBORN} if plan.hands_over else TROUBLE):
            # Without a hand-over also what waits is repeated with what was finished above it.
            kind = 3
        if kind == SLOW:
            await anyio.sleep(1.0 if plan.clean else 9.0)
        elif kind == VERY_SLOW:
            await anyio.sleep(50.0)
        elif kind == STUBBORN:
            await self._stubborn(message)
        elif kind == FAILS_ONCE and message.attempt == 1:
            raise Nak(delay=0.5)
        elif kind == TERMINAL:
            raise Term("never")
        elif kind == FAILS:
            raise ValueError("no")
        else:
            for _ in range(kind):
                await anyio.lowlevel.checkpoint()

    async def _stubborn(self, message: Message) -> None:
        """One that ignores its cancellation, and ends well a while later."""
        try:
            await anyio.sleep(45.0)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                # Beyond its grace it may run beside the next owner's. In the same process its lane waits for it.
                await anyio.sleep(1.0 if self.plan.commits or message.key is None else 5.0)

    def handled(self, message: Message) -> None:
        """Its handler ended well."""
        self._ended.add((message.partition, message.position))
        place = message.partition.id, message.position
        self._handled[place] += 1
        if message.key is not None and (before := self._earlier(message)):
            self.find("CompletesInOrder", f"{place[0]} position {place[1]} ended before {before} of its key")
        if self.plan.clean and self._handled[place] > 1:
            self.find("RepeatsNothing", f"{place[0]} position {place[1]} was handled twice, and nothing had gone wrong")

    def _earlier(self, message: Message) -> list[int]:
        """The positions of its key below it that were neither handled nor parked."""
        number = message.partition.id.number
        before = [r for r in self._published if (r.partition, r.key) == (number, message.key)]
        return self._not_done([r for r in before if r.position < message.position])

    def _not_done(self, records: list[Record]) -> list[int]:
        """The positions of those that were neither handled nor parked."""
        done = {(letter.partition, letter.position) for letter in self.broker.dead_letters}
        done |= {(place.number, position) for place, position in self._handled}
        return [r.position for r in records if (r.partition, r.position) not in done]

    # --- the run

    async def run(self) -> None:
        """Let the plan happen, then everything be caught up, and judge."""
        random.seed(0)  # the jitter of the backoff
        self.publish(5)
        async with anyio.create_task_group() as self._tasks:
            await self._start()
            self._tasks.start_soon(self._expire)
            for event in self.plan.events:
                await self._turns(3)
                await getattr(self, "_" + event[0].replace(" ", "_"))(*event[1:])
            await self._catch_up()
            self._tasks.cancel_scope.cancel()
        for verdict in check(read([self.directory]), checkers_within(AT_ONCE)):
            if verdict.status != "passed":
                self.find(verdict.name, f"{verdict.status}: {'; '.join(verdict.witnesses + verdict.reasons)}")

    async def _catch_up(self) -> None:
        self.letters.unblock("put")
        for member in self.members:
            member.source.inner.unblock("settle")
            member.pause(paused=False)
        self.hung = False
        await anyio.sleep(REVOKE_TIMEOUT)
        if not self.members:
            await self._start()
        self.publish()
        with anyio.move_on_after(TAIL):
            # A member that lost its partition may have committed an older position last: newer ones correct it.
            for partition in range(PARTITIONS):
                (self.group if self.plan.commits else self.broker).publish(bytes([0]), partition=partition)
            while self.unfinished and self.members:
                self._own_everything()
                for key in KEYS:
                    await self._park(key)
                await anyio.sleep(5.0)
        if self.unfinished:
            self.find("CaughtUp", f"{self.unfinished} messages are unfinished after {TAIL:g} s without a fault")
        elif lost := self._not_done(self._published):
            self.find("NothingLost", f"positions {lost} count as finished, and were neither handled nor parked")
        for member in list(self.members):
            await member.stop()

    def _own_everything(self) -> None:
        if self.plan.commits:
            if not self.group.rebalancing and None in map(self.group.owner, range(PARTITIONS)):
                self.group.rebalance()
            return
        source = self.members[0].source.inner
        assert isinstance(source, MemorySource)
        for partition in set(range(PARTITIONS)) - set(source.owned):
            self.revoked.discard(partition)
            source.assign(partition)

    async def _start(self) -> Member:
        self.joined += 1
        member = Member(self, f"m-{self.joined}")
        self.members.append(member)
        self._tasks.start_soon(member.run)
        await self._turns(10)
        return member

    async def _expire(self) -> None:
        """The broker's own timer: what is not acknowledged or extended in time is due again."""
        while True:
            await anyio.sleep(0.5)
            before = [self.broker.waiting(number) for number in range(PARTITIONS)]
            self.broker.expire(anyio.current_time())
            for number, waited in enumerate(before):
                kept = any(number in member.owned for member in self.members) and number not in self.revoked
                if kept and not self.hung and self.broker.waiting(number) > waited:
                    self.find("KeptAlive", f"a message of partition {number} was not extended within {ACK_WAIT:g} s")

    def _member(self, index: int) -> Member:
        return self.members[index % len(self.members)]

    # --- events

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await anyio.lowlevel.checkpoint()

    async def _sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def _publish(self, count: int) -> None:
        self.publish(count)

    async def _skip(self, partition: int, count: int) -> None:
        self.group.skip(count, partition=partition)

    async def _join(self) -> None:
        if len(self.members) < 3:
            await self._start()

    async def _rebalance(self) -> None:
        self.group.rebalance()

    async def _revoke(self, partition: int) -> None:
        if self.plan.commits:
            if self.group.owner(partition) is not None:
                self.group.revoke(partition)
        elif partition in self.members[0].owned and partition not in self.revoked:
            source = self.members[0].source.inner
            assert isinstance(source, MemorySource)
            self.revoked.add(partition)
            source.revoke(partition, REVOKE_TIMEOUT)

    async def _assign(self, partition: int) -> None:
        source = self.members[0].source.inner
        assert isinstance(source, MemorySource)
        if partition not in source.owned:
            self.revoked.discard(partition)
            source.assign(partition)

    async def _lose(self, partition: int) -> None:
        if self.plan.commits:
            owner = self.group.owner(partition)
            if owner is not None:
                self.group.lose(owner, partition)
        elif partition in self.members[0].owned and partition not in self.revoked:
            source = self.members[0].source.inner
            assert isinstance(source, MemorySource)
            source.lose(partition)

    async def _lose_and_assign(self, partition: int) -> None:
        await self._lose(partition)
        await self._assign(partition)

    async def _redeliver(self, partition: int, back: int) -> None:
        if partition in self.members[0].owned:
            delivered = sorted({*self.broker.acked(partition), *self.broker.unacked(partition)})
            self.broker.redeliver(delivered[-1 - back :][:3], partition=partition)

    async def _stop(self, index: int) -> None:
        await self._end(index, crash=False)

    async def _crash(self, index: int) -> None:
        await self._end(index, crash=True)

    async def _end(self, index: int, *, crash: bool) -> None:
        member = self._member(index)
        await (member.crash() if crash else member.stop())
        if not self.members:
            await self._start()

    async def _pause(self, index: int) -> None:
        self._member(index).pause(paused=True)

    async def _resume(self, index: int) -> None:
        self._member(index).pause(paused=False)

    async def _park(self, key: bytes | None) -> None:
        for member in self.members:
            if member.consumer.ready:
                member.consumer.park(key)

    async def _unblock(self, key: bytes | None) -> None:
        for member in self.members:
            if member.consumer.ready:
                member.consumer.unblock(key)

    async def _letters_fail(self, times: int) -> None:
        self.letters.fail("put", OSError("not now"), times=times)

    async def _letters_hang(self) -> None:
        self.letters.block("put")

    async def _letters_go(self) -> None:
        self.letters.unblock("put")

    async def _settling_fails(self, index: int, times: int, done: bool) -> None:
        error = SourceError("not now", retryable=True)
        self._member(index).source.inner.fail("settle", error, times=times, done=done)

    async def _settling_hangs(self, index: int) -> None:
        self.hung = True
        self._member(index).source.inner.block("settle")

    async def _settling_goes(self, index: int) -> None:
        self._member(index).source.inner.unblock("settle")


class Member:
    """One process: a consumer with a history, until it stops or crashes."""

    def __init__(self, world: World, name: str) -> None:
        plan = world.plan
        inner: MemorySource | GroupSource
        if plan.commits:
            inner = GroupSource(world.group, name, batch=7, revoke_timeout=REVOKE_TIMEOUT, hands_over=plan.hands_over)
        else:
            inner = MemorySource(world.broker, batch=7, clock=anyio.current_time)
        self.source = Watched(inner, world.find)
        self._world = world
        self._name = name
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self._history = History(world.directory, member=name)
        self.consumer = Consumer(
            self.source,
            self._handle if plan.batch is None else self._handle_batch,
            settings=Settings(
                concurrency=plan.concurrency,
                max_in_flight=plan.concurrency + plan.spare + (plan.batch or 0),
                max_ahead=MAX_AHEAD,
                batch=plan.batch,
                retry=Retry(attempts=3, backoff=0.5),
                poison=plan.poison,
                drain_timeout=REVOKE_TIMEOUT,
            ),
            dead_letters=world.letters,
            history=self._history,
            clock=world.clock,
        )

    @property
    def owned(self) -> list[int]:
        """The partitions it owns and was not asked for."""
        return self.source.inner.owned

    async def run(self) -> None:
        try:
            with self._scope:
                await self.consumer.run()
        except Exception as error:
            self._world.find(type(error).__name__, f"{self._name} ended with it: {error}")
        finally:
            if self in self._world.members:
                self._world.members.remove(self)
            self._over.set()

    async def stop(self) -> None:
        """Stop in order, and wait for the end."""
        self._world.members.remove(self)
        self.source.leaving = True
        self.consumer.stop()
        await self._over.wait()

    async def crash(self) -> None:
        """Die as by SIGKILL: nothing that it does from here on is seen, by the broker or in the history."""
        world = self._world
        world.members.remove(self)
        path = self._history.path
        written = b"" if path is None else path.read_bytes()
        self.source.cut()
        if world.plan.commits and self._name in world.group.members:
            world.group.crash(self._name)
        self._scope.cancel()
        await self._over.wait()
        if path is not None:
            path.write_bytes(written)

    def pause(self, *, paused: bool) -> None:
        (self.consumer.pause if paused else self.consumer.resume)()
        self.source.paused = paused

    async def _handle(self, message: Message) -> None:
        await self._world.handle(message)
        self._world.handled(message)

    async def _handle_batch(self, batch: list[Message]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for message in batch:
            try:
                await self._world.handle(message)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        failed: set[bytes] = set()
        for message, outcome in zip(batch, outcomes, strict=True):
            # Behind the first of a lane that failed nothing counts.
            if outcome is None and message.key not in failed:
                self._world.handled(message)
            elif message.key is not None:
                failed.add(message.key)
        return outcomes
