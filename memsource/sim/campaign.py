"""A campaign: one test under many plans, and the smallest of those that fail."""

from __future__ import annotations

import random
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from memsource.sim.choosers import Chooser, Fifo, Sparse, mixed
from memsource.sim.errors import ImpossiblePlan, Nondeterministic
from memsource.sim.faults import FaultBudget, draw
from memsource.sim.plan import PERSONALITIES, PersonalityName, Plan, Schedule
from memsource.sim.run import Conditions, Run, collect_garbage, run_plan
from memsource.sim.shrink import ATTEMPTS, shrink
from memsource.sim.token import encode

__all__ = ["Campaign", "Failure", "Report"]

RUNS_A_SEED: Final = 20
"""Runs that share their traffic, and with it the run without faults that they are compared with."""

RECHECKED: Final = 50
"""One run in so many is made twice."""

DEVIATIONS: Final = 4
GARBAGE: Final = 50


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``first`` is the run that failed; ``run`` the smallest one found, in ``attempts`` more; ``token`` repeats it."""

    first: Run
    run: Run
    attempts: int
    token: str


@dataclass(kw_only=True)
class Report:
    """What a campaign was. ``happened``: event or fault → how often. ``seconds``: of virtual time, of all runs."""

    runs: int = 0
    rechecked: int = 0
    crashes: int = 0
    turns: int = 0
    seconds: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def add(self, run: Run) -> None:
        """Count a run."""
        self.runs += 1
        self.crashes += run.crashes
        self.turns += run.turns
        self.seconds += run.seconds
        self.happened += run.happened


class Campaign:
    """``runs`` runs of a test, 1 or more: of each personality in turn, with faults drawn from ``budget`` and schedules
    of every kind, all from ``seed``. ``sometimes``: what has to have happened in one run at least (see ``Report``).

    Raises ``ImpossiblePlan`` for what no run can be.
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
        if type(runs) is not int or runs < 1:
            raise ImpossiblePlan(f"runs={runs!r}: must be 1 or more")
        self._conditions = conditions
        self._runs = runs
        self._budget = budget or FaultBudget()
        self._budget.check(personalities)
        self._personalities = tuple(personalities)
        self._seed = seed
        self._sometimes = tuple(sometimes)
        self._attempts = attempts
        self._clean: dict[tuple[PersonalityName, int, int | None], Run] = {}
        self.report = Report()

    def go(self) -> Report:
        """Run it, until a run fails or all were made; returns ``report``. Blocks.

        Raises ``Nondeterministic`` when a plan gave two different runs, ``Refused`` for what has no virtual time.
        """
        for number in range(self._runs):
            if number % GARBAGE == 0:
                collect_garbage()
            run = self._run(number)
            self.report.add(run)
            if run.findings:
                self.report.failure = self._failure(run)
                return self.report
            # Of every kind in turn: never the same place among so many.
            if number % RECHECKED == number // RECHECKED * 7 % RECHECKED:
                self.report.rechecked += 1
                self.recheck(run)
        missing = [name for name in self._sometimes if not self.report.happened[name]]
        if missing:
            raise ImpossiblePlan(
                f"{', '.join(missing)}: never happened in {self._runs} runs, and had to; make more runs, or let more "
                "of it happen"
            )
        return self.report

    def each(self) -> Iterator[Run]:
        """All runs, one after the other, whatever they find; nothing is made small."""
        return map(self._run, range(self._runs))

    def judged(self, plan: Plan, chooser: Chooser | None = None) -> Run:
        """One run, compared with the run of the same traffic without any fault."""
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
        # Few deviations first: what they find is small already.
        kind = number // len(self._personalities) % 4
        if kind == 0:
            return Fifo()
        if kind < 3:
            return Sparse(_drawn(rng, turns))
        return mixed(rng.getrandbits(32))

    def _clean_run(self, personality: PersonalityName, seed: int, limit: int | None) -> Run:
        where = personality, seed, limit
        run = self._clean.get(where)
        if run is None:
            if len(self._clean) > 4 * len(self._personalities):
                self._clean.clear()
            run = self._clean[where] = run_plan(Plan(personality, seed, limit=limit), self._conditions)
        return run

    def _compare(self, run: Run) -> None:
        plan = run.plan
        clean = self._clean_run(plan.personality, plan.seed, plan.limit)
        for number, (found, expected) in enumerate(zip(run.states, clean.states, strict=False)):
            if found != expected:
                which = f" of check {number + 1}" if len(clean.states) > 1 else ""
                run.findings.setdefault(
                    "FaultDifferential",
                    f"the final state{which} differs from that without faults: {_apart(found, expected)}",
                )

    def recheck(self, run: Run) -> None:
        """Make a run once more. Raises ``Nondeterministic`` when it is another one."""
        second = run_plan(run.plan, self._conditions)
        if second.digest == run.digest:
            return
        rows = zip(run.history.splitlines(), second.history.splitlines(), strict=False)
        first = next(
            (f"\n  {one.decode()}\n  {other.decode()}" for one, other in rows if one != other), " in their length"
        )
        raise Nondeterministic(
            f"the same plan gave two different runs ({encode(run.plan)}); they differ{first}\nLook for a clock, a "
            "random number or the order of a set in the handler, or state that outlives a run: setup= is called "
            "before each"
        )

    def _is_innate(self, plan: Plan, name: str) -> bool:
        """Whether the run of the same traffic without any fault has the finding, too."""
        return name in self._clean_run(plan.personality, plan.seed, plan.limit).findings

    def _failure(self, run: Run) -> Failure:
        # Else there is nothing to make small.
        self.recheck(run)
        name = next(iter(run.findings))
        smallest = run
        # What is wrong with fewer messages alone, such as a count that a test expects, is another failure.
        innate = self._is_innate(run.plan, name)

        def fails(plan: Plan) -> bool:
            nonlocal smallest
            tried = self.judged(plan)
            if name not in tried.findings or (not innate and self._is_innate(plan, name)):
                return False
            smallest = tried
            return True

        shrunk = shrink(run.plan, fails, attempts=self._attempts)
        if smallest.plan != shrunk.plan:
            smallest = self.judged(shrunk.plan)
        return Failure(first=run, run=smallest, attempts=shrunk.attempts, token=encode(shrunk.plan))


def _drawn(rng: random.Random, turns: int) -> Schedule:
    """A few deviations, anywhere in a run of so many turns; now and then time jumps."""
    at = sorted({rng.randrange(max(1, turns)) for _ in range(rng.randint(1, DEVIATIONS))})
    jumps = tuple(turn for turn in at if rng.random() < 0.2)
    return Schedule(tuple((turn, rng.randint(1, 6)) for turn in at if turn not in jumps), jumps)


def _apart(found: object, expected: object) -> str:
    """The first difference of two states, in a line."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found:
                return f"{reprlib.repr(key)} is missing, expected {reprlib.repr(expected[key])}"
            if key not in expected:
                return f"{reprlib.repr(key)} is {reprlib.repr(found[key])}, not expected at all"
            if found[key] != expected[key]:
                return f"{reprlib.repr(key)} is {reprlib.repr(found[key])}, expected {reprlib.repr(expected[key])}"
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        for number in count():
            if number >= len(found) or number >= len(expected):
                break
            if found[number] != expected[number]:
                return f"item {number} is {reprlib.repr(found[number])}, expected {reprlib.repr(expected[number])}"
        return f"{len(found)} items, expected {len(expected)}"
    return f"{reprlib.repr(found)}, expected {reprlib.repr(expected)}"
