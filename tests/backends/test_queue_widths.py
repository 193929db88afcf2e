"""A partitioned queue of real processes on each broker: two members and two producers. They are killed while the number
of partitions changes by the runbook. No message is stranded or lost, and each key is in order within a number.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from demo.events import GENERATED_EVENTS, load
from lanes import PartitionedQueue
from memsource import check
from memsource.checkers import CHECKERS, TIMED, NothingStranded
from memsource.history.reader import read
from tests.backends.queue_producer import PARTS, SEED
from tests.components import wait_until
from tests.conftest import Spawn
from tests.jetstream.workload import unique

pytestmark = pytest.mark.slow

SECONDS: Final = 240.0
"""Longest wait for one condition."""

RATE: Final = 100
"""Events a second of each producer while the number of partitions changes."""

PROVEN: Final = {"NothingStranded", "PerKeyOrder", "NoOverlap", "AtLeastOnce", "OrderAcrossAssignments"}
"""Checkers whose verdict must be that the history proves the promise."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true, which reads files or runs a command."""

    def looked() -> bool:
        if condition():
            return True
        time.sleep(0.4)
        return False

    wait_until(looked, what, seconds=SECONDS)


class Deployment:
    """The workers and the producers of one queue, each a process.

    Attributes:
        broker: ``kafka`` or ``jetstream``.
        name: Name of the queue, and of its stream.
        folder: The files of all processes.
        killed: Number of killed processes by kind.
    """

    def __init__(self, broker: str, url: str, name: str, folder: Path, spawn: Spawn) -> None:
        self.broker, self.url, self.name, self.folder = broker, url, name, folder
        self.killed: Counter[str] = Counter()
        self._spawn = spawn
        self._running: dict[str, subprocess.Popen[str]] = {}
        (folder / "history").mkdir()

    # --- processes

    def worker(self, member: str, width: int) -> None:
        """Start a worker; one of this name that runs is killed first."""
        self._start(f"worker-{member}", "tests.backends.queue_worker", width, member, str(self.folder))

    def producer(self, part: int, width: int, rate: int = RATE) -> None:
        """Start a producer of a half of the cases, after the kill of the running producer."""
        self._start(f"producer-{part}", "tests.backends.queue_producer", width, str(part), str(self.folder), str(rate))

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        assert process.poll() is None, f"{name} has ended: {process.communicate()}"
        process.kill()
        process.wait()
        self.killed[name.partition("-")[0]] += 1

    def stop(self, name: str) -> None:
        """End a process in order."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said

    def ended(self, name: str) -> bool:
        """Whether a process has ended, in order."""
        process = self._running[name]
        assert process.poll() in (None, 0), process.communicate()
        return process.returncode == 0

    def _start(self, name: str, module: str, width: int, *arguments: str) -> None:
        if name in self._running:
            self.kill(name)
        self._running[name] = self._spawn("-m", module, self.broker, self.url, self.name, str(width), *arguments)

    # --- the command

    def command(self, *arguments: str) -> list[str]:
        """The words of `lanes queue`."""
        stream = ("--stream", self.name) if self.broker == "jetstream" else ()
        return ["-m", "lanes", "queue", *arguments, self.name, "--server", self.url, *stream, "--json"]

    def run(self, *arguments: str) -> dict[str, Any]:
        """Run `lanes queue`, and return its output."""
        process = self._spawn(*self.command(*arguments))
        out, error = process.communicate(timeout=SECONDS)
        assert process.returncode in (0, 3) and out, (process.returncode, out, error)
        found: dict[str, Any] = {**json.loads(out), "status": process.returncode}
        return found

    def killed_within(self, seconds: float, *arguments: str) -> None:
        """Kill `lanes queue` after a time, unless it has ended."""
        process = self._spawn(*self.command(*arguments))
        time.sleep(seconds)
        process.kill()
        process.communicate()
        self.killed["command"] += process.returncode == -signal.SIGKILL

    def reaches(self, step: int, *arguments: str) -> None:
        """Run `lanes queue` until a step is done and nothing is wrong."""

        def reached() -> bool:
            found = self.run(*arguments)
            print(found)
            return bool(found["status"] == 0 and found["steps"][step]["progress"] == "done")

        until(reached, f"step {step + 1} of {arguments}")

    # --- results

    def numbers(self, pattern: str) -> list[int]:
        """The whole lines of files, in order."""
        found = []
        for file in sorted(self.folder.glob(pattern)):
            found += [int(line) for line in file.read_bytes().split(b"\n")[:-1] if line]
        return found

    def confirmed(self) -> set[int]:
        return set(self.numbers("*.confirmed"))

    def handled(self) -> set[int]:
        return set(self.numbers("*.handled"))

    def goes_on(self, count: int = 300) -> None:
        """Wait until a number of further events is published and handled."""
        before = len(self.confirmed())
        until(
            lambda: len(self.confirmed()) >= before + count and len(self.handled()) >= before + count,
            f"{count} further events",
        )


@pytest.fixture(params=["kafka", "jetstream"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path, spawn: Spawn) -> Iterator[Deployment]:
    """A queue without topics and subjects."""
    server = request.getfixturevalue("kafka" if request.param == "kafka" else "nats_server")
    made = Deployment(request.param, server.url, unique("Q"), tmp_path, spawn)
    yield made
    if request.param == "kafka":
        admin = AdminClient({"bootstrap.servers": server.url})
        topics = [each for each in admin.list_topics(timeout=30).topics if each.startswith(made.name)]
        for deleted in admin.delete_topics(topics).values():
            deleted.result(30)


def create(deployment: Deployment, width: int) -> None:
    """Create the topics, or the stream with the subjects, of a queue."""
    names = PartitionedQueue(deployment.name, width).names
    if deployment.broker == "kafka":
        admin = AdminClient({"bootstrap.servers": deployment.url})
        for made in admin.create_topics([NewTopic(name, 2, 1) for name in names]).values():
            made.result(30)
        return
    subjects = [subject for name in names for subject in (name, f"{name}.>")]
    code = (
        "import asyncio, nats, sys\n"
        "async def main():\n"
        "    client = await nats.connect(sys.argv[1])\n"
        "    await client.jetstream().add_stream(name=sys.argv[2], subjects=sys.argv[3:])\n"
        "    await client.close()\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code, deployment.url, deployment.name, *subjects], check=True, timeout=60)


def judge(deployment: Deployment) -> dict[str, str]:
    """Let the checkers without deadlines judge the histories, and return the notes. A busy machine may be slow."""
    segments = read([deployment.folder / "history"])
    workers = [each for each in segments if not each.member.startswith("producer")]
    # A message may be handled before its producer has written its row.
    untimed = [each for each in CHECKERS if each not in TIMED]
    verdicts = [*check(workers, untimed), *check(segments, [NothingStranded])]
    assert [each for each in verdicts if each.violations] == []
    assert {each.name for each in verdicts if each.status == "passed"} >= PROVEN, verdicts
    print(verdicts[-1], deployment.killed, len(deployment.confirmed()))
    assert verdicts[-1].checked > 0
    return {each.name: each.note for each in verdicts}


def finish(deployment: Deployment, members: str) -> None:
    """Wait until everything is handled, and stop the workers in order."""
    published = deployment.confirmed()
    until(lambda: deployment.handled() >= published, "every event to be handled")
    for member in members:
        deployment.stop(f"worker-{member}")


@pytest.mark.timeout(900)
def test_all_events_of_the_log_are_in_order_over_four_partitions_and_two_members(deployment: Deployment) -> None:
    create(deployment, 4)
    for member in "ab":
        deployment.worker(member, 4)
    for part in range(PARTS):
        deployment.producer(part, 4, rate=0)
    until(
        lambda: all(deployment.ended(f"producer-{part}") for part in range(PARTS)),
        "the producers to end",
    )
    assert len(deployment.confirmed()) == GENERATED_EVENTS
    finish(deployment, "ab")
    notes = judge(deployment)
    assert notes["NothingStranded"] == "0 broken orders across partitions"
    # Both members have worked, and no event was handled twice.
    assert all(deployment.numbers(f"{member}.handled") for member in "ab")
    handled = Counter(deployment.numbers("*.handled"))
    assert set(handled.values()) == {1} and len(handled) == GENERATED_EVENTS
    # The numbers of a case rise, because one member has its partition at a time.
    cases = [event.case for event in load(None, None, SEED)]
    last: dict[tuple[str, str], int] = {}
    for member in "ab":
        for number in deployment.numbers(f"{member}.handled"):
            assert last.get((member, cases[number]), -1) < number
            last[member, cases[number]] = number


@pytest.mark.timeout(1_800)
def test_the_number_of_partitions_grows_and_shrinks_under_load_and_kills_at_every_step(deployment: Deployment) -> None:
    """Each process is killed at least once in each step: before its deployment, after it, or during it."""
    create(deployment, 2)
    group = ("--group", f"g-{deployment.name}" if deployment.broker == "kafka" else "lanes")
    grow = ("grow", "--from", "2", "--to", "4", *group)
    shrink = ("shrink", "--from", "4", "--to", "2", *group)
    for member in "ab":
        deployment.worker(member, 2)
    for part in range(PARTS):
        deployment.producer(part, 2)
    deployment.goes_on()

    # Grow: the physical queues, the workers, the producers.
    crashes(deployment, 2, 2)
    for seconds in (0.1, 0.3, 0.6, 0.9):
        deployment.killed_within(seconds, *grow, "--apply")
    deployment.reaches(0, *grow, "--apply")
    deploy_workers(deployment, before=2, after=4, command=(*grow, "--apply"))
    deployment.reaches(1, *grow)
    deploy_producers(deployment, before=2, after=4, workers=4)
    deployment.goes_on()
    assert deployment.run(*grow)["status"] == 0

    # Shrink: the producers, a wait, the workers, the removal.
    deploy_producers(deployment, before=4, after=2, workers=4)
    crashes(deployment, 4, 2)
    deployment.goes_on()
    deployment.reaches(1, *shrink)
    deploy_workers(deployment, before=4, after=2, command=(*shrink, "--apply"))
    deployment.goes_on()
    # The command waits for a second, to see whether messages arrive.
    for seconds in (0.1, 0.5, 0.9, 1.5):
        deployment.killed_within(seconds, *shrink, "--apply")
    crashes(deployment, 2, 2)
    deployment.reaches(3, *shrink, "--apply")
    status = deployment.run("status", "--partitions", "2")
    assert (status["status"], status["stranded"], status["missing"]) == (0, [], [])

    deployment.goes_on()
    for part in range(PARTS):
        deployment.stop(f"producer-{part}")
    finish(deployment, "ab")
    judge(deployment)
    assert min(deployment.killed[kind] for kind in ("worker", "producer", "command")) >= 3


def crashes(deployment: Deployment, workers: int, producers: int) -> None:
    """Kill a worker and a producer, which start again with the number that was deployed to them."""
    deployment.worker("a", workers)
    deployment.producer(0, producers)


def deploy_producers(deployment: Deployment, *, before: int, after: int, workers: int) -> None:
    """Deploy another number to one producer after the other, with a crash of the other processes between."""
    deployment.producer(0, after)
    deployment.producer(1, before)
    deployment.worker("b", workers)
    deployment.goes_on(100)
    deployment.producer(1, after)
    deployment.producer(0, after)


def deploy_workers(deployment: Deployment, *, before: int, after: int, command: tuple[str, ...]) -> None:
    """Deploy another number to the workers, with crashes between: one after the other on Kafka.

    All members of a cohort must be gone before the command removes the stored number.
    """
    deploy: Callable[[str, int], None] = deployment.worker
    if deployment.broker == "kafka":
        deploy("a", after)
        deploy("b", before)
        deployment.goes_on(100)
        deploy("a", after)
        deploy("b", after)
        return
    for member in "ab":
        deployment.kill(f"worker-{member}")
    deployment.killed_within(0.5, *command)

    def forgot() -> bool:
        found = deployment.run(*command)
        print(found)
        return any(f"forgot its {before} partition(s)" in each for each in found["done"])

    until(forgot, "the leases of the members to end")
    deploy("a", after)
    deployment.killed_within(0.5, *command)
    deploy("b", after)
    deploy("a", after)
