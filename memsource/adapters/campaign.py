"""A campaign: many seeds of one adapter, the coverage of pairs, and the smallest decisions of a failing seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from memsource.adapters.choices import Kind, Phase
from memsource.adapters.pairs import Impossible, Pair, pairs_of, unreached
from memsource.adapters.runs import Adapter, AdapterRun, AdapterSchedule, run_schedule
from memsource.sim.plans.shrink import ddmin

ATTEMPTS: Final = 200
"""The most runs that reduce one failing schedule."""

_LIMITS: Final = (1, 2, 4, 8, 16)


@dataclass
class AdapterReport:
    """The figures of a campaign.

    Attributes:
        schedules: Number of runs.
        faults: Number of faults, by kind.
        pairs: Number of runs that reached each pair.
        violations: One line for each run with a finding, including the token of the run.
        phases: Phases of the adapter.
        kinds: Kinds of faults that the broker can have.
        seconds: Virtual seconds.
        impossible: Faults that cannot happen in some phase, with the reason.
    """

    schedules: int = 0
    faults: Counter[Kind] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    phases: tuple[Phase, ...] = ()
    kinds: frozenset[Kind] = frozenset()
    seconds: float = 0.0
    impossible: Impossible = field(default_factory=dict)

    def add(self, made: AdapterRun) -> None:
        """Count a run."""
        self.schedules += 1
        self.seconds += made.run.seconds
        self.phases, self.impossible = made.phases, made.impossible
        self.kinds |= made.kinds
        self.faults.update(choice.kind for _, choice in made.schedule.decisions or ())
        self.pairs.update(made.pairs.counts.keys())
        if made.run.findings:
            self.violations.append(f"{made.run.findings}: {made.schedule.token()}")

    def __iadd__(self, other: AdapterReport) -> AdapterReport:
        self.schedules += other.schedules
        self.seconds += other.seconds
        self.phases = self.phases or other.phases
        self.impossible = self.impossible or other.impossible
        self.kinds |= other.kinds
        self.faults += other.faults
        self.pairs += other.pairs
        self.violations += other.violations
        return self

    @property
    def unreached(self) -> list[Pair]:
        """The pairs that no run has reached."""
        return unreached(self.pairs, self.kinds, self.phases, self.impossible)

    @property
    def possible(self) -> int:
        """The number of pairs of this adapter."""
        return len(pairs_of(self.kinds, self.phases, self.impossible))

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "schedules": self.schedules,
            "faults": dict(sorted(self.faults.items())),
            "pairs": len(self.pairs),
            "pairs_unreached": len(self.unreached),
            "violations": len(self.violations),
        }


def campaign(adapter: Adapter, seeds: Iterable[int], *, first_finding: bool = False) -> AdapterReport:
    """Make one run for each seed. Blocks.

    Args:
        adapter: The simulated broker and client of the adapter.
        seeds: The seeds.
        first_finding: Whether the first finding ends the campaign.

    Returns:
        The figures.
    """
    report = AdapterReport()
    for seed in seeds:
        report.add(run_schedule(AdapterSchedule(adapter.name, seed), adapter))
        if first_finding and report.violations:
            break
    return report


def seek(adapter: Adapter, pair: Pair, seeds: Iterable[int]) -> AdapterReport:
    """Make runs that seek a pair of faults, until a run reaches the pair. Blocks.

    Args:
        adapter: The simulated broker and client of the adapter.
        pair: The pair.
        seeds: The seeds, one for each run.

    Returns:
        The figures.
    """
    report = AdapterReport()
    for seed in seeds:
        report.add(run_schedule(AdapterSchedule(adapter.name, seed, seeks=pair), adapter))
        if pair in report.pairs:
            break
    return report


def reduced(made: AdapterRun, adapter: Adapter, *, attempts: int = ATTEMPTS) -> AdapterRun:
    """Search for fewer faults, a calm order of steps and fewer messages with the same first finding. Blocks.

    Args:
        made: A run with a finding.
        adapter: The simulated broker and client of the adapter.
        attempts: Maximum number of runs in the search.

    Returns:
        The smallest run of the search.
    """
    name = next(iter(made.run.findings))
    best, left = made, attempts

    def fails(schedule: AdapterSchedule) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        tried = run_schedule(schedule, adapter)
        if name not in tried.run.findings:
            return False
        best = tried
        return True

    def without(kept: Sequence[Any]) -> bool:
        return fails(replace(best.schedule, decisions=tuple(kept)))

    fails(replace(best.schedule, calm=True))
    ddmin(best.schedule.decisions or (), without)
    next((limit for limit in _LIMITS if fails(replace(best.schedule, limit=limit))), None)
    ddmin(best.schedule.decisions or (), without)
    return best
