"""What may happen in a run, as values: its traffic, its faults, and the order in which its tasks take their steps.

A run is a function of its plan. Everything in a plan can be made smaller: fewer faults, fewer deviations, fewer
messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from memsource.sim.errors import ImpossiblePlan

__all__ = ["FAULT_KINDS", "PERSONALITIES", "Fault", "FaultKind", "PersonalityName", "Plan", "Schedule"]

PersonalityName = Literal["kafka", "jetstream"]
FaultKind = Literal[
    "crash",  # a worker is gone without a word, and a new one comes `amount` seconds later
    "freeze",  # a worker does not run for `amount` seconds, as under SIGSTOP
    "rebalance",  # the coordinator plans anew, and what moves is asked back
    "lost",  # a partition is taken away without asking
    "redeliver",  # the broker delivers again what it has delivered before; of partition `target`
    "slow",  # the broker's answers to a worker take `amount` seconds, for a while
    "commit_fails",  # the next settlement of a worker raises; with `amount` >= 1 after it was made
    "letter_fails",  # the next dead letter is not confirmed
    "clock_jump",  # the wall clock jumps by `amount` seconds, to either side
]

PERSONALITIES: Final[tuple[PersonalityName, ...]] = get_args(PersonalityName)
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One fault, in front of the broker call with the number ``at`` (0 … of all workers together, in their order).

    ``target``: which worker or partition, modulo how many there are. ``amount``: seconds, or what ``FaultKind`` says.
    """

    at: int
    kind: FaultKind
    target: int = 0
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ImpossiblePlan(f"fault kind {self.kind!r} is unknown: use one of {', '.join(FAULT_KINDS)}")
        if self.at < 0 or self.target < 0:
            raise ImpossiblePlan(f"{self}: at and target must be 0 or more")


@dataclass(frozen=True, slots=True)
class Schedule:
    """First in, first out, except at these points.

    ``deviations``: (turn, index): in this turn of the loop not the first of the ready tasks takes a step but the one at
    ``index``; ignored where there are not so many. ``jumps``: turns in which time jumps to the next timer although
    tasks are ready. Both rise by turn.
    """

    deviations: tuple[tuple[int, int], ...] = ()
    jumps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        turns = [turn for turn, _ in self.deviations]
        if turns != sorted(set(turns)) or list(self.jumps) != sorted(set(self.jumps)):
            raise ImpossiblePlan("a schedule names each turn once, rising")
        if any(turn < 0 or index < 1 for turn, index in self.deviations) or any(turn < 0 for turn in self.jumps):
            raise ImpossiblePlan("a schedule deviates at turns of 0 or more, to an index of 1 or more")

    def __len__(self) -> int:
        return len(self.deviations) + len(self.jumps)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. ``seed`` decides the traffic and every other draw. ``limit``: messages that each ``produce`` publishes
    at most; None = all it asks for."""

    personality: PersonalityName = "kafka"
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.personality not in PERSONALITIES:
            raise ImpossiblePlan(f"personality {self.personality!r} is unknown: use one of {', '.join(PERSONALITIES)}")
        if self.limit is not None and self.limit < 1:
            raise ImpossiblePlan(f"limit={self.limit}: must be 1 or more, or None")
        if list(self.faults) != sorted(self.faults):
            raise ImpossiblePlan("the faults of a plan rise by the call they are in front of")
