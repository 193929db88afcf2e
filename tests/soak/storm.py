"""The common parts of the soaks of groups: a script of faults at moments drawn from a seed, and the repetition of
rounds."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from demo import DemoConfig, Report
from demo import run as run_demo
from demo.group.members import Members, Process
from lanes.clock import monotonic
from tests.soak.record import leave

EVENTS: Final = 20_000
FAULTS: Final = 20
"""Number of faults of a round."""

PAUSE: Final = (0.5, 2.5)
"""Shortest and longest pause between two faults, in seconds."""

LEAST: Final = 2
"""Smallest number of members that are neither frozen nor cut off."""

MOST: Final = 5

Fault = Callable[[Members], Coroutine[Any, Any, None]]


class Server(Protocol):
    """A broker that the soak can kill and start again."""

    def kill(self) -> None: ...

    def start(self) -> object: ...


class Storm:
    """The script of a round, which alternates between publishing messages and faults.

    Args:
        chance: Source of all random choices.
        server: The broker of the group.
        session: Seconds after which the broker removes a silent member.
        more: Further faults by name, which need more than `LEAST` members.
    """

    def __init__(
        self, chance: random.Random, server: Server, session: float, more: Mapping[str, Fault] | None = None
    ) -> None:
        self._chance = chance
        self._server = server
        self._below = 0.5, session / 2
        self._beyond = session + 1.0, session + 4.0
        self._more = dict(more or {})
        self._tasks: list[asyncio.Task[None]] = []
        self._broker_is_up = True
        self._broker_was_last = False
        self.group: Members | None = None
        self.struck: Counter[str] = Counter()

    def add(self, more: Mapping[str, Fault]) -> None:
        """Add further faults by name, which need more than `LEAST` members."""
        self._more |= more

    async def __call__(self, group: Members) -> None:
        """Strike `FAULTS` times, then end every fault and wait until the group has settled all messages."""
        self.group = group
        await group.until(group.settled)
        await group.feed(1 / (FAULTS + 1))
        try:
            for number in range(1, FAULTS + 1):
                await group.until(lambda: bool(self._possible(group)))
                name, fault = self._chance.choice(self._possible(group))
                self._broker_was_last = name == "broker_killed"
                self.struck[name] += 1
                group.progress.phase = name
                task = asyncio.create_task(fault(group))
                self._tasks.append(task)
                await asyncio.sleep(self._chance.uniform(*PAUSE))
                await group.feed((number + 1) / (FAULTS + 1))
        finally:
            await asyncio.gather(*self._tasks)
        await group.until(group.settled)

    def _possible(self, group: Members) -> list[tuple[str, Fault]]:
        possible: list[tuple[str, Fault]] = []
        # Not while the broker is down: a starting process then ends with an error at once.
        if self._broker_is_up and len(group.running) < MOST:
            possible.append(("joined", self._join))
        begun = [one for one in group.running if one.begun]
        # Never twice in a row, because the restart of a broker takes long. Not while a process starts, as above.
        if self._broker_is_up and not self._broker_was_last and len(begun) == len(group.running):
            possible.append(("broker_killed", self._kill_broker))
        if len(group.running) > LEAST:
            possible += [
                ("killed", self._kill),
                ("paused", self._freeze_below),
                ("stopped", self._stop),
                *self._more.items(),
            ]
            if begun:
                possible.append(("frozen", self._freeze_beyond))
        return possible

    async def _join(self, group: Members) -> None:
        await group.join()

    async def _kill(self, group: Members) -> None:
        group.kill(self._chance.choice(group.running))

    async def _stop(self, group: Members) -> None:
        await group.stop(self._chance.choice(group.running))

    async def _freeze_beyond(self, group: Members) -> None:
        # Only members that have started, because a process that is frozen during its start may end with an error.
        begun = [one for one in group.running if one.begun]
        await self._freeze(group, begun, self._chance.uniform(*self._beyond))

    async def _freeze_below(self, group: Members) -> None:
        await self._freeze(group, group.running, self._chance.uniform(*self._below))

    async def _freeze(self, group: Members, members: Sequence[Process], seconds: float) -> None:
        thaw = group.freeze(self._chance.choice(members))
        try:
            await asyncio.sleep(seconds)
        finally:
            thaw()

    async def _kill_broker(self, group: Members) -> None:
        self._broker_is_up = False
        begun = monotonic()
        await asyncio.to_thread(self._server.kill)
        try:
            await asyncio.sleep(self._chance.uniform(0.0, 2.0))
        finally:
            await asyncio.to_thread(self._server.start)
            self._broker_is_up = True
            group.note("broker", begun=begun)


async def play(config: DemoConfig, storm: Storm, keep: Path) -> Report:
    """Run the group once with faults, and write the observed faults and snapshots into the folder `keep`."""
    report = await run_demo(config)
    if storm.group is not None:
        seen = {"faults": storm.group.faults, "snapshots": storm.group.snapshots, "late": storm.group.late}
        (keep / "seen.json").write_text(json.dumps(seen, default=sorted))
    return report


@dataclass
class _Sum:
    """Sums over all rounds."""

    rounds: int = 0
    events: int = 0
    broken: int = 0
    overlaps: int = 0
    at_loss: int = 0


Round = Callable[[int, str, Path], Coroutine[Any, Any, tuple[Report, Counter[str]]]]
"""A function that runs a round. Its arguments are the seed, the kind and the folder for the files."""


def arguments(program: str) -> argparse.ArgumentParser:
    """Return the parser of the command line that all soaks share."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    return parser


def soak(program: str, kinds: Sequence[str], round_of: Round, options: argparse.Namespace | None = None) -> int:
    """Repeat rounds, with alternating kinds, for the seconds of the command line; return the exit status."""
    if options is None:
        options = arguments(program).parse_args()
    faults: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    of_all, started = _Sum(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep or Path(temporary)
        while time.monotonic() - started < options.seconds:
            seed, kind = options.seed + of_all.rounds, kinds[of_all.rounds % len(kinds)]
            keep = folder / f"{seed}-{kind}"
            report, struck = asyncio.run(round_of(seed, kind, keep))
            if report.ok:
                shutil.rmtree(keep)
            of_all.rounds += 1
            of_all.events += report.done
            of_all.broken += not report.ok
            faults += struck
            if report.group is not None:
                duplicates.update(report.group.duplicates)
                of_all.overlaps += report.group.overlaps
                of_all.at_loss += report.group.overlaps_at_loss
            happened = ", ".join(f"{count} {name}" for name, count in sorted(struck.items()))
            verdict = "ok" if report.ok else "BROKEN"
            print(f"seed {seed} {kind}: {report.done:,} events, {happened}: {verdict}", flush=True)
            for line in report.broken:
                print(f"  {line}", flush=True)
    result = {
        "seconds": round(time.monotonic() - started, 1),
        "rounds": of_all.rounds,
        "events": of_all.events,
        "faults": sum(faults.values()),
        "faults_by_kind": dict(sorted(faults.items())),
        "violations": of_all.broken,
        "overlaps": of_all.overlaps,
        "overlaps_at_loss": of_all.at_loss,
        "duplicates_by_cause": dict(duplicates),
    }
    print(json.dumps(result), flush=True)
    leave(program.rpartition(".")[2], result)
    return 1 if of_all.broken else 0
