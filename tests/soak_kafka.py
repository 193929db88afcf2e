"""A long run under faults on a real Kafka: `python -m tests.soak_kafka --seconds 600 [--seed N]`.

Round after round of the demo's group, each on topics of its own, on one broker and in every protocol in turn: members
are killed with -9, frozen beyond and below their session, stopped, added, and the broker is killed with -9, at moments
drawn from the seed. Every round is checked by its histories. Prints a line a round, then one JSON object; status 1 when
a promise broke, or when a run was repeated that nothing excuses. `--keep FOLDER`: keeps the files of such rounds there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from lanes.clock import monotonic
from lanes.demo import DemoConfig, Report
from lanes.demo import run as run_demo
from lanes.demo.backends import SESSION
from lanes.demo.config import Protocol
from lanes.demo.members import Members
from tests.components import KafkaServer

EVENTS: Final = 20_000
FAULTS: Final = 20
"""Of a round."""

PROTOCOLS: Final[tuple[Protocol, ...]] = ("classic", "cooperative", "consumer")
PAUSE: Final = (0.5, 2.5)
"""Seconds between two faults."""

BELOW: Final = (0.5, SESSION / 2)
BEYOND: Final = (SESSION + 1.0, SESSION + 4.0)
LEAST: Final = 2
"""Members that are always there and not frozen."""

MOST: Final = 5


class Storm:
    """The script of a round: publishes bit by bit, and strikes between."""

    def __init__(self, chance: random.Random, server: KafkaServer) -> None:
        self._chance = chance
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []
        self._broker_is_up = True
        self._broker_was_last = False
        self.group: Members | None = None
        self.struck: Counter[str] = Counter()

    async def __call__(self, group: Members) -> None:
        """Strike again and again, and mend everything at the end."""
        self.group = group
        await group.feed(1 / (FAULTS + 1))
        await group.until(group.settled)
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

    def _possible(self, group: Members) -> list[tuple[str, Callable[[Members], Coroutine[None, None, None]]]]:
        possible: list[tuple[str, Callable[[Members], Coroutine[None, None, None]]]] = []
        # A process that starts while there is no broker ends at once, and says so: that is not tried here.
        if self._broker_is_up and len(group.running) < MOST:
            possible.append(("joined", self._join))
        # Members alone, every other time: a broker takes long to come back.
        if self._broker_is_up and not self._broker_was_last:
            possible.append(("broker_killed", self._kill_broker))
        if len(group.running) > LEAST:
            possible += [
                ("killed", self._kill),
                ("frozen", self._freeze_beyond),
                ("paused", self._freeze_below),
                ("stopped", self._stop),
            ]
        return possible

    async def _join(self, group: Members) -> None:
        await group.join()

    async def _kill(self, group: Members) -> None:
        group.kill(self._chance.choice(group.running))

    async def _stop(self, group: Members) -> None:
        await group.stop(self._chance.choice(group.running))

    async def _freeze_beyond(self, group: Members) -> None:
        await self._freeze(group, self._chance.uniform(*BEYOND))

    async def _freeze_below(self, group: Members) -> None:
        await self._freeze(group, self._chance.uniform(*BELOW))

    async def _freeze(self, group: Members, seconds: float) -> None:
        thaw = group.freeze(self._chance.choice(group.running))
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


async def round_of(seed: int, protocol: Protocol, server: KafkaServer, keep: Path) -> tuple[Report, Counter[str]]:
    """One run of the group with its faults; ``keep``: where its files stay."""
    chance = random.Random(seed)
    storm = Storm(chance, server)
    config = DemoConfig(
        broker="kafka",
        server=server.url,
        events=EVENTS,
        seed=seed,
        latency=chance.choice([0.002, 0.01, 0.03]),
        concurrency=chance.choice([50, 300]),
        serial_seconds=0.0,
        stall_timeout=90.0,
        protocol=protocol,
        script=storm,
        keep=keep,
    )
    report = await run_demo(config)
    if storm.group is not None:
        seen = {"faults": storm.group.faults, "snapshots": storm.group.snapshots}
        (keep / "seen.json").write_text(json.dumps(seen, default=sorted))
    return report, storm.struck


def main() -> int:
    """The soak; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak_kafka")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    faults: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    rounds = events = broken = overlaps = at_loss = 0
    started = time.monotonic()
    with KafkaServer() as server, tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep or Path(temporary)
        while time.monotonic() - started < options.seconds:
            seed, protocol = options.seed + rounds, PROTOCOLS[rounds % len(PROTOCOLS)]
            keep = folder / f"{seed}-{protocol}"
            report, struck = asyncio.run(round_of(seed, protocol, server, keep))
            if report.ok:
                shutil.rmtree(keep)
            rounds += 1
            events += report.done
            faults += struck
            broken += not report.ok
            if report.group is not None:
                duplicates.update(report.group.duplicates)
                overlaps += report.group.overlaps
                at_loss += report.group.overlaps_at_loss
            happened = ", ".join(f"{count} {name}" for name, count in sorted(struck.items()))
            verdict = "ok" if report.ok else "BROKEN"
            print(f"seed {seed} {protocol}: {report.done:,} events, {happened}: {verdict}", flush=True)
            for line in report.broken:
                print(f"  {line}", flush=True)
    result = {
        "seconds": round(time.monotonic() - started, 1),
        "rounds": rounds,
        "events": events,
        "faults": sum(faults.values()),
        "faults_by_kind": dict(sorted(faults.items())),
        "violations": broken,
        "overlaps": overlaps,
        "overlaps_at_loss": at_loss,
        "duplicates_by_cause": dict(duplicates),
    }
    print(json.dumps(result), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
