"""A simulated broker reports the assignments that it took from a member, and the checkers excuse only those."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest

from lanes import Message
from lanes.core.types import Partition, Room
from lanes.source import Assigned, Revoking, Source, SourceEvent
from memsource.jetstream.source import JetStreamPersonality
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.source import KafkaPersonality
from memsource.personality import PERSONALITIES, Personality, PersonalityName
from memsource.sim.plans.plan import Fault, FaultKind, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.world import World

both = pytest.mark.parametrize("personality", PERSONALITIES)
LATER = 100.0
"""Seconds; longer than a session, a lease, and the time limit of a release."""


class Member:
    """A member that owns the only partition of a new broker; time moves only by ``to``."""

    def __init__(self, personality: PersonalityName) -> None:
        self.now = 0.0
        self.broker: Personality
        if personality == "kafka":
            self.broker = KafkaPersonality(1, settings=KafkaSettings(heartbeat_interval=0.0))
        else:
            self.broker = JetStreamPersonality(1, lease=9.0, revoke_timeout=5.0)
        self.source: Source = self.broker.source("one", lambda: self.now)

    async def owns(self) -> Partition:
        await self.source.open()
        (event,) = await self.receive()
        assert isinstance(event, Assigned)
        return event.partition

    async def receive(self) -> Sequence[SourceEvent]:
        return await self.source.receive(Room(0, 0))

    def to(self, now: float) -> None:
        self.now = now
        self.broker.advance(now)


def lose(member: Member) -> None:
    member.broker.lose(0, 1.0)


def crash(member: Member) -> None:
    member.broker.crash("one", 1.0)


def freeze(member: Member) -> None:
    member.broker.freeze("one", 50.0)


@both
@pytest.mark.anyio
@pytest.mark.parametrize("fault", [lose, crash, freeze])
async def test_an_expired_assignment_is_taken(personality: PersonalityName, fault: Callable[[Member], None]) -> None:
    member = Member(personality)
    partition = await member.owns()
    member.to(1.0)
    assert member.broker.taken == []
    fault(member)
    member.to(LATER)
    assert member.broker.taken == [("one", partition)]


@both
@pytest.mark.anyio
async def test_a_released_assignment_is_not_taken(personality: PersonalityName) -> None:
    member = Member(personality)
    partition = await member.owns()
    member.broker.rebalance(1.0)
    (event,) = await member.receive()
    assert isinstance(event, Revoking)
    await member.source.release(partition)
    crash(member)
    member.to(LATER)
    assert member.broker.taken == []


@both
@pytest.mark.anyio
async def test_an_unknown_assignment_is_not_taken(personality: PersonalityName) -> None:
    member = Member(personality)
    await member.source.open()
    lose(member)
    crash(member)
    member.to(LATER)
    assert member.broker.taken == []


@pytest.mark.anyio
async def test_jetstream_takes_partitions_that_are_not_released_in_time() -> None:
    member = Member("jetstream")
    partition = await member.owns()
    member.broker.rebalance(1.0)
    member.to(5.9)
    assert member.broker.taken == []
    member.to(6.0)
    assert member.broker.taken == [("one", partition)]


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["eager", "848"])
async def test_kafka_takes_partitions_of_a_member_that_does_not_poll(protocol: str) -> None:
    member = Member("kafka")
    member.broker = KafkaPersonality(1, settings=KafkaSettings(protocol=protocol))  # type: ignore[arg-type]
    member.source = member.broker.source("one", lambda: member.now)
    partition = await member.owns()
    member.to(1_000.0)
    assert member.broker.taken == [("one", partition)]


class Silent(KafkaPersonality):
    """A broker that does not report the assignments that it took."""

    taken = []  # noqa: RUF012


def overlapping(faults: tuple[Fault, ...], broker: type[KafkaPersonality], seconds: float) -> Run:
    """Handle two keys, with a handler of this duration."""

    async def handle(message: Message) -> None:
        await anyio.sleep(seconds)

    async def test(world: World) -> None:
        world.produce("orders", 12, keys=2)
        world.workers(2, handle)
        await world.settled()

    def made(_: Plan) -> KafkaPersonality:
        return broker(2, settings=KafkaSettings(heartbeat_interval=3.0))

    return run_plan(Plan("kafka", 0, faults), Conditions(test=test, broker=made))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seconds"), [("lost", 1.0), ("freeze", 10.0)])
def test_an_overlap_is_reported_unless_the_broker_took_the_partition(kind: FaultKind, seconds: float) -> None:
    unsaid: set[str] = set()
    for at in range(8, 40):
        fault = Fault(at, kind, amount=60.0)
        assert overlapping((fault,), KafkaPersonality, seconds).findings == {}
        unsaid |= overlapping((fault,), Silent, seconds).findings.keys()
    assert "NoOverlap" in unsaid
