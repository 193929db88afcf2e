"""The number of faults of each kind in a run, and the draw of their boundaries, targets and amounts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from lanes.arguments import but_not, names_unknown_options
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.plan import FAULT_KINDS, IMPOSSIBLE_FAULTS, Fault, FaultKind

FAULTS_MAX: Final = 1_000
"""The most faults of one kind in a run. A run with more faults would not end in its time."""

AMOUNTS: Final[Mapping[FaultKind, tuple[float, ...]]] = {
    "crash": (0.0, 0.1, 1.0, 5.0, 30.0, 60.0),
    "freeze": (0.1, 1.0, 5.0, 20.0, 60.0, 400.0),
    "rebalance": (0.0,),
    "lost": (0.0,),
    "redeliver": (0.0,),
    "slow": (0.05, 0.5, 2.0, 10.0, 40.0),
    "commit_fails": (0.0, 1.0),
    "letter_fails": (0.0,),
    "io_fails": (0.0,),
    "publish_fails": (0.0, 1.0),
    "clock_jump": (1.0, -1.0, 60.0, -60.0, 86_400.0, -86_400.0),
    "restart": (0.0,),
}
"""The amounts to draw from: values below and above the usual deadlines of a drain, a session and a lease."""

_NEAR: Final = 0.25
"""Share of faults that happen soon after another fault, during the effects of that fault."""

_NEAR_BOUNDARIES: Final = 3
_TARGETS: Final = 8


@names_unknown_options("memsource.faults", ImpossiblePlan)
@dataclass(frozen=True, kw_only=True, slots=True)
class FaultBudget:
    """Maximum number of faults of each kind in a run, each 0 … 1,000.

    Attributes:
        crash: A worker dies as under ``kill -9``, and a new worker starts later.
        freeze: A worker does not run for some time.
        rebalance: The coordinator makes a new plan.
        lost: The broker takes a partition from its owner without a revocation.
        redeliver: The broker delivers a message again. Happens only on JetStream.
        slow: The broker's answers take longer for some time.
        commit_fails: A settlement raises an error, before or after the broker has stored it.
        letter_fails: The broker does not confirm a dead letter.
        io_fails: A call of ``World.io`` raises an error.
        publish_fails: The broker does not confirm outputs, before or after it has stored them.
        clock_jump: The wall clock jumps forward or back.
        restart: The server dies and restarts at once, without its last acknowledgements. Happens only on JetStream.

    Raises:
        ImpossiblePlan: A number is out of its range, or no kind of fault has the name of an argument.
    """

    crash: int = 0
    freeze: int = 0
    rebalance: int = 0
    lost: int = 0
    redeliver: int = 0
    slow: int = 0
    commit_fails: int = 0
    letter_fails: int = 0
    io_fails: int = 0
    publish_fails: int = 0
    clock_jump: int = 0
    restart: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            count = getattr(self, each.name)
            if type(count) is not int or not 0 <= count <= FAULTS_MAX:
                raise ImpossiblePlan(
                    f"{each.name}={count!r}: must be a whole number of faults in 0 … {FAULTS_MAX}{but_not(count)}"
                )

    def __len__(self) -> int:
        return sum(self.of(kind) for kind in FAULT_KINDS)

    def of(self, kind: FaultKind) -> int:
        """Return the number of faults of one kind.

        Args:
            kind: Kind of fault.

        Returns:
            Maximum number of faults of that kind in a run, 0 … 1,000.
        """
        count: int = getattr(self, kind)
        return count

    def kinds(self, personality: PersonalityName) -> tuple[FaultKind, ...]:
        """Return the kinds of fault that the budget allows and that can happen on a broker.

        Args:
            personality: The broker.

        Returns:
            The kinds in the order of ``FAULT_KINDS``.
        """
        return tuple(kind for kind in FAULT_KINDS if self.of(kind) and kind not in IMPOSSIBLE_FAULTS[personality])

    def check(self, personalities: Sequence[PersonalityName]) -> None:
        """Check that each kind of fault in the budget can happen on one of these brokers.

        Args:
            personalities: One or more brokers.

        Raises:
            ImpossiblePlan: The budget allows a kind that never happens on these brokers, or ``personalities`` is
                invalid.
        """
        if isinstance(personalities, str) or not isinstance(personalities, Sequence):
            raise ImpossiblePlan(
                f"personalities={personalities!r}: must be a sequence; write ({personalities!r},) for one broker"
            )
        for name in personalities:
            if name not in PERSONALITIES:
                raise ImpossiblePlan(f"personality {name!r} is unknown: use one of {', '.join(PERSONALITIES)}")
        if not personalities:
            raise ImpossiblePlan(f"personalities=(): name one or more of {', '.join(PERSONALITIES)}")
        for kind in FAULT_KINDS:
            if self.of(kind) and all(kind in IMPOSSIBLE_FAULTS[name] for name in personalities):
                able = " or ".join(repr(name) for name in PERSONALITIES if kind not in IMPOSSIBLE_FAULTS[name])
                raise ImpossiblePlan(
                    f"{kind}={self.of(kind)}: never happens on {', '.join(personalities)}; leave out {kind}, or add "
                    f"{able}"
                )


faults = FaultBudget
"""The function that users call to make a budget."""


def draw(budget: FaultBudget, personality: PersonalityName, boundaries: int, rng: random.Random) -> tuple[Fault, ...]:
    """Draw the faults of a run.

    A kind has its full number of faults in half of the runs, and a random smaller or equal number in the other half. A
    quarter of the faults happen at the boundary of an earlier drawn fault, or up to three boundaries later.

    Args:
        budget: Maximum number of faults of each kind.
        personality: The broker, which determines the kinds that can happen.
        boundaries: Number of boundaries of the run, 0 or more; 0 = no fault.
        rng: Source of the draws.

    Returns:
        The faults, sorted for ``Plan.faults``.

    Raises:
        ImpossiblePlan: ``boundaries`` is below 0.
    """
    _check_boundaries(boundaries)
    found: list[Fault] = []
    for kind in budget.kinds(personality) if boundaries else ():
        most = budget.of(kind)
        for _ in range(most if rng.random() < 0.5 else rng.randint(0, most)):
            at = rng.randrange(boundaries)
            if found and rng.random() < _NEAR:
                at = min(rng.choice(found).at + rng.randint(0, _NEAR_BOUNDARIES), boundaries - 1)
            found.append(Fault(at, kind, rng.randrange(_TARGETS), rng.choice(AMOUNTS[kind])))
    return tuple(sorted(found))


def crash_sweep(boundaries: int, target: int = 0, amount: float = 1.0) -> Iterator[tuple[Fault, ...]]:
    """Yield the faults of one run for each boundary: a crash at this boundary.

    Args:
        boundaries: Number of boundaries, 0 or more.
        target: The worker that crashes; 0 = the worker at the boundary.
        amount: Seconds until a new worker starts.

    Returns:
        An iterator over the runs, each as its tuple of faults.

    Raises:
        ImpossiblePlan: ``boundaries`` is below 0.
    """
    _check_boundaries(boundaries)
    return ((Fault(at, "crash", target, amount),) for at in range(boundaries))


def _check_boundaries(boundaries: int) -> None:
    if boundaries < 0:
        raise ImpossiblePlan(f"boundaries={boundaries}: must be 0 or more")
