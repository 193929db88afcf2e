"""A long run in the simulator and on real NATS servers: `python -m tests.soak.simulation --seconds 600 [--seed N]`.

First, the soak explores every order of events around the engine with four messages, and searches for all planted
faults. This search takes minutes in addition to `--seconds`. For half of the time, the soak runs the simulated
campaigns: schedules, every crash point, cohorts under faults, and the real adapters over simulated brokers. For the
other half, the soak repeats rounds of the demo, each on a fresh server. At moments drawn from the seed, the soak kills
and freezes the worker and the server.

The soak prints a line for each scope, step and round, then one JSON object, which also goes to the table of the last
soaks; see `tests.soak.record`. The exit status is 1 after a broken promise, a missed planted fault, or a rare branch
that no run took. From `ALL_PAIRS` seconds on, the exit status is also 1 if no run reached a pair of faults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from demo import DemoConfig, Report
from demo import run as run_demo
from demo.progress import Progress
from memsource.adapters.campaign import AdapterReport
from memsource.explorer import GroupWorld, search
from memsource.sim.plans.plan import FAULT_KINDS
from tests.cohort import slices as cohorts
from tests.components import NatsServer
from tests.memsource.explorer.scopes import SOAK
from tests.memsource.sim.slices import Tally, tally
from tests.mutants.hunted import hunted
from tests.mutants.table import MUTANTS
from tests.simulated import slices as adapters
from tests.soak.record import leave

EVENTS: Final = 8_000
SEEDS: Final = 1_000_000_000
SCHEDULE_SEEDS: Final = 50
SWEEP_SEEDS: Final = 5
COHORT_SEEDS: Final = 50
ADAPTER_SEEDS: Final = 100
ALL_PAIRS: Final = 600.0
"""Seconds of a soak that has to reach every pair of faults."""
FREEZE: Final = (0.5, 4.0)
"""Shortest and longest duration of a freeze, in seconds."""


class Faults:
    """The faults of a round: each strikes once a drawn share of the events is done."""

    def __init__(self, chance: random.Random, server: NatsServer) -> None:
        self._chance = chance
        self._server = server
        self._at = sorted(chance.uniform(0.05, 0.95) for _ in range(chance.randint(1, 3)))
        self._tasks: list[asyncio.Task[None]] = []
        self._one_at_a_time = asyncio.Lock()  # a killed server cannot be frozen
        self.struck: Counter[str] = Counter()

    async def __call__(self, progress: Progress) -> None:
        """Strike if a fault is due; the demo calls this object every few milliseconds."""
        done = (progress.stored + progress.dead_letters) / max(1, progress.events)
        if self._at and done >= self._at[0] and progress.worker_pid is not None:
            self._at.pop(0)
            name, fault = self._chance.choice(
                [
                    ("worker frozen", lambda: self._freeze_worker(progress.worker_pid)),
                    ("server killed", self._kill_server),
                    ("server frozen", self._freeze_server),
                ]
            )
            self.struck[name] += 1
            # In a task, because the demo must not wait for the end of the fault.
            self._tasks.append(asyncio.create_task(self._strike(fault)))

    async def over(self) -> None:
        """Wait for the end of all faults, and raise the first error of a fault."""
        await asyncio.gather(*self._tasks)

    async def _strike(self, fault: Callable[[], Awaitable[None]]) -> None:
        async with self._one_at_a_time:
            await fault()

    async def _freeze_worker(self, pid: int | None) -> None:
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self._chance.uniform(*FREEZE))
            os.kill(pid, signal.SIGCONT)

    async def _kill_server(self) -> None:
        await asyncio.to_thread(self._server.kill)
        await asyncio.sleep(self._chance.uniform(0.0, 2.0))
        await asyncio.to_thread(self._server.start)

    async def _freeze_server(self) -> None:
        self._server.pause()
        await asyncio.sleep(self._chance.uniform(*FREEZE))
        self._server.resume()


async def round_of(seed: int) -> tuple[Report, Counter[str]]:
    """Run the demo once with a separate server and faults."""
    chance = random.Random(seed)
    server = NatsServer()
    await asyncio.to_thread(server.start)
    try:
        faults = Faults(chance, server)
        config = DemoConfig(
            server=server.url,
            events=EVENTS,
            seed=seed,
            latency=chance.choice([0.002, 0.01, 0.03]),
            concurrency=chance.choice([50, 300, 1_000]),
            kill_at=sorted({round(chance.uniform(0.02, 0.98), 3) for _ in range(chance.randint(0, 4))}),
            serial_seconds=0.0,
            ack_wait=chance.choice([3.0, 30.0]),
            on_progress=faults,
        )
        report = await run_demo(config)
        await faults.over()
    finally:
        await asyncio.to_thread(server.stop)
    struck = faults.struck
    struck["worker killed"] = report.kills
    return report, struck


def explore() -> tuple[int, int]:
    """Explore the scopes that are too large for daily tests; return the numbers of states and of broken scopes."""
    states = broken = 0
    for name, scope in SOAK.items():
        exploration = search(GroupWorld(scope))
        lacking = scope.unreached(exploration.reached)
        ok = exploration.complete and not lacking
        print(f"explored {name}: {exploration}: {'ok' if ok else 'BROKEN'}", flush=True)
        if exploration.violation is not None:
            print(exploration.violation, flush=True)
        elif lacking:
            print(f"  never reached: {', '.join(lacking)}", flush=True)
        states += exploration.states
        broken += not ok
    return states, broken


def plant() -> list[str]:
    """Search for all planted faults; return the names of those that the named checks have found."""
    found = hunted(list(MUTANTS))
    for name, mutant in MUTANTS.items():
        print(found[name].line(mutant), flush=True)
    return [name for name, mutant in MUTANTS.items() if found[name].by(mutant)]


def simulate(seed: int, seconds: float) -> tuple[Tally, int]:
    """Run the simulated campaign for some seconds; return its counts, and the number of runs that crash at a
    boundary."""
    total, swept = Tally(), 0
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        made = tally("schedules", range(seed, seed + SCHEDULE_SEEDS))
        crashed = tally("sweep", range(seed, seed + SWEEP_SEEDS))
        for found in made.found + crashed.found:
            print(f"  {found}", flush=True)
        print(f"simulated seed {seed}: {made.runs:,} schedules, {crashed.runs:,} crash points", flush=True)
        swept += crashed.runs - crashed.sweeps
        total += made
        total += crashed
        seed += SCHEDULE_SEEDS
    return total, swept


def simulate_cohorts(seed: int, seconds: float) -> cohorts.Tally:
    """Run the campaign of the cohort for some seconds."""
    total = cohorts.Tally()
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        made = cohorts.tally(range(seed, seed + COHORT_SEEDS))
        for found in made.found:
            print(f"  {found}", flush=True)
        print(f"simulated cohorts from seed {seed}: {made.runs:,} schedules", flush=True)
        total += made
        seed += COHORT_SEEDS
    return total


def simulate_adapters(seed: int, seconds: float) -> dict[str, AdapterReport]:
    """Run the real adapters over their simulated brokers in turns for some seconds."""
    total = {name: AdapterReport() for name in adapters.ADAPTERS}
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        for name, report in total.items():
            made = adapters.tally(name, range(seed, seed + ADAPTER_SEEDS))
            for found in made.violations:
                print(f"  {found}", flush=True)
            print(f"simulated {name} from seed {seed}: {made.schedules:,} schedules", flush=True)
            report += made
        seed += ADAPTER_SEEDS
    for name, report in total.items():
        made = adapters.sought(name, report, seed)
        for found in made.violations:
            print(f"  {found}", flush=True)
        print(f"simulated {name}: {made.schedules:,} schedules sought {len(report.unreached)} pairs", flush=True)
        report += made
        print(f"{name}: pairs never reached: {', '.join(map(str, report.unreached)) or 'none'}", flush=True)
    return total


def table(total: Tally) -> None:
    """Print how often each event happened in the simulator."""
    for name, times in sorted(total.happened.items()):
        print(f"{name:24} {times:12,}", flush=True)


def main() -> int:
    """Run the soak, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.simulation")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    states, broken_scopes = explore()
    planted = plant()
    simulated, crash_points = simulate(options.seed % SEEDS, options.seconds / 6)
    table(simulated)
    shared = simulate_cohorts(options.seed % SEEDS, options.seconds / 6)
    real = simulate_adapters(options.seed % SEEDS, options.seconds / 6)
    missing = simulated.missing() + [f"cohort: {name}" for name in shared.missing()]
    if missing:
        print(f"never happened: {', '.join(missing)}", flush=True)
    started = time.monotonic()
    rounds = events = redelivered = broken = 0
    faults: Counter[str] = Counter()
    while time.monotonic() - started < options.seconds / 2:
        seed = options.seed + rounds
        report, struck = asyncio.run(round_of(seed))
        rounds += 1
        events += report.done
        redelivered += sum(report.redelivered.values())
        faults += struck
        happened = ", ".join(f"{count} {name}" for name, count in sorted(struck.items()) if count) or "no fault"
        print(f"seed {seed}: {report.done:,} events, {happened}: {'ok' if report.ok else 'BROKEN'}", flush=True)
        for line in report.broken:
            print(f"  {line}", flush=True)
        broken += not report.ok
    unreached = sum(len(report.unreached) for report in real.values())
    result: dict[str, Any] = {
        "seconds": round(time.monotonic() - started, 1),
        "rounds": rounds,
        "events": events,
        "schedules": simulated.runs - crash_points,
        "virtual_hours": round(simulated.seconds / 3600, 1),
        "crash_points": crash_points,
        "cohort_schedules": shared.runs,
        "faults": sum(faults.values()) + sum(simulated.happened[f"fault: {kind}"] for kind in FAULT_KINDS),
        **{f"{name}_schedules": report.schedules for name, report in real.items()},
        **{f"{name}_pairs": (len(report.pairs), report.possible) for name, report in real.items()},
        "pairs_unreached": unreached,
        "real_faults": sum(faults.values()),
        "planted": len(MUTANTS),
        "planted_found": len(planted),
        "violations": len(simulated.found)
        + len(shared.found)
        + sum(len(report.violations) for report in real.values())
        + broken
        + broken_scopes,
        **{name.replace(" ", "_"): count for name, count in sorted(faults.items())},
        "redelivered": redelivered,
        "broken_rounds": broken,
        "states_explored": states,
        "broken_scopes": broken_scopes,
        "never_happened": len(missing),
    }
    print(json.dumps(result), flush=True)
    leave("simulation", {**result, "planted_names": planted})
    lacking = missing or len(planted) < len(MUTANTS) or (unreached and options.seconds >= ALL_PAIRS)
    return 1 if result["violations"] or lacking else 0


if __name__ == "__main__":
    sys.exit(main())
