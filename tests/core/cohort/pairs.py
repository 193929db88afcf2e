"""Coverage of pairs in a cohort: which fault followed which other fault at a member, and in which phase of its lease.

Like ``memsource.adapters.pairs``, for the faults and phases of lease machines.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection
from typing import Final, Literal, NamedTuple, get_args

from lanes.core.cohort import phases
from lanes.core.cohort.actions import Read, Write
from lanes.core.cohort.lease_machine import LeaseMachine

__all__ = ["KINDS", "PHASES", "WITHIN", "Kind", "LeasePhase", "Pair", "Pairs", "phase_of", "unreached"]

Kind = Literal["request lost", "reply lost", "cut off", "freeze", "bucket lost"]
"""A fault. ``request lost`` and ``reply lost`` concern one request; ``cut off`` concerns every request for a while."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

LeasePhase = Literal["join", "takeover", "steady", "renewal", "handover", "leave"]
"""The activity of a member, for one partition."""

PHASES: Final[tuple[LeasePhase, ...]] = get_args(LeasePhase)

WITHIN: Final = 60.0
"""Virtual seconds within which a fault counts as a fault after another one."""

_JOIN: Final = phases.SEEKING | {phases.CONFIRMING}
_HANDOVER: Final = frozenset({phases.DRAINING, phases.SAVING, phases.RELEASING})


class Pair(NamedTuple):
    """Two faults of one member; ``phase`` is that of the later fault."""

    first: Kind
    second: Kind
    phase: LeasePhase

    def __str__(self) -> str:
        return f"{self.first} > {self.second} @ {self.phase}"


class Pairs:
    """Counts the pairs of a run."""

    def __init__(self) -> None:
        self.counts: Counter[Pair] = Counter()
        self._recent: defaultdict[str, deque[tuple[float, Kind]]] = defaultdict(deque)

    def note(self, now: float, member: str, kind: Kind, at: Collection[LeasePhase]) -> None:
        """Record a fault of a member, whose partitions are in the phases ``at``."""
        recent = self._recent[member]
        while recent and now - recent[0][0] > WITHIN:
            recent.popleft()
        firsts = {before for _, before in recent}
        self.counts.update(Pair(first, kind, phase) for first in firsts for phase in at)
        recent.append((now, kind))


def unreached(counts: Collection[Pair]) -> list[Pair]:
    """The pairs that no run has reached."""
    pairs = [Pair(first, second, phase) for phase in PHASES for first in KINDS for second in KINDS]
    return [pair for pair in pairs if pair not in counts]


def phase_of(machine: LeaseMachine, now: float) -> LeasePhase | None:
    """The activity of a lease machine; None while the machine has no partition and wants no partition."""
    if machine.phase in (phases.IDLE, phases.FENCED):
        return None
    if machine._stopped:
        return "leave"
    if machine.phase in _JOIN:
        return "join"
    if machine.phase in phases.TAKING:
        return "takeover"
    if machine.phase in _HANDOVER:
        return "handover"
    held, asked = machine._held_lease, machine._asked
    assert held is not None
    renews = isinstance(asked, Read | Write) and asked.key == machine._lease_key
    return "renewal" if renews or held.due(now) else "steady"
