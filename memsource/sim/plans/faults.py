"""The number of faults of each kind in a run, and the draw of their places, targets and amounts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.plan import FAULT_KINDS, IMPOSSIBLE_FAULTS, Fault, FaultKind

FAULTS_MAX: Final = 1_000
"""Faults of a kind in a run. One with more of them never gets to its end."""

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
    "clock_jump": (1.0, -1.0, 60.0, -60.0, 86_400.0, -86_400.0),
    "restart": (0.0,),
}
"""The drawn amounts, below and above the usual deadlines of a drain, a session and a lease."""

_NEAR: Final = 0.25
"""Share of faults that come soon after another one, while its effects go on."""

_NEAR_BOUNDARIES: Final = 3
_TARGETS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultBudget:
    """The most faults of each kind in a run, each 0 … 1,000.

    Attributes:
        crash: A worker dies without a word, and a new one starts later.
        freeze: A worker does not run for some time.
        rebalance: The coordinator makes a new plan.
        lost: A partition is taken away without asking.
        redeliver: A message is delivered again; only on JetStream.
        slow: The broker's answers take longer for a while.
        commit_fails: A settlement raises, made or not.
        letter_fails: A dead letter is not confirmed.
        io_fails: A call of ``World.io`` raises.
        clock_jump: The wall clock jumps forward or back.
        restart: The server is killed and back at once, without its last acknowledgements; only on JetStream.

    Raises:
        ImpossiblePlan: A number is out of its range.
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
    clock_jump: int = 0
    restart: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            count = getattr(self, each.name)
            if type(count) is not int or not 0 <= count <= FAULTS_MAX:
                raise ImpossiblePlan(f"{each.name}={count!r}: must be a whole number of faults in 0 … {FAULTS_MAX}")

    def __len__(self) -> int:
        return sum(self.of(kind) for kind in FAULT_KINDS)

    def of(self, kind: FaultKind) -> int:
        """The number of faults of one kind.

        Args:
            kind: Kind of fault.

        Returns:
            The most faults of that kind in a run, 0 … 1,000.
        """
        count: int = getattr(self, kind)
        return count

    def kinds(self, personality: PersonalityName) -> tuple[FaultKind, ...]:
        """The kinds that the budget has and that can happen on a broker.

        Args:
            personality: The broker.

        Returns:
            The kinds in the order of ``FAULT_KINDS``.
        """
        return tuple(kind for kind in FAULT_KINDS if self.of(kind) and kind not in IMPOSSIBLE_FAULTS[personality])

    def check(self, personalities: Sequence[PersonalityName]) -> None:
        """Refuse a kind of fault that none of these brokers ever has.

        Args:
            personalities: One or more brokers.

        Raises:
            ImpossiblePlan: There is such a kind, or a personality is unknown.
        """
        if isinstance(personalities, str):
            raise ImpossiblePlan(
                f"personalities={personalities!r}: must be several, ({personalities!r},) for one alone"
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
                    f"{kind}={self.of(kind)}: never happens on {', '.join(personalities)}; leave it out, or add {able}"
                )


faults = FaultBudget
"""The function that users call to make a budget."""


def draw(budget: FaultBudget, personality: PersonalityName, boundaries: int, rng: random.Random) -> tuple[Fault, ...]:
    """Draw faults for a run of so many boundaries, as ``Plan.faults`` wants them.

    Half of the runs have all faults of a kind that can happen there, the others any number. One fault of four is at the
    boundary of another fault or soon after it. Without boundaries there is no fault. Raises ``ImpossiblePlan`` for
    ``boundaries`` below 0.
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
    """The faults of one run for each boundary of a run: a crash there.

    ``target``: the worker that crashes, 0 = the one at the boundary. ``amount``: seconds until a new one starts. Raises
    ``ImpossiblePlan`` for ``boundaries`` below 0 when it is called.
    """
    _check_boundaries(boundaries)
    return ((Fault(at, "crash", target, amount),) for at in range(boundaries))


def _check_boundaries(boundaries: int) -> None:
    if boundaries < 0:
        raise ImpossiblePlan(f"boundaries={boundaries}: a run has 0 or more")
