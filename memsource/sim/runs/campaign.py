"""A campaign: one test under many plans, and the smallest failing plan."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from lanes.arguments import but_not
from memsource.history.rows import EVENTS
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan, Nondeterministic, Overtime
from memsource.sim.loop.choosers import Chooser, Fifo, Sparse, mixed
from memsource.sim.plans.faults import FaultBudget, draw
from memsource.sim.plans.plan import FAULT_KINDS, NUMBERS_END, Plan, Schedule
from memsource.sim.plans.shrink import ATTEMPTS, shrink
from memsource.sim.plans.token import encode
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.state import apart

RUNS_A_SEED: Final = 20
"""Number of runs that share their traffic, and on each broker one run without faults for the comparison."""

RECHECKED: Final = 50
"""Number of runs in a block. The campaign repeats one run of each block, and compares both runs."""

FEW_ATTEMPTS: Final = 30
"""Maximum number of runs that shrink a plan with the finding ``Overtime``, because each such run takes some seconds."""

ORDERS: Final = 40
"""Number of runs without faults in which the campaign looks for the failure of a run with faults."""

DEVIATIONS: Final = 4

GARBAGE: Final = 50
"""Number of runs between two full collections of garbage. Python collects no garbage during a run."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a campaign.

    Attributes:
        first: The first run that failed.
        run: The smallest failing run that the search found.
        attempts: Number of runs of the search for ``run``.
        token: Token that repeats ``run``.
        orders: Number of runs without faults, in other orders of the steps, that did not fail as ``run`` does. 0 = the
            campaign made no such run.
    """

    first: Run
    run: Run
    attempts: int
    token: str
    orders: int = 0


@dataclass(kw_only=True)
class CampaignReport:
    """The figures of a campaign.

    Attributes:
        runs: Number of planned runs that the campaign made. Repeated and shrinking runs do not count.
        rechecked: Number of runs that the campaign repeated and compared.
        crashes: Number of workers that crashed in these runs.
        turns: Turns of the loops of these runs.
        seconds: Virtual seconds of these runs.
        happened: Number of occurrences, by event of the history and by ``fault: kind``.
        failure: The failure; None = no run has failed.
    """

    runs: int = 0
    rechecked: int = 0
    crashes: int = 0
    turns: int = 0
    seconds: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def add(self, run: Run) -> None:
        """Add the figures of a run.

        Args:
            run: The run.
        """
        self.runs += 1
        self.crashes += run.crashes
        self.turns += run.turns
        self.seconds += run.seconds
        self.happened += run.happened


class Campaign:
    """Runs of one test on each personality in turn, with drawn faults and schedules.

    The first run on each personality has no faults. ``runs`` must be at least the number of personalities. With a
    budget of faults, ``runs`` must be larger by 1.

    Args:
        conditions: Conditions of all runs.
        runs: Number of runs.
        budget: Maximum number of faults of each kind in a run; None = no faults.
        personalities: The brokers.
        seed: Seed of all draws, 0 … 2⁶⁴−1.
        sometimes: Required events and faults, each of which must happen in at least one run; see
            ``CampaignReport.happened``.
        attempts: Maximum number of runs in the search for a smaller failing plan.

    Raises:
        ImpossiblePlan: An argument is out of its range, or one kind of fault can happen in no run.
    """

    def __init__(
        self,
        conditions: Conditions,
        *,
        runs: int,
        budget: FaultBudget | None = None,
        personalities: Sequence[PersonalityName] = PERSONALITIES,
        seed: int = 0,
        sometimes: Sequence[str] = (),
        attempts: int = ATTEMPTS,
    ) -> None:
        if not (budget is None or isinstance(budget, FaultBudget)):
            raise ImpossiblePlan(f"faults={budget!r}: must be made by memsource.faults, as in faults=faults(crash=1)")
        self._conditions = conditions
        self._budget = FaultBudget() if budget is None else budget
        self._budget.check(personalities)
        _check(runs, seed, sometimes)
        named, least = ", ".join(personalities), len(personalities)
        if runs < least:
            raise ImpossiblePlan(f"runs={runs}: fewer than the personalities {named}; set runs to {least} or more")
        if runs == least and len(self._budget):
            raise ImpossiblePlan(
                f"runs={runs}: the first run on each of {named} has no faults, so no run would have faults; set runs "
                f"to {least + 1} or more, or leave out faults"
            )
        self._runs = runs
        self._personalities = tuple(personalities)
        self._seed = seed
        self._sometimes = tuple(sometimes)
        self._attempts = attempts
        self._clean_run = lru_cache(maxsize=4 * len(self._personalities))(self._make_clean_run)
        self.report = CampaignReport()

    def go(self) -> CampaignReport:
        """Perform the runs, at most until the first failure. Blocks.

        Returns:
            ``report``.

        Raises:
            Nondeterministic: Two runs of one plan differed.
            Refused: The test used something without virtual time.
            ImpossiblePlan: An event or fault of ``sometimes`` never happened, or the test passed an impossible
                argument.
            NeverYields: A step does not end.
        """
        for number in range(self._runs):
            if number % GARBAGE == 0:
                gc.collect()
            run = self._run(number)
            self.report.add(run)
            if run.findings:
                self.report.failure = self._failure(run)
                return self.report
            # The index of the rechecked run differs from block to block, so runs of every kind are rechecked.
            if number % RECHECKED == number // RECHECKED * 7 % RECHECKED:
                self.report.rechecked += 1
                self.recheck(run)
        missing = [name for name in self._sometimes if not self.report.happened[name]]
        if missing:
            raise ImpossiblePlan(
                f"{', '.join(missing)}: never happened in {self._runs} runs, although sometimes= requires it; raise "
                "runs=, or raise the numbers in faults="
            )
        return self.report

    def each(self) -> Iterator[Run]:
        """Iterate over all runs. A finding does not end the iteration. The campaign shrinks no failing plan.

        Returns:
            An iterator that makes a run at each step.
        """
        return map(self._run, range(self._runs))

    def judged(self, plan: Plan, chooser: Chooser | None = None) -> Run:
        """Perform one run, and compare its final state with the state after the same traffic without faults.

        Args:
            plan: The plan of the run.
            chooser: Chooser of the steps; None = the plan's schedule chooses.

        Returns:
            The run of ``plan``.
        """
        run = run_plan(plan, self._conditions, chooser)
        if plan.faults or len(run.plan.schedule):
            self._compare(run)
        return run

    # --- inside

    def _run(self, number: int) -> Run:
        personality = self._personalities[number % len(self._personalities)]
        seed = self._seed + number // RUNS_A_SEED
        clean = self._clean_run(personality, seed, None)
        if clean.findings or number < len(self._personalities):
            return clean
        rng = random.Random(f"{self._seed}/{number}")
        plan = Plan(personality, seed, draw(self._budget, personality, clean.boundaries, rng))
        return self.judged(plan, self._chooser(number, rng, clean.turns))

    def _chooser(self, number: int, rng: random.Random, turns: int) -> Chooser:
        # The first runs have few deviations, because a failure with few deviations is already small.
        kind = number // len(self._personalities) % 4
        if kind == 0:
            return Fifo()
        if kind < 3:
            return Sparse(_drawn(rng, turns))
        return mixed(rng.getrandbits(32))

    def _make_clean_run(self, personality: PersonalityName, seed: int, limit: int | None) -> Run:
        return run_plan(Plan(personality, seed, limit=limit), self._conditions)

    def _compare(self, run: Run) -> None:
        plan = run.plan
        clean = self._clean_run(plan.personality, plan.seed, plan.limit)
        for number, (found, expected) in enumerate(zip(run.states, clean.states, strict=False)):
            if found != expected:
                which = f" of check {number + 1}" if len(clean.states) > 1 else ""
                # Without faults only the order of the steps differs, and no order is the right one. The comparison of a
                # run with faults uses one of these orders, so the state of that order may be wrong too.
                told = (
                    "the state without faults: " + apart(found, expected, "the run without faults")
                    if plan.faults
                    else "the state after another order of steps, both without faults, so either state may be wrong: "
                    + apart(found, expected, "the other order")
                )
                run.findings.setdefault("FaultDifferential", f"the final state{which} differs from {told}")
        if len(run.states) != len(clean.states) and not run.findings:
            run.findings["FaultDifferential"] = (
                f"World.check(state=…) was called {len(run.states)} times, and {len(clean.states)} "
                f"{'without faults' if plan.faults else 'after another order of steps'}: "
                "call World.check equally often in every run"
            )

    def recheck(self, run: Run) -> None:
        """Repeat a run, and compare both runs.

        Args:
            run: The run to repeat.

        Raises:
            Nondeterministic: The second run differs.
        """
        second = self.judged(run.plan)
        difference = _difference(run, second)
        if difference:
            raise Nondeterministic(
                f"the same plan gave two different runs ({encode(run.plan)}); {difference}\nLook for a clock, a "
                "random number or the order of a set in the handler, or state that outlives a run. Reset such state in "
                "setup="
            )

    def _is_innate(self, plan: Plan, name: str) -> bool:
        """Return whether a run with the same traffic and no faults has the finding too."""
        return name in self._clean_run(plan.personality, plan.seed, plan.limit).findings

    def _failure(self, run: Run) -> Failure:
        # A failing run that does not repeat cannot be shrunk.
        self.recheck(run)
        name = next(iter(run.findings))
        begun, orders = self._in_other_orders(run.plan, name)
        smallest = begun = begun or run
        # A finding that also occurs without faults, such as a wrong count of fewer messages, is another failure.
        innate = self._is_innate(begun.plan, name)

        def fails(plan: Plan) -> bool:
            nonlocal smallest
            tried = self.judged(plan)
            if name not in tried.findings or (not innate and self._is_innate(plan, name)):
                return False
            smallest = tried
            return True

        attempts = min(self._attempts, FEW_ATTEMPTS) if name == Overtime.__name__ else self._attempts
        shrunk = shrink(begun.plan, fails, attempts=attempts)
        if smallest.plan != shrunk.plan:
            smallest = self.judged(shrunk.plan)
        if not shrunk.plan.faults:
            orders = 0
        return Failure(first=run, run=smallest, attempts=shrunk.attempts, token=encode(shrunk.plan), orders=orders)

    def _in_other_orders(self, plan: Plan, name: str) -> tuple[Run | None, int]:
        """Look for a run with the same traffic and without faults that has a finding too, in other orders of the steps.

        Args:
            plan: A plan that has the finding.
            name: Name of the finding.

        Returns:
            The run, or None; and the number of runs without the finding.
        """
        if not plan.faults or name == Overtime.__name__:
            return None, 0
        bare = Plan(plan.personality, plan.seed, limit=plan.limit)
        turns = self._clean_run(plan.personality, plan.seed, plan.limit).turns
        rng = random.Random(f"{self._seed}/orders")
        for number in range(ORDERS):
            # A failure with few deviations is already small, and other failures need many.
            chooser = mixed(rng.getrandbits(32)) if number % 2 else Sparse(_drawn(rng, turns))
            tried = self.judged(bare, chooser)
            if name in tried.findings:
                return tried, number
        return None, ORDERS


def _drawn(rng: random.Random, turns: int) -> Schedule:
    """Draw a few deviations and jumps of time in a run of ``turns`` turns."""
    at = sorted({rng.randrange(max(1, turns)) for _ in range(rng.randint(1, DEVIATIONS))})
    jumps = tuple(turn for turn in at if rng.random() < 0.2)
    return Schedule(tuple((turn, rng.randint(1, 6)) for turn in at if turn not in jumps), jumps)


def _difference(first: Run, second: Run) -> str:
    """Return a text with the first difference of two runs; "" = no difference."""
    if first.digest != second.digest:
        rows = zip(first.history.splitlines(), second.history.splitlines(), strict=False)
        apart_at = next(
            (f"\n  {one.decode()}\n  {other.decode()}" for one, other in rows if one != other), " in their length"
        )
        return f"they differ{apart_at}"
    for one, other in zip(first.states, second.states, strict=False):
        if one != other:
            return f"their histories are equal, but their final states differ: {apart(other, one)}"
    if first.findings.keys() != second.findings.keys():
        found = " and then ".join(", ".join(run.findings) or "nothing" for run in (first, second))
        return f"their histories are equal, but their findings differ: {found}"
    if len(first.states) != len(second.states):
        counts = f"{len(first.states)} and then {len(second.states)}"
        return f"their histories are equal, but the numbers of their final states are {counts}"
    return ""


def _check(runs: object, seed: object, sometimes: object) -> None:
    """Raise ``ImpossiblePlan`` for a wrong value of ``runs``, ``seed`` or ``sometimes``."""
    if type(runs) is not int or runs < 1:
        raise ImpossiblePlan(f"runs={runs!r}: must be a whole number, 1 or more{but_not(runs)}")
    if type(seed) is not int or not 0 <= seed < NUMBERS_END:
        raise ImpossiblePlan(f"seed={seed!r}: must be a whole number in 0 … 2**64-1{but_not(seed)}")
    if isinstance(sometimes, str) or not isinstance(sometimes, Sequence):
        raise ImpossiblePlan(f"sometimes={sometimes!r}: must be a sequence of names, such as [{sometimes!r}]")
    for name in sometimes:
        kind = name.removeprefix("fault: ") if isinstance(name, str) else ""
        if kind not in (EVENTS if kind == name else FAULT_KINDS):
            raise ImpossiblePlan(
                f"sometimes={sometimes!r}: unknown name {name!r}; use an event of the history "
                f"({', '.join(sorted(EVENTS))}), "
                f"or 'fault: ' followed by one of {', '.join(FAULT_KINDS)}"
            )
