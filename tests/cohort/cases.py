"""The case that the seed of a cohort run selects, and its broker."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lanes import Retry, Settings
from lanes.cohort.membership import CohortSettings
from lanes.cohort.roster import Roster
from memsource.jetstream.cohort_source import CohortPersonality
from memsource.jetstream.epoch_consumers import Retention
from memsource.jetstream.pull_consumer import ConsumerSettings
from memsource.sim.plans.plan import Plan
from tests.cohort.former import former_roster

__all__ = ["AIMED", "DEPENDENT", "FORCED", "Case", "broker", "case_of"]

QUICK, STEPS, BRIEF, SLOW, FAILS_ONCE, VERY_SLOW, LAST = range(7)
"""The faults of a message, which its value names."""

AIMED = 1000
"""The first seed whose members have targets, and may run the former code."""

DEPENDENT = 2000
"""The first seed in whose runs a second fault often follows a lost request or reply."""

FORCED = range(20_000, 21_000)
"""The seeds whose drains end by force while other messages of the partition finish."""

_CALM = (QUICK, STEPS, STEPS, BRIEF, BRIEF, SLOW, SLOW)
_TROUBLE = (*_CALM, FAILS_ONCE, VERY_SLOW)
_FORCED = (BRIEF, SLOW, LAST, VERY_SLOW)
_MOVES = ("join", "leave", "drain")
_ACTIONS = ("stop", "join", "join", "leave", "publish", "drain")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The case of a seed; ``calm``: every handler ends within any drain, and no clock is wrong.

    ``targets`` and ``former`` are of successive members. A former member runs the code without targets.
    """

    calm: bool
    partitions: int
    members: int
    retention: Retention
    cohort: CohortSettings
    drift: tuple[float, ...]
    latency: tuple[float, ...]
    hints: bool
    markers: bool
    in_flight: int
    ack_wait: float
    settings: Settings
    n: int
    keys: int
    kinds: tuple[int, ...]
    actions: tuple[tuple[float, str, int], ...]
    targets: tuple[int | None, ...]
    former: tuple[bool, ...]


def case_of(seed: int) -> Case:
    """The case of a seed."""
    rng, forced = random.Random(f"cohort {seed}"), random.Random(f"forced {seed}")
    ends = seed in FORCED
    force = forced.random() < 0.3 or ends
    calm = rng.random() < 0.4 and not ends
    concurrency = 8 if ends else rng.randint(1, 4)
    bound = concurrency + rng.randint(0, 6)
    n = 40 if ends else rng.randint(6, 30)
    kinds = _FORCED if ends else _CALM if calm else _TROUBLE
    aiming = random.Random(f"targets {seed}")
    aimed, mixed = AIMED <= seed < DEPENDENT, aiming.random() < 0.5 and AIMED <= seed < DEPENDENT
    former = tuple(mixed and aiming.random() < 0.4 for _ in range(4))
    targets = tuple(aiming.choice([None, 1, 1, 2]) if aimed and not old else None for old in former)
    return Case(
        calm=calm,
        # With fewer partitions, targets would seldom change a plan.
        partitions=max(rng.randint(1, 3), 4 * aimed, 2 * ends),
        members=max(rng.randint(1, 3), 2 * ends),
        retention=rng.choice(["limits", "workqueue", "interest"]),
        cohort=CohortSettings(
            lease=rng.choice([3.0, 3.0, 4.0, 10.0]),
            active_members=rng.choice([None, None, None, 1, 2]),
            # A limit below the longest handlers cancels some messages of a partition, and others have just finished.
            drain_within=forced.uniform(0.2, 1.5) if ends else 5.0 if calm else forced.choice([1.0, 5.0]),
            overdue="force" if force else "keep",
        ),
        # With forced drains the clocks are right, so that only cancelled messages may run twice.
        drift=(0.0,) if calm else tuple(rng.choice([0.0, 0.05, -0.05, 0.1, -0.1]) * (not force) for _ in range(4)),
        latency=tuple(rng.choice([0.0, 0.0, 0.002, 0.03, 0.2]) for _ in range(4)),
        hints=rng.random() < 0.7,
        markers=rng.random() < 0.5,
        in_flight=rng.choice([2, 5, 1000]),
        ack_wait=rng.choice([6.0, 30.0]),
        settings=Settings(
            concurrency=concurrency,
            max_in_flight=bound,
            retry=Retry(attempts=3, backoff=rng.choice([0.1, 1.0])),
            poison="block",
            drain_timeout=30.0 if calm else rng.choice([1.0, 5.0]),
            grace=0.5,
        ),
        n=n,
        keys=12 if ends else rng.choice([1, 2, 3, 6]),
        kinds=tuple(rng.choice(kinds) for _ in range(n)),
        actions=tuple(
            (rng.choice([0.05, 0.3, 0.8, 1.5, 4.0]), rng.choice(_MOVES if ends else _ACTIONS), rng.randrange(8))
            for _ in range(rng.randint(3 * ends, 4))
        ),
        targets=targets,
        former=former,
    )


def broker(plan: Plan) -> CohortPersonality:
    """The broker of a plan's case."""
    case = case_of(plan.seed)
    return CohortPersonality(
        case.partitions,
        retention=case.retention,
        settings=ConsumerSettings(ack_wait=case.ack_wait),
        cohort=case.cohort,
        drift=case.drift,
        latency=case.latency,
        targets=case.targets,
        rosters=[former_roster if old else Roster for old in case.former],
        hints=case.hints,
        markers=case.markers,
        in_flight=case.in_flight,
        seed=plan.seed,
    )
