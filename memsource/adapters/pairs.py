"""Coverage of pairs: a fault, the next fault, and the phase of the member at the next fault."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from memsource.adapters.choices import KINDS, Kind, Phase

WITHIN: Final = 60.0
"""Virtual seconds within which a fault counts as a fault after another one."""


Impossible = Mapping[tuple[Kind, Phase], str]
"""Faults that cannot happen in a phase of an adapter's members, with the reason."""

_NONE: Final[Impossible] = {}


class Pair(NamedTuple):
    """Two faults of one run.

    Attributes:
        first: The earlier fault.
        second: The later fault.
        phase: Activity of the member at the later fault.
    """

    first: Kind
    second: Kind
    phase: Phase

    def __str__(self) -> str:
        return f"{self.first}>{self.second}@{self.phase}"


class Pairs:
    """Counts the pairs of a run."""

    def __init__(self) -> None:
        self.counts: Counter[Pair] = Counter()
        self._recent: deque[tuple[float, Kind]] = deque()

    def note(self, now: float, kind: Kind, phase: Phase) -> None:
        """Record a fault that has acted at the time ``now``."""
        while self._recent and now - self._recent[0][0] > WITHIN:
            self._recent.popleft()
        self.counts.update(Pair(first, kind, phase) for first in {before for _, before in self._recent})
        self._recent.append((now, kind))


def pairs_of(kinds: Collection[Kind], phases: Iterable[Phase], impossible: Impossible = _NONE) -> list[Pair]:
    """Return the possible pairs of these faults and phases, in the order of ``KINDS``.

    Args:
        kinds: Faults of the broker.
        phases: Phases of the adapter's members.
        impossible: Faults that cannot happen in some phase, with the reason.

    Returns:
        The pairs, by phase.
    """
    ordered = [kind for kind in KINDS if kind in kinds]
    pairs = [Pair(first, second, phase) for phase in phases for first in ordered for second in ordered]
    return [pair for pair in pairs if (pair.second, pair.phase) not in impossible]


def unreached(
    counts: Collection[Pair], kinds: Collection[Kind], phases: Iterable[Phase], impossible: Impossible = _NONE
) -> list[Pair]:
    """Return the possible pairs that no run has reached.

    Args:
        counts: The reached pairs.
        kinds: Faults of the broker.
        phases: Phases of the adapter's members.
        impossible: Faults that cannot happen in some phase, with the reason.

    Returns:
        The pairs in the order of ``KINDS``.
    """
    return [pair for pair in pairs_of(kinds, phases, impossible) if pair not in counts]
