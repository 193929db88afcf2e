"""The project's own campaign in slices of seeds, each in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Final, Literal

from memsource.sim.campaign import RECHECKED, Campaign
from memsource.sim.faults import crash_sweep, faults
from memsource.sim.plan import NEVER, PERSONALITIES, PersonalityName, Plan
from memsource.sim.run import Conditions, Run, collect_garbage
from memsource.sim.token import encode
from tests.sim.app import app, broker

__all__ = ["BUDGET", "CONDITIONS", "Kind", "Tally", "campaign", "slice_of", "tally"]

Kind = Literal["schedules", "sweep"]

RUNS_A_SEED: Final = 20
SEEDS_A_SLICE: Final = 5
PROCESSES: Final = 2

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
)


@dataclass
class Tally:
    """What was run. ``found``: a line for each run that found something, with the token that repeats it."""

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
        if run.findings:
            self.found.append(f"{run.plan.personality}, seed {run.plan.seed}: {run.findings}: {encode(run.plan)}")

    def __iadd__(self, other: Tally) -> Tally:
        self.runs += other.runs
        self.sweeps += other.sweeps
        self.seconds += other.seconds
        self.happened += other.happened
        self.found += other.found
        return self


def campaign(personality: PersonalityName, seed: int, *, runs: int = RUNS_A_SEED) -> Campaign:
    """The campaign of one seed of traffic."""
    # Where somebody stands still, less can be said about deadlines and owners: not in every other seed.
    left_out = NEVER[personality] if seed % 2 else (*NEVER[personality], "freeze", "slow")
    possible = replace(BUDGET, **dict.fromkeys(left_out, 0))
    return Campaign(CONDITIONS, runs=runs, budget=possible, personalities=(personality,), seed=seed)


def slice_of(job: tuple[Kind, PersonalityName, int, int]) -> Tally:
    """Run the seeds from the one to the other, this one not included: schedules of all kinds, or every crash point."""
    kind, personality, begin, end = job
    result = Tally()
    for seed in range(begin, end):
        collect_garbage()
        made = campaign(personality, seed)
        if kind == "schedules":
            for run in made.each():
                if result.runs % RECHECKED == RECHECKED - 1:
                    made.recheck(run)
                result.add(run)
            continue
        clean = made.judged(Plan(personality, seed))
        result.add(clean)
        result.sweeps += 1
        for crash in crash_sweep(clean.boundaries):
            result.add(made.judged(Plan(personality, seed, crash)))
    return result


def tally(kind: Kind, seeds: range, personalities: Iterable[PersonalityName] = PERSONALITIES) -> Tally:
    """The same by several processes at once. Blocks."""
    jobs = [
        (kind, personality, begin, min(begin + SEEDS_A_SLICE, seeds.stop))
        for begin in range(seeds.start, seeds.stop, SEEDS_A_SLICE)
        for personality in personalities
    ]
    result = Tally()
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for part in pool.map(slice_of, jobs):
            result += part
    return result
