"""The main part of a run with a group: member processes, their faults, and the broker's view of the group."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio

from demo.brokers.broker import GroupBroker, Left
from demo.config import HOOK_EVERY, DemoConfig, Script
from demo.errors import NoAnswer
from demo.group.feed import Feed
from demo.group.findings import Fault, FaultKind
from demo.lateness import Delay, Lateness
from demo.ledger import Ledger
from demo.membership import NONE, Snapshot
from demo.places import Places
from demo.progress import Kill, Progress
from demo.supervise import Child
from demo.workers.pace import Pace
from demo.workers.sample import worker_config
from demo.workers.service import Service
from lanes.clock import monotonic
from lanes.process import EXIT_DRAINED, EXIT_FAILED

_POLL: Final = 0.25
"""Seconds between two requests for the backlog."""

_LOOK: Final = 0.1
"""Seconds between two requests for the state of the group."""

_STOP_WITHIN: Final = 30.0
"""Most seconds that a member may take to end after SIGTERM."""

_WORDS: Final = ("in_flight", "max_in_flight", "running", "ready", "held", "retries", "dead_lettered", "settled")


class Stopped(Exception):
    """The run has failed or ended, so its scenario must end."""


class Process:
    """One member process of a group, with its latest report.

    Args:
        name: Name of the member in its history and in the group.
        child: Process of the member.

    Attributes:
        begun: Whether the member has received a message.
        frozen: Whether the member is frozen.
        leaving: Whether the member received a stop signal, was killed, or has ended.
        met_outage: Whether the member ran during an outage or a slow answer of the broker.
        status: Latest report of the member.
    """

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self.child = child
        self.begun = False
        self.frozen = False
        self.leaving = False
        self.met_outage = False
        self.status: dict[str, Any] = {}


class Members:
    """The members of a group over one topic, or of a cohort over one stream. Runs on asyncio only.

    Args:
        config: Configuration of the run.
        broker: Broker that the members read from.
        ledger: Ledger that stores the events of the handlers.
        places: Folders of the run.
        progress: State of the run, updated in place.
        feed: Publisher of the log.
        script: Scenario, called with this object. The scenario publishes the log with ``feed``, may call ``join``,
            ``kill``, ``freeze`` and ``stop``, and waits with ``until`` and ``handled``.

    Attributes:
        broker: Broker that the members read from.
        seconds: Seconds from the start of the first member to the last finished event.
        kills: Number of members killed.
        workers: Number of members started.
        peak_in_flight: Highest number of messages in flight that a member reported.
        rss_mb: Highest memory in MiB that a member reported.
        failure: Reason why the run ended early; None = the run did not end early.
        faults: The faults of the scenario.
        snapshots: States of the group that the broker reported, in the order of the reports.
    """

    def __init__(
        self,
        config: DemoConfig,
        broker: GroupBroker,
        ledger: Ledger,
        places: Places,
        progress: Progress,
        feed: Feed,
        script: Script,
    ) -> None:
        self._config = config
        self._script = script
        self.broker = broker
        self._ledger = ledger
        self._places = places
        self._feed = feed
        self._token = secrets.token_hex(16)
        self._service = Service(
            ledger, latency=config.latency, token=self._token, on_status=self._on_status, on_commit=self._on_commit
        )
        self._processes: dict[str, Process] = {}
        self._over = False
        self._left: Left | None = None
        self._pace = Pace()
        self._committed = asyncio.Event()
        self.progress = progress
        self.snapshot: Snapshot = NONE
        self.snapshots: list[Snapshot] = []
        self.faults: list[Fault] = []
        self._lateness = Lateness(starved=False)
        self._late: dict[str, list[Delay]] = defaultdict(list)
        self.kills = 0
        self.workers = 0
        self.peak_in_flight = 0
        self.rss_mb = 0.0
        self.failure: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first member to the last finished event."""
        return self._pace.seconds

    @property
    def running(self) -> list[Process]:
        """Running members, without frozen and stopping members, in the order of their starts."""
        return [one for one in self._processes.values() if not (one.leaving or one.frozen)]

    def busiest(self) -> Process:
        """The running member with the most messages in flight, by the latest reports."""
        return max(self.running, key=lambda one: int(one.status.get("in_flight", 0)))

    @property
    def left(self) -> int:
        """Number of published, unsettled events, by the broker's latest report; 0 before a report."""
        return self._left.pending + self._left.unacknowledged if self._left is not None else 0

    @property
    def late(self) -> Mapping[str, Sequence[Delay]]:
        """Spans in which each member was late, by name.

        If the members reach the broker through this process, the spans of this process count for each member.
        """
        own = self._lateness.spans if self._config.route is not None else []
        return {name: [*self._late[name], *own] for name in self._processes}

    # --- the run

    async def run(self) -> None:
        """Run until the members have handled all events, or the run fails.

        Raises ``LanesError`` if the parent cannot continue.
        """
        await self._service.start(self._places.sockets)
        self._pace.begin()
        self.progress.phase = "starting the members"
        lookers = [asyncio.create_task(each) for each in (self._poll(), self._look(), self._lateness.measure())]
        script: asyncio.Task[None] | None = None
        try:
            for _ in range(self._config.processes):
                await self.join(fault=False)
            script = asyncio.create_task(self._play(self._script))
            while not self._finished(script):
                await self._tick([*lookers, script])
            if self.failure is None:
                self.progress.phase = "draining"
                await asyncio.gather(*(self._end(one) for one in list(self._processes.values())))
        finally:
            # asyncio.wait_for swallows a cancellation that arrives together with an answer. A flag ends the tasks too.
            self._over = True
            tasks = [*lookers, *([script] if script is not None else [])]
            for task in tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(one.child.end() for one in self._processes.values()))
                await self._service.close()

    async def _play(self, script: Callable[[Members], Any]) -> None:
        with contextlib.suppress(Stopped):
            await script(self)

    async def _tick(self, tasks: list[asyncio.Task[None]]) -> None:
        self.progress.seconds = self._pace.elapsed
        if self._service.failure is not None:
            raise self._service.failure
        for task in tasks:
            if task.done():
                task.result()
        for one in list(self._processes.values()):
            if one.child.status is not None and not one.leaving:
                await self._ended(one)
        if self._config.on_progress is not None:
            await self._config.on_progress(self.progress)
        await asyncio.sleep(HOOK_EVERY)

    # --- the calls of a script

    async def feed(self, share: float) -> int:
        """Publish events up to the ``share`` of all events. Return the total number of published events.

        The call waits until the broker has confirmed the events.
        """
        count = await self._feed.publish(share)
        self._pace.moved()
        return count

    async def handled(self, count: int) -> None:
        """Wait until the members have stored or dead-lettered ``count`` events.

        Raises ``Stopped`` if the run has ended before.
        """
        progress = self.progress
        while self._ledger.stored + progress.dead_letters < count:
            if self.failure is not None or self._over:
                raise Stopped
            self._committed.clear()
            # The broker is asked for the number of dead letters only at an interval.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL):
                    await self._committed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` returns True. Raises ``Stopped`` if the run has ended before."""
        while not condition():
            if self.failure is not None or self._over:
                raise Stopped
            await asyncio.sleep(HOOK_EVERY / 2)

    def settled(self) -> bool:
        """Whether the broker reports a stable group of exactly the running members, which own all partitions."""
        snapshot = self.snapshot
        return (
            snapshot.stable
            and set(snapshot.members) == {one.name for one in self.running}
            and len(snapshot.owners) == self.broker.partitions
        )

    async def join(self, *, fault: bool = True) -> Process:
        """Start one more member. ``fault`` says whether to record the start as a join."""
        self.workers += 1
        name = f"member-{self.workers}"
        route = self._config.route
        told = worker_config(
            self._config,
            self.broker,
            self._places,
            self._service,
            self._token,
            member=name,
            server=None if route is None else route(name),
        )
        process = Process(name, Child(self._config.worker_command, self._places.log, told.environment()))
        if fault:
            self.note("join", name)
        await process.child.start()
        self._processes[name] = process
        self.progress.starts = self.workers
        return process

    def kill(self, process: Process) -> None:
        """Kill a member with -9."""
        process.leaving = True
        self.kills += 1
        self.note("kill", process.name)
        process.child.kill()
        self.progress.kills.append(Kill(process.name, self._ledger.stored, self._pace.elapsed))

    def freeze(self, process: Process) -> Callable[[], None]:
        """Freeze a member. Return the function that resumes the member."""
        begun = monotonic()
        process.frozen = True
        process.child.freeze()

        def thaw() -> None:
            process.child.thaw()
            process.frozen = False
            kind: FaultKind = "freeze" if process.name not in self.snapshot.members else "pause"
            self.faults.append(Fault(kind, process.name, begun, monotonic()))

        return thaw

    async def stop(self, process: Process) -> None:
        """Let a member drain its partitions and stop, and wait until its process has ended."""
        self.note("stop", process.name)
        await self._end(process)

    def note(self, kind: FaultKind, member: str = "", begun: float | None = None) -> None:
        """Record a fault that lasted from ``begun`` until now. The default of ``begun`` is the current time."""
        now = monotonic()
        self.faults.append(Fault(kind, member, now if begun is None else begun, now))

    # --- processes

    async def _end(self, process: Process) -> None:
        if process.leaving:
            return
        process.leaving = True
        process.child.terminate()
        status = await process.child.wait(_STOP_WITHIN)
        words = process.child.last_words
        if status is None:
            self._fail(f"{process.name} did not end within {_STOP_WITHIN:g} s of SIGTERM: {words}")
        elif status != EXIT_DRAINED and (process.begun or status != -signal.SIGTERM):
            # A member that has just started does not handle the signal yet.
            self._fail(f"{process.name} ended with status {status} after SIGTERM: {words}")

    async def _ended(self, process: Process) -> None:
        status = await process.child.wait()
        process.leaving = True
        # A member that ended at its start without a broker is no failure of a promise.
        if status == EXIT_FAILED and not process.begun and (process.met_outage or self._pace.slow):
            await process.child.end()
            joined = [one for one in self.faults if one.kind == "join" and one.member == process.name]
            self.faults = [one for one in self.faults if one not in joined]
            await self.join(fault=bool(joined))
        else:
            words = process.child.last_words or "no output"
            self._fail(f"{process.name} ended unexpectedly with status {status}: {words}")

    def _fail(self, failure: str) -> None:
        self.failure = self.failure or failure

    # --- reports

    def _on_status(self, status: dict[str, Any]) -> None:
        process = self._processes.get(status["member"])
        if process is None:
            return
        # A member with an open source may still fail without a broker, before its first message.
        process.begun = process.begun or bool(status["in_flight"] or status["settled"])
        process.status = status
        self._late[process.name] += [Delay(begun, ended) for begun, ended in status["late"]]
        self.peak_in_flight = max(self.peak_in_flight, status["peak_in_flight"])
        self.rss_mb = max(self.rss_mb, status["rss_mb"])
        all_of_them = [one.status for one in self._processes.values() if one.status and not one.leaving]
        oldest = max(all_of_them, key=lambda one: float(one["oldest_age"]), default=status)
        self.progress.status = {
            **{word: sum(one[word] for one in all_of_them) for word in _WORDS},
            **{word: oldest[word] for word in ("oldest_age", "oldest_key", "oldest_attempt")},
            "floor": self._left.floor if self._left is not None else 0,
        }

    def _on_commit(self) -> None:
        """Count finished events after every commit of the ledger."""
        ledger, progress = self._ledger, self.progress
        if ledger.stored != progress.stored:
            self._pace.done()
        progress.stored, progress.repeats, progress.violations = ledger.stored, ledger.repeats, ledger.violations
        self._committed.set()

    async def _poll(self) -> None:
        """Ask the broker for the backlog, at an interval."""
        progress = self.progress
        while not self._over:
            self._pace.ask()
            with contextlib.suppress(NoAnswer):
                self._left = await self.broker.left()
                letters = await self.broker.count_dead_letters()
                if letters != progress.dead_letters:
                    self._pace.done()
                progress.dead_letters = letters
            progress.answering = self.broker.connected
            if not progress.answering or self._pace.slow:
                for one in self._processes.values():
                    one.met_outage = True
            self._pace.answered()
            progress.pending = self.left
            await asyncio.sleep(_POLL)

    async def _look(self) -> None:
        """Ask the broker for the members and their partitions, at an interval."""
        while not self._over:
            with contextlib.suppress(NoAnswer):
                self.snapshot = await self.broker.group()
                self.snapshots.append(self.snapshot)
                if self.settled():
                    for kill in self.progress.kills:
                        kill.over("the other members", self._pace.elapsed)
            await asyncio.sleep(_LOOK)

    # --- the end

    def _finished(self, script: asyncio.Task[None]) -> bool:
        if self.failure is not None:
            return True
        progress = self.progress
        seen = (
            self._ledger.stored,
            self._ledger.repeats,
            progress.dead_letters,
            progress.pending,
            self.workers,
            len(self.faults),
            self._feed.published,
        )
        self._pace.look(seen, answering=progress.answering)
        missing = progress.events - self._ledger.stored - progress.dead_letters
        no_more = self._pace.no_more(missing, progress.status.get("in_flight", 0))
        if script.done() and self._left is not None and not self.left and no_more:
            return True
        if self._pace.quiet > self._config.stall_timeout:
            self._fail(
                f"no progress for {self._config.stall_timeout:g} s: {missing} of {progress.events} events are missing, "
                f"{progress.pending} messages are unsettled, {len(self.running)} members run and "
                f"{progress.status.get('in_flight', 0)} messages are in flight; the broker reports the state "
                f"{self.snapshot.state} and the owners {sorted(set(self.snapshot.owners.values()))}"
            )
        return self.failure is not None
