"""Kafka consumers keep the promises of the real-broker tests in simulation: every protocol, many schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import anyio
import pytest

from lanes import Message, Nak, Retry, Settings
from lanes.config import Poison
from lanes.core.offset_map import decode
from lanes.dead_letter import DeadLetter
from lanes.observe import health
from lanes.runtime import run as running
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.client import RebalanceProtocol
from memsource.kafka.source import KafkaPersonality
from memsource.sim.loop.choosers import RandomWalk
from memsource.sim.loop.virtual import until
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.worker import App, Worker
from memsource.sim.world.world import World

Test = Callable[[World], Awaitable[None]]
RUNS = 5
PROTOCOLS: tuple[RebalanceProtocol, ...] = get_args(RebalanceProtocol)
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
LONG = 3_600.0


def simulated(
    test: Test,
    protocol: RebalanceProtocol,
    *faults: Fault,
    partitions: int = 1,
    hands_over: bool = True,
    runs: int = RUNS,
    ends_with: str | None = None,
) -> list[Run]:
    """Run the world in many orders of events; the only allowed finding is the error that a worker ``ends_with``."""

    def broker(plan: Plan) -> KafkaPersonality:
        return KafkaPersonality(partitions, settings=KafkaSettings(protocol=protocol), hands_over=hands_over)

    conditions = Conditions(test=test, partitions=partitions, broker=broker)
    made = []
    for seed in range(runs):
        run = run_plan(Plan("kafka", seed, faults), conditions, RandomWalk(seed) if seed else None)
        assert set(run.findings) == ({ends_with} if ends_with else set()), run.findings
        made.append(run)
    return made


def published(world: World, *keys: str, partition: int = 0) -> None:
    for key in keys:
        world.publish("v", key=key, partition=partition)


def committed(world: World, partition: int = 0) -> tuple[int, list[tuple[int, int]] | None]:
    """Position and completed set."""
    commit = world.broker.committed(partition)  # type: ignore[attr-defined]
    return (0, []) if commit is None else (commit.offset, decode(commit.metadata, commit.offset, 1 << 32))


async def stopped(worker: Worker) -> None:
    """Stop the worker in order."""
    with worker.acting():
        worker.stopped = True
        worker.consumer.stop()
    await worker.ended.wait()


class Desk:
    """A handler: ``bad`` keys raise ``error``, ``held`` ones wait; ``ran`` and ``done`` are positions, by partition."""

    def __init__(self, *, bad: str = "", held: str = "", error: Exception | None = None) -> None:
        self.bad = bad.encode()
        self.held = held.encode()
        self.error = error or ValueError("no such customer")
        self.open = anyio.Event()
        self.ran: list[tuple[int, int]] = []
        self.done: list[tuple[int, int]] = []

    async def handle(self, message: Message) -> None:
        place = message.partition.id.number, message.position
        self.ran.append(place)
        if message.key == self.bad:
            raise self.error
        if message.key == self.held:
            await self.open.wait()
        await anyio.sleep(0.01)
        self.done.append(place)

    def app(self, *, dead_letters: bool = False, **settings: Any) -> App:
        return App(handler=self.handle, settings=Settings(**settings), dead_letters=dead_letters)


# --- floor and completed set


@every_protocol
@pytest.mark.parametrize("hands_over", [True, False], ids=["metadata", "prefix"])
def test_in_the_simulator_a_nak_of_message_5_commits_position_5_and_the_restart_begins_there(
    protocol: RebalanceProtocol, hands_over: bool
) -> None:
    async def test(world: World) -> None:
        published(world, *map(str, range(10)))
        desk = Desk(bad="5", error=Nak(delay=LONG))
        (first,) = world.workers(1, desk.app())
        await anyio.sleep(10.0)
        assert committed(world) == (5, [(6, 10)] if hands_over else [])
        await stopped(first)
        assert committed(world)[0] == 5
        desk.bad = b""
        desk.ran.clear()
        world.workers(1, desk.app())
        await world.settled()
        assert sorted(desk.ran) == [(0, position) for position in ([5] if hands_over else range(5, 10))]
        assert committed(world)[0] == 10

    simulated(test, protocol, hands_over=hands_over)


@every_protocol
def test_in_the_simulator_a_stuck_key_does_not_stop_other_keys(protocol: RebalanceProtocol) -> None:
    async def test(world: World) -> None:
        for partition in (0, 1):
            published(world, *["a", "b", "c", "stuck" if partition == 0 else "d"] * 5, partition=partition)
        desk = Desk(held="stuck")
        (worker,) = world.workers(1, desk.app(concurrency=4))
        await anyio.sleep(10.0)
        assert len(desk.done) == 35 and [place for place in desk.ran if place not in desk.done] == [(0, 3)]
        assert (committed(world, 0)[0], committed(world, 1)[0]) == (3, 20)
        assert worker.consumer.status().in_flight == 5
        desk.open.set()
        await world.settled()
        assert len(desk.ran) == 40 and committed(world, 0)[0] == 20

    simulated(test, protocol, partitions=2)


class Heard:
    """A replacement for the consumers' log, which a simulation silences."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, text: str, *values: object) -> None:
        self.said.append(text % values)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the consumers."""
    heard = Heard()
    for module in (running, health):
        monkeypatch.setattr(module, "log", heard)
    return heard.said


@every_protocol
def test_in_the_simulator_a_partition_at_max_ahead_names_the_message_that_blocks_it(
    protocol: RebalanceProtocol, heard: list[str]
) -> None:
    async def test(world: World) -> None:
        heard.clear()
        published(world, "stuck", *map(str, range(30)))
        published(world, *map(str, range(30)), partition=1)
        desk = Desk(held="stuck")
        (worker,) = world.workers(1, desk.app(max_ahead=10, concurrency=5))
        await anyio.sleep(0.9)
        assert heard == []
        await anyio.sleep(30.0)
        assert len([place for place in desk.done if place[0] == 0]) == 9 and committed(world, 1)[0] == 30
        # The other partition may stall too, if time jumps.
        (warning,) = [said for said in heard if "memory/0" in said]
        assert "memory/0 has reached max_ahead=10" in warning and "until position 0 is finished" in warning
        (reason,) = worker.consumer.health().reasons
        assert reason.startswith("memory/0 has reached max_ahead=10, held by memory/0 position 0, key ")
        desk.open.set()
        await world.settled()
        assert worker.consumer.healthy

    for run in simulated(test, protocol, partitions=2):
        rows = [row for segment in run.segments for row in segment.rows if row.event == "ahead_reached"]
        assert 0 in [row.position for row in rows if row.partition.endswith("/0")]


@every_protocol
def test_in_the_simulator_late_commits_are_requested_without_a_warning(
    protocol: RebalanceProtocol, heard: list[str]
) -> None:
    async def test(world: World) -> None:
        heard.clear()
        published(world, *map(str, range(100)))
        desk = Desk()
        world.workers(1, desk.app(max_ahead=8, concurrency=3, commit_interval=LONG))
        await anyio.sleep(10.0)
        assert len(desk.done) == 100

    for run in simulated(test, protocol):
        assert run.happened["ahead_reached"] and heard == []


# --- poison


def poisoned(world: World, poison: Poison, desk: Desk) -> Worker:
    """Twelve messages of four keys; the message of "c" fails twice."""
    published(world, *["a", "b", "c", "d"] * 3)
    letters = poison in ("skip", "block_and_dlq")
    retry = Retry(attempts=2, backoff=0.1)
    (worker,) = world.workers(1, desk.app(poison=poison, retry=retry, dead_letters=letters))
    return worker


def of_bad(desk: Desk) -> dict[int, int]:
    """Number of attempts of each message of the bad key."""
    return {position: count for (_, position), count in Counter(desk.ran).items() if position % 4 == 2}


@every_protocol
def test_the_policy_skip_dead_letters_the_message_and_continues(protocol: RebalanceProtocol) -> None:
    async def test(world: World) -> None:
        desk = Desk(bad="c")
        poisoned(world, "skip", desk)
        await world.settled()
        assert [(letter.position, letter.attempts) for letter in world.dead_letters] == [(2, 2), (6, 2), (10, 2)]
        assert len(desk.done) == 9 and committed(world)[0] == 12

    simulated(test, protocol)


@every_protocol
def test_the_policy_block_stops_the_key(protocol: RebalanceProtocol) -> None:
    async def test(world: World) -> None:
        desk = Desk(bad="c")
        worker = poisoned(world, "block", desk)
        await anyio.sleep(10.0)
        assert (len(desk.done), of_bad(desk), committed(world)[0]) == (9, {2: 2}, 2)
        assert worker.consumer.status().blocked == 1
        desk.bad = b""
        with worker.acting():
            assert worker.consumer.unblock(b"c") == 1
        await world.settled()
        assert (len(desk.done), of_bad(desk), committed(world)[0]) == (12, {2: 3, 6: 1, 10: 1}, 12)

    simulated(test, protocol)


@every_protocol
def test_the_policy_block_and_dlq_writes_a_dead_letter_and_stops_the_key(protocol: RebalanceProtocol) -> None:
    async def test(world: World) -> None:
        desk = Desk(bad="c")
        worker = poisoned(world, "block_and_dlq", desk)
        await anyio.sleep(10.0)
        assert [letter.position for letter in world.dead_letters] == [2]
        assert (len(desk.done), of_bad(desk), committed(world)[0]) == (9, {2: 2}, 2)
        desk.bad = b""
        with worker.acting():
            assert worker.consumer.unblock(b"c") == 1
        await world.settled()
        assert len(world.dead_letters) == 1 and len(desk.done) == 12

    simulated(test, protocol)


@every_protocol
def test_the_policy_exit_stops_the_consumer(protocol: RebalanceProtocol) -> None:
    async def test(world: World) -> None:
        desk = Desk(bad="c", held="d")
        worker = poisoned(world, "exit", desk)
        await anyio.sleep(5.0)
        # The worker drains: running handlers may end, and no handler starts.
        desk.open.set()
        await worker.ended.wait()
        done = set(desk.done)
        assert (0, 3) in done and (0, 7) not in done and committed(world)[0] == 2
        desk.bad = b""
        desk.ran.clear()
        world.workers(1, desk.app(poison="exit"))
        await world.settled()
        assert sorted(desk.ran) == sorted({(0, position) for position in range(12)} - done)

    simulated(test, protocol, ends_with="HandlerHalted")


# --- rebalances


async def later(condition: Callable[[], bool]) -> None:
    """Wait for a condition in virtual time; a condition that never holds is a finding."""
    assert await until(condition, 300.0)


@every_protocol
def test_in_the_simulator_a_revoke_drains_before_the_release(protocol: RebalanceProtocol) -> None:
    async def test(world: World) -> None:
        published(world, "held", "a")
        published(world, "held", "a", partition=1)
        desk = Desk(held="held")
        (old,) = world.workers(1, desk.app())
        await later(lambda: len(desk.done) == 2)
        (new,) = world.workers(1, desk.app())
        await anyio.sleep(10.0)
        # The drain waits for running handlers, and no other member owns their partition.
        assert {world.broker.owner(number) for number in (0, 1)} == {old.name}  # type: ignore[attr-defined]
        desk.open.set()
        await later(lambda: len(new.consumer.status().partitions) == 1 == len(old.consumer.status().partitions))
        (moved,) = [number for number in (0, 1) if world.broker.owner(number) == new.name]  # type: ignore[attr-defined]
        assert committed(world, moved) == (2, [])
        await world.settled()
        assert Counter(desk.ran) == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 1)

    simulated(test, protocol, partitions=2)


@every_protocol
@pytest.mark.parametrize("hands_over", [True, False], ids=["metadata", "prefix"])
def test_in_the_simulator_a_clean_rebalance_repeats_nothing(protocol: RebalanceProtocol, hands_over: bool) -> None:
    async def test(world: World) -> None:
        desk = Desk()
        workers: list[Worker] = []
        for number in range(6):
            world.produce("orders", 20, keys=7)
            workers += world.workers(1, desk.app(concurrency=3))
            await anyio.sleep(0.02)
            if number >= 3:
                await stopped(workers.pop(0))
        await world.settled()
        assert set(Counter(desk.ran).values()) == {1} and len(desk.done) == 120

    for run in simulated(test, protocol, partitions=4, hands_over=hands_over):
        assert run.happened["lost"] == 0 and run.happened["assigned"] >= 8


@every_protocol
def test_in_the_simulator_a_lost_partition_commits_nothing_and_its_late_results_do_not_count(
    protocol: RebalanceProtocol,
) -> None:
    async def test(world: World) -> None:
        desk = Desk(held="held")
        workers = world.workers(2, desk.app(concurrency=4, commit_interval=0.0))
        await later(lambda: all(worker.consumer.ready for worker in workers))
        await anyio.sleep(10.0)
        published(world, *["held", "a", "b"] * 2)
        await later(lambda: len(desk.done) == 4)
        await anyio.sleep(5.0)
        before = committed(world)
        assert world.broker.lose(0, world.now)
        await later(lambda: Counter(desk.ran)[0, 0] == 2)
        # The member learns of the loss with a heartbeat.
        await later(lambda: sum(len(worker.consumer.status().partitions) for worker in workers) == 1)
        # The old owner must not commit messages that finish from here on.
        assert committed(world) == before == (0, [(1, 3), (4, 6)])
        desk.open.set()
        await world.settled()
        assert committed(world)[0] == 6

    for run in simulated(test, protocol):
        assert (run.happened["lost"], run.happened["zombie"]) == (1, 1)
        for segment in run.segments:
            lost = [number for number, row in enumerate(segment.rows) if row.event == "lost"]
            after = segment.rows[lost[0] :] if lost else ()
            assert not [row for row in after if row.event in ("commit_sent", "commit_ok")]


@every_protocol
def test_a_dead_letter_outage_stops_only_its_lane(protocol: RebalanceProtocol, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        write = world.broker.write_dead_letter

        def refused(letter: DeadLetter) -> None:
            if world.now < 20.0:
                raise OSError("not confirmed")
            write(letter)

        monkeypatch.setattr(world.broker, "write_dead_letter", refused)
        desk = Desk(bad="c")
        worker = poisoned(world, "skip", desk)
        await anyio.sleep(10.0)
        assert (len(desk.done), of_bad(desk), world.dead_letters) == (9, {2: 2}, [])
        assert (committed(world)[0], worker.consumer.status().parking) == (2, 1)
        await world.settled()
        assert [letter.position for letter in world.dead_letters] == [2, 6, 10] and committed(world)[0] == 12

    simulated(test, protocol)
