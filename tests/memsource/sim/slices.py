"""The project's own campaign in slices of seeds, each in a separate process."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final, Literal

from memsource.checkers import CHECKERS, NoDuplicateCleanly
from memsource.personality import PERSONALITIES, Personality, PersonalityName
from memsource.sim.plans.faults import crash_sweep, faults
from memsource.sim.plans.plan import FAULT_KINDS, IMPOSSIBLE_FAULTS, Plan
from memsource.sim.plans.token import encode
from memsource.sim.runs.campaign import RECHECKED, Campaign
from memsource.sim.runs.run import Conditions, Run, Test
from tests.effort import spread
from tests.memsource.sim.app import app, broker, case_of, unfilled
from tests.memsource.sim.watched import Watching

__all__ = ["BUDGET", "CONDITIONS", "Kind", "Tally", "campaign", "slice_of", "tally"]

Kind = Literal["schedules", "sweep"]

RUNS_A_SEED: Final = 20
SEEDS_A_SLICE: Final = 5
PROCESSES: Final = 2

SOMETIMES: Final = (
    "abandoned",
    "ahead_reached",
    "archived",
    "blocked",
    "commit_failed",
    "degraded",
    "dlq_confirmed",
    "drain: cancelled",
    "hastened",
    "lost",
    "paused",
    "redelivered: handed over",
    "redelivered: held",
    "redelivered: late",
    "redelivered: settled",
    "retry",
    "unblocked",
    "zombie",
    # ``test_publishing`` has the faults of a publisher.
    *(f"fault: {kind}" for kind in FAULT_KINDS if kind != "publish_fails"),
)
"""Rare branches; a campaign that misses one of these branches proves little."""

CONDITIONS: Final = Conditions(test=app, broker=broker)

BUDGET: Final = faults(
    crash=1,
    freeze=1,
    rebalance=2,
    lost=1,
    redeliver=2,
    slow=1,
    commit_fails=2,
    letter_fails=1,
    io_fails=1,
    clock_jump=1,
    restart=1,
)


@dataclass
class Tally:
    """The counts of some runs. ``found``: a line for each run with a finding, with the token that repeats the run."""

    runs: int = 0
    sweeps: int = 0
    seconds: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def add(self, run: Run) -> None:
        """Count a run."""
        self.runs += 1
        self.seconds += run.seconds
        self.happened += run.happened
        self.happened.update(_rare(run))
        if run.findings:
            self.found.append(f"{run.plan.personality}, seed {run.plan.seed}: {run.findings}: {encode(run.plan)}")

    def missing(self) -> list[str]:
        """The expected events that never happened."""
        return [name for name in SOMETIMES if not self.happened[name]]

    def __iadd__(self, other: Tally) -> Tally:
        self.runs += other.runs
        self.sweeps += other.sweeps
        self.seconds += other.seconds
        self.happened += other.happened
        self.found += other.found
        return self


def _rare(run: Run) -> Iterator[str]:
    """Rare facts in rows: the cause of a redelivery, and a drain beyond its deadline."""
    for segment in run.segments:
        draining: set[tuple[str, int]] = set()
        for row in segment.rows:
            if row.event == "redelivered":
                handed_over = segment.rules.settles == "cumulative"
                yield f"redelivered: {'handed over' if handed_over else row.text}"
            elif row.event == "revoking":
                draining.add((row.partition, row.assignment))
            elif row.event == "lost":
                draining.discard((row.partition, row.assignment))
            elif row.event == "ended" and row.text == "cancelled" and (row.partition, row.assignment) in draining:
                yield "drain: cancelled"


def campaign(
    personality: PersonalityName,
    seed: int,
    *,
    runs: int = RUNS_A_SEED,
    made: Callable[[Plan], Personality] = broker,
    test: Test = app,
) -> Campaign:
    """Run the campaign of one seed of traffic; ``made`` makes the brokers."""
    conditions = replace(CONDITIONS, test=test, broker=made)
    if personality == "kafka" and case_of(seed).degrades:
        # Messages of a completed set that was not handed over repeat.
        conditions = replace(conditions, checkers=[make for make in CHECKERS if make is not NoDuplicateCleanly])
    # A freeze excuses late work, so every second seed has no freeze.
    left_out = IMPOSSIBLE_FAULTS[personality] if seed % 2 else (*IMPOSSIBLE_FAULTS[personality], "freeze", "slow")
    possible = replace(BUDGET, **dict.fromkeys(left_out, 0))
    return Campaign(conditions, runs=runs, budget=possible, personalities=(personality,), seed=seed)


def slice_of(job: tuple[Kind, PersonalityName, int, int, int, int]) -> Tally:
    """Run the seeds ``begin`` to ``end - 1``: several schedules of each kind for each seed, or every crash point."""
    kind, personality, begin, end, runs, every = job
    result = Tally()
    # Existing objects stay, so later collections need not visit them.
    gc.collect()
    gc.freeze()
    for seed in range(begin, end):
        gc.collect()
        brokers: list[Watching] = []
        test = app if kind == "schedules" else unfilled
        made = campaign(personality, seed, runs=runs, made=partial(_kept, brokers), test=test)
        if kind == "schedules":
            for run in made.each():
                if result.runs % RECHECKED == RECHECKED - 1:
                    made.recheck(run)
                result.add(run)
        else:
            clean = made.judged(Plan(personality, seed))
            result.add(clean)
            result.sweeps += 1
            for crash in islice(crash_sweep(clean.boundaries), 0, None, every):
                result.add(made.judged(Plan(personality, seed, crash)))
        result.happened["degraded"] += sum(each.degraded for each in brokers)
    return result


def _kept(brokers: list[Watching], plan: Plan) -> Personality:
    """The broker of a plan's case, kept for inspection."""
    made = broker(plan)
    assert isinstance(made, Watching)
    brokers.append(made)
    return made


def tally(
    kind: Kind,
    seeds: range,
    personalities: Iterable[PersonalityName] = PERSONALITIES,
    runs: int = RUNS_A_SEED,
    *,
    every: int = 1,
    processes: int = PROCESSES,
) -> Tally:
    """Run the slices. Blocks. A sweep crashes at one in ``every`` boundaries."""
    jobs = [
        (kind, personality, begin, min(begin + SEEDS_A_SLICE, seeds.stop), runs, every)
        for begin in range(seeds.start, seeds.stop, SEEDS_A_SLICE)
        for personality in personalities
    ]
    result = Tally()
    for part in spread(slice_of, jobs, processes):
        result += part
    return result
