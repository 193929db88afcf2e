"""A plan: the traffic of a run, its faults, and the order in which its tasks take their steps.

A plan determines its run completely. The simulator can shrink each part of a plan: fewer faults, fewer deviations,
fewer messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, get_args

from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan

FaultKind = Literal[
    "crash",  # a worker dies as under `kill -9`, and a new worker starts `amount` seconds later
    "freeze",  # a worker does not run for `amount` seconds, as under SIGSTOP
    "rebalance",  # the coordinator makes a new plan, and revokes the partitions that move
    "lost",  # the broker takes a partition from its owner without a revocation
    "redeliver",  # the broker delivers a message of partition `target` again
    "slow",  # for a while, each answer of the broker to a worker takes `amount` seconds
    "commit_fails",  # the next settlement of a worker raises an error; `amount` >= 1: after its write
    "letter_fails",  # the broker does not confirm the next dead letter
    "io_fails",  # the next call of ``World.io`` in a fake of the user raises an error
    "clock_jump",  # the wall clock jumps by `amount` seconds, forward or back
    "publish_fails",  # the next call of the publisher fails; `amount` >= 1: after its writes
    "restart",  # the broker's only server dies and restarts at once, and forgets unwritten acknowledgements
]

FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)

IMPOSSIBLE_FAULTS: Final[Mapping[PersonalityName, tuple[FaultKind, ...]]] = {
    "kafka": ("redeliver", "restart"),
    "jetstream": (),
}
"""Faults that a broker cannot have. A Kafka broker redelivers only to a new owner, and forgets nothing."""

AMOUNT_MAX: Final = 1e9
"""Largest amount of a fault, in seconds: some 30 years."""

NUMBERS_END: Final = 1 << 64
"""Exclusive upper bound of seeds, boundaries, targets, turns, indexes and limits."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One fault, at one boundary.

    The numbers of the boundaries count over all workers, in order of time. Each call of the broker has two boundaries:
    one before the call, and one between the broker's action and its answer. Each call of ``World.io`` by a worker also
    has two boundaries.

    Attributes:
        at: Number of the boundary, 0 or more.
        kind: Kind of fault; see ``FaultBudget``.
        target: Number of the worker or partition, modulo their count. Workers count from the worker at the boundary,
            number 0.
        amount: Seconds. For ``commit_fails``, the settlement fails after its write if the amount is 1 or more,
            otherwise before. The same holds for ``publish_fails``.

    Raises:
        ImpossiblePlan: A field is out of its range.
    """

    at: int
    kind: FaultKind
    target: int = 0
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ImpossiblePlan(f"fault kind {self.kind!r} is unknown: use one of {', '.join(FAULT_KINDS)}")
        if not _whole(self.at, 0) or not _whole(self.target, 0):
            raise ImpossiblePlan(f"{self}: at and target must be whole numbers, 0 or more")
        least = -AMOUNT_MAX if self.kind == "clock_jump" else 0
        # The comparison also refuses NaN, which is in no range.
        if (
            isinstance(self.amount, bool)
            or not isinstance(self.amount, int | float)
            or not (least <= self.amount <= AMOUNT_MAX)
        ):
            raise ImpossiblePlan(f"{self}: amount must be a number of seconds in {least:g} … {AMOUNT_MAX:g}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of steps: first in, first out, except at the listed turns.

    Attributes:
        deviations: Pairs (turn, index), by rising turns. The ready task at ``index`` takes the step of the turn. The
            pair has no effect if ``index`` or fewer tasks are ready.
        jumps: Rising turns in which time jumps to the next timer although tasks are ready.

    Raises:
        ImpossiblePlan: A turn or index is out of its range, or the turns do not rise.
    """

    deviations: tuple[tuple[int, int], ...] = ()
    jumps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.deviations, Sequence) or not isinstance(self.jumps, Sequence):
            raise ImpossiblePlan(
                f"deviations={self.deviations!r}, jumps={self.jumps!r}: must be tuples, such as deviations=((3, 1),)"
            )
        for deviation in self.deviations:
            if not isinstance(deviation, Sequence) or len(deviation) != 2:
                raise ImpossiblePlan(f"deviation {deviation!r}: must be a pair (turn, index)")
            turn, index = deviation
            if not _whole(turn, 0) or not _whole(index, 1):
                raise ImpossiblePlan(
                    f"deviation ({turn}, {index}): the turn must be 0 or more, and the index 1 or more"
                )
        for turn in self.jumps:
            if not _whole(turn, 0):
                raise ImpossiblePlan(f"jump at turn {turn}: the turn must be a whole number, 0 or more")
        for turns in ([turn for turn, _ in self.deviations], self.jumps):
            for before, turn in pairwise(turns):
                if turn <= before:
                    raise ImpossiblePlan(f"turn {turn} follows turn {before}: sort the turns, and name each turn once")

    def __len__(self) -> int:
        return len(self.deviations) + len(self.jumps)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one run.

    Attributes:
        personality: The broker.
        seed: Source of the traffic and of all other draws, 0 … 2⁶⁴−1.
        faults: Faults, in order of their boundaries.
        schedule: Order of steps.
        limit: Maximum number of messages that each call of ``produce`` publishes; None = no limit.

    Raises:
        ImpossiblePlan: A field is out of its range, or the broker never has one of the faults.
    """

    personality: PersonalityName = "kafka"
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.personality not in PERSONALITIES:
            raise ImpossiblePlan(f"personality {self.personality!r} is unknown: use one of {', '.join(PERSONALITIES)}")
        if not _whole(self.seed, 0):
            raise ImpossiblePlan(f"seed={self.seed}: must be a whole number in 0 … 2**64-1")
        if self.limit is not None and not _whole(self.limit, 1):
            raise ImpossiblePlan(f"limit={self.limit}: must be a number of messages, 1 or more; None = all messages")
        if not isinstance(self.schedule, Schedule):
            raise ImpossiblePlan(f"schedule={self.schedule!r}: must be a memsource.Schedule(…)")
        if not isinstance(self.faults, Sequence) or not all(isinstance(fault, Fault) for fault in self.faults):
            raise ImpossiblePlan(f"faults={self.faults!r}: must be a tuple of memsource.Fault(…)")
        for fault in self.faults:
            if fault.kind in IMPOSSIBLE_FAULTS[self.personality]:
                raise ImpossiblePlan(
                    f"fault {fault.kind!r} never happens on {self.personality!r}: leave out this fault, or use another "
                    "personality"
                )
        if list(self.faults) != sorted(self.faults):
            raise ImpossiblePlan("faults= are not in the order of their boundaries: sort the faults")


def _whole(value: object, least: int) -> bool:
    """Return whether a value is an ``int``, but no bool, in ``least`` … 2⁶⁴−1."""
    return type(value) is int and least <= value < NUMBERS_END
