"""The messages of a run, drawn from a seed: their keys and their gaps of positions."""

from __future__ import annotations

import random
import zlib
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from lanes.arguments import but_not
from lanes.core.types import PartitionKey, key_bytes
from memsource.sim.errors import ImpossiblePlan

_GAPS: Final = (1, 1, 1, 2, 2, 3, 10, 1_000)
"""Lengths of gaps, in positions: mostly the 1 of a transaction marker, at times the gap of a compaction."""


@dataclass(frozen=True, slots=True)
class Item:
    """One message to publish.

    Attributes:
        key: Key; None = a message without a key.
        partition: Number of the partition. A key always has the same partition, as in ``memsource.memory.topic``.
        gap: Number of positions to skip before the message.
        index: Number of the message in the traffic, from 0.
    """

    key: PartitionKey | None
    partition: int
    gap: int
    index: int


def _number(value: object) -> bool:
    """Return whether a value is a number, but no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The messages of a topic. Shares are in 0 … 1.

    Attributes:
        n: Number of messages, 0 or more.
        keys: Number of keys, or the keys themselves.
        skew: Exponent of Zipf's law, 0 … 10: the share of the key of rank r is proportional to 1/rˢᵏᵉʷ; 0 = equal
            shares.
        hot: Share of the first key; the other keys share the remaining messages by ``skew``. 0 = no hot key.
        keyless: Share of messages without a key.
        gaps: Share of messages after a gap.

    Raises:
        ImpossiblePlan: A field is out of its range.
        ValueError: A key is no valid key.
        TypeError: A key is of the wrong type.
    """

    n: int = 200
    keys: int | Sequence[PartitionKey] = 20
    skew: float = 1.0
    hot: float = 0.0
    keyless: float = 0.0
    gaps: float = 0.0

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 0:
            raise ImpossiblePlan(f"n={self.n!r}: must be a whole number of messages, 0 or more{but_not(self.n)}")
        if isinstance(self.keys, str | bytes) or not isinstance(self.keys, int | Sequence):
            raise ImpossiblePlan(
                f"keys={self.keys!r}: must be a count or a sequence of keys; write [{self.keys!r}] for one key"
            )
        if isinstance(self.keys, int):
            if isinstance(self.keys, bool) or self.keys < 1:
                raise ImpossiblePlan(
                    f"keys={self.keys!r}: must be 1 or more; for messages without a key set keyless=1.0"
                )
        else:
            distinct = {key_bytes(key) for key in self.keys}
            if not distinct or len(distinct) < len(self.keys):
                raise ImpossiblePlan(f"keys={self.keys!r}: must name one key or more, and each key once")
        for name, share in (("hot", self.hot), ("keyless", self.keyless), ("gaps", self.gaps)):
            if not _number(share) or not 0 <= share <= 1:
                raise ImpossiblePlan(f"{name}={share!r}: must be a share of the messages, 0 … 1")
        if not _number(self.skew) or not 0 <= self.skew <= 10:
            raise ImpossiblePlan(f"skew={self.skew!r}: must be in 0 (all keys alike) … 10 (nearly always the first)")

    def items(self, seed: int, partitions: int) -> list[Item]:
        """Draw the messages. Takes O(n log keys) time.

        The same seed produces the same messages. A smaller ``n`` produces the first messages of a larger ``n``.

        Args:
            seed: Seed of the draw.
            partitions: Number of partitions, 1 or more.

        Returns:
            The ``n`` messages, in the order of their publication.

        Raises:
            ImpossiblePlan: ``partitions`` is below 1.
        """
        if partitions < 1:
            raise ImpossiblePlan(f"partitions={partitions}: must be 1 or more")
        keys = self._keys()
        homes = [zlib.crc32(key_bytes(key)) % partitions for key in keys]
        bounds = list(accumulate(self._weights(len(keys))))
        rng = random.Random(seed)
        found: list[Item] = []
        for index in range(self.n):
            if rng.random() < self.keyless:
                key, partition = None, rng.randrange(partitions)
            else:
                # A draw can exceed the last bound by a rounding error. Such a draw selects the last key.
                chosen = min(bisect(bounds, rng.random() * bounds[-1]), len(keys) - 1)
                key, partition = keys[chosen], homes[chosen]
            gap = rng.choice(_GAPS) if rng.random() < self.gaps else 0
            found.append(Item(key, partition, gap, index))
        return found

    def _keys(self) -> Sequence[PartitionKey]:
        if isinstance(self.keys, int):
            return [f"key-{number}".encode() for number in range(self.keys)]
        return self.keys

    def _weights(self, count: int) -> list[float]:
        """Return the weight of each key; with a hot key the sum of all weights is 1."""
        weights = [rank**-self.skew for rank in range(1, count + 1)]
        if self.hot == 0 or count == 1:
            return weights
        rest = sum(weights[1:])
        return [self.hot, *((1 - self.hot) * weight / rest for weight in weights[1:])]
