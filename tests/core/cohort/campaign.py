"""The campaign of random walks of lease machines, and its coverage of pairs of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.core.cohort.pairs import Pair, unreached
from tests.core.cohort.walks import Walk

__all__ = ["RETENTIONS", "Tally", "tally", "walk"]

RETENTIONS: Final = ("limits", "workqueue", "interest")


@dataclass
class Tally:
    """The figures of a campaign: ``pairs`` counts the walks that reached a pair."""

    walks: int = 0
    repeats: int = 0
    pairs: Counter[Pair] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @property
    def unreached(self) -> list[Pair]:
        """The pairs that no walk has reached."""
        return unreached(self.pairs)

    def figures(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "walks": self.walks,
            "pairs": len(self.pairs),
            "pairs_unreached": len(self.unreached),
            "violations": len(self.violations),
        }


def walk(number: int) -> Walk:
    """The walk of a number: its seed, its retention and its number of members."""
    seed, retention = divmod(number, len(RETENTIONS))
    return Walk(seed, RETENTIONS[retention], members=2 + seed % 2)


def tally(numbers: Iterable[int]) -> Tally:
    """Make the walks of these numbers. Blocks."""
    result = Tally()
    for number in numbers:
        made = walk(number)
        try:
            world = made.run()
        except Exception as error:
            # The campaign goes on, because other walks may break other promises.
            result.violations.append(f"walk {number}: {type(error).__name__}: {error}")
        else:
            result.repeats += world.repeats > 0
        result.walks += 1
        result.pairs.update(made.pairs.counts.keys())
    return result
