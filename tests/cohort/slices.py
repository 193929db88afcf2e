"""The campaign of the cohort in slices of seeds, each in a separate process."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from memsource import check
from memsource.checkers import BoundedRepeats
from memsource.sim.plans.faults import faults
from memsource.sim.plans.token import encode
from memsource.sim.runs.campaign import Campaign
from memsource.sim.runs.run import Conditions, Run
from tests.cohort.app import app
from tests.cohort.cases import broker, case_of
from tests.effort import spread

__all__ = ["BUDGET", "RUNS_A_SEED", "Tally", "campaign", "repeated_too_often", "slice_of", "tally"]

RUNS_A_SEED: Final = 6
SEEDS_A_SLICE: Final = 20
PROCESSES: Final = 2

BUDGET: Final = faults(
    crash=2,  # a member crashes, and another member starts
    freeze=1,  # a member freezes, often for longer than its lease
    rebalance=1,  # an operator drains a member
    lost=1,  # the bucket is lost
    redeliver=2,  # a delivery or an acknowledgement is lost
    slow=1,  # writes take effect after the client gave up
    commit_fails=2,  # a request or its reply is lost
    io_fails=2,  # a write takes effect late
    clock_jump=1,
    restart=1,
)

CONDITIONS: Final = Conditions(test=app, broker=broker)

SOMETIMES: Final = (
    "abandoned",
    "leased",
    "lost",
    "redelivered",
    "zombie",
    *(f"fault: {kind}" for kind in ("crash", "freeze", "rebalance", "lost", "redeliver", "slow")),
    *(f"fault: {kind}" for kind in ("commit_fails", "io_fails", "clock_jump", "restart")),
)
"""Rare branches: a campaign has to take each of them at least once."""


@dataclass
class Tally:
    """The counts of a campaign; ``found`` has a line for each finding, with the token that repeats its run."""

    runs: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def add(self, run: Run) -> None:
        """Count a run."""
        self.runs += 1
        self.happened += run.happened
        findings = run.findings | repeated_too_often(run)
        if findings:
            self.found.append(f"seed {run.plan.seed}: {findings}: {encode(run.plan)}")

    def missing(self) -> list[str]:
        """The rare branches that no run has taken."""
        return [name for name in SOMETIMES if not self.happened[name]]

    def __iadd__(self, other: Tally) -> Tally:
        self.runs += other.runs
        self.happened += other.happened
        self.found += other.found
        return self


def repeated_too_often(run: Run) -> dict[str, str]:
    """The finding that a next owner repeated written messages, unless the bucket was lost."""
    if run.happened["fault: lost"]:
        return {}
    written_every = case_of(run.plan.seed).in_flight
    (verdict,) = check(run.segments, [partial(BoundedRepeats, written_every=written_every)])
    return {verdict.name: verdict.witnesses[0]} if verdict.status == "violated" else {}


def campaign(seed: int, runs: int = RUNS_A_SEED) -> Campaign:
    """The campaign of one seed: its clean run, and its runs with faults."""
    return Campaign(CONDITIONS, runs=runs, budget=BUDGET, personalities=("jetstream",), seed=seed)


def slice_of(job: tuple[int, int]) -> Tally:
    """Run the seeds from the first to before the last; the last run of each slice twice."""
    result = Tally()
    # Freeze the imported modules, so that a collection does not visit them.
    gc.collect()
    gc.freeze()
    for seed in range(*job):
        gc.collect()
        made = campaign(seed)
        for run in made.each():
            result.add(run)
        if seed == job[1] - 1:
            made.recheck(run)
    return result


def tally(seeds: range) -> Tally:
    """Run the seeds by several processes at once. Blocks."""
    jobs = [(begin, min(begin + SEEDS_A_SLICE, seeds.stop)) for begin in range(seeds.start, seeds.stop, SEEDS_A_SLICE)]
    result = Tally()
    for part in spread(slice_of, jobs, PROCESSES):
        result += part
    return result
