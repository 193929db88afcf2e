"""Selects rows to replay. No function in this module calls Spark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from blake3 import blake3

from lanes.arguments import check_aware
from lanes.core.ring import SLOTS, slot
from lanes.core.types import PartitionKey, key_bytes
from lanes.errors import ConfigError
from lanes_spark.positions import Span

Bound = int | Mapping[int, int] | datetime
"""One position for all partitions, positions by partition, or an aware time."""

_KEYS_LIMIT: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selected keys, slots, partitions and positions. A field that is None selects everything.

    Attributes:
        keys: Selected keys, as bytes.
        slots: Selected slots, see ``lanes.core.ring``.
        partitions: Numbers of the selected partitions.
        start: First selected position or time.
        end: End of the selected positions or times, exclusive.
    """

    keys: tuple[bytes, ...] | None = field(default=None, repr=False)
    slots: frozenset[int] | None = None
    partitions: frozenset[int] | None = None
    start: Bound | None = None
    end: Bound | None = None

    @classmethod
    def of(
        cls,
        keys: Iterable[PartitionKey] | None = None,
        slots: Iterable[int] | None = None,
        partitions: Iterable[int] | None = None,
        from_: Bound | None = None,
        to: Bound | None = None,
    ) -> Selection:
        """Make the selection from the arguments of a replay. Raises ``ConfigError`` for an invalid argument."""
        if isinstance(keys, str | bytes):
            raise ConfigError(f"keys is a {type(keys).__name__}, and must be a sequence of keys: write keys=[key]")
        names = None if keys is None else tuple(sorted({_key(key) for key in keys}))
        if names is not None and not 0 < len(names) <= _KEYS_LIMIT:
            raise ConfigError(f"keys has {len(names)} keys: give 1 to {_KEYS_LIMIT}, or select by slots or partitions")
        return cls(
            keys=names,
            slots=_numbers("slots", slots, SLOTS),
            partitions=_numbers("partitions", partitions, None),
            start=_bound("from_", from_),
            end=_bound("to", to),
        )

    @property
    def by_row(self) -> bool:
        """Whether the selection depends on the content of rows, such as their keys."""
        return (
            self.keys is not None
            or self.slots is not None
            or isinstance(self.start, datetime)
            or isinstance(self.end, datetime)
        )

    def place(self, partition: int, span: Span) -> Span | None:
        """Return the selected part of a range, possibly empty; None = the partition is not selected."""
        if self.partitions is not None and partition not in self.partitions:
            return None
        first, end = span
        start, stop = _position(self.start, partition), _position(self.end, partition)
        first = first if start is None else max(first, start)
        end = end if stop is None else min(end, stop)
        return min(first, end), end

    def places(self, spans: Mapping[int, Span]) -> dict[int, Span]:
        """Return the result of ``place`` for every selected partition."""
        found = {partition: self.place(partition, span) for partition, span in spans.items()}
        return {partition: place for partition, place in found.items() if place is not None}

    def starts(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return the positions in ``start`` by selected partition. The result omits partitions without a position."""
        return {
            partition: start
            for partition in partitions
            if (self.partitions is None or partition in self.partitions)
            and (start := _position(self.start, partition)) is not None
        }

    def digest(self) -> str:
        """Return a hash of the selection, 16 hex digits."""
        text = repr(
            (
                self.keys,
                None if self.slots is None else sorted(self.slots),
                None if self.partitions is None else sorted(self.partitions),
                *[
                    sorted(bound.items()) if isinstance(bound, Mapping) else str(bound)
                    for bound in (self.start, self.end)
                ],
            )
        )
        return blake3(text.encode()).hexdigest(length=8)


def select_slots(batches: Iterable[Any], slots: Collection[int]) -> Iterator[Any]:
    """Yield the rows of Arrow batches whose keys are in one of these slots. A row without a key has no slot.

    The function runs in ``mapInArrow``, because Spark has no BLAKE3 function. It hashes each distinct key of a batch
    once.
    """
    for batch in batches:
        keys = pc.dictionary_encode(batch.column("key"))
        wanted = pa.array([slot(key) in slots for key in keys.dictionary.to_pylist()], type=pa.bool_())
        yield batch.filter(pc.fill_null(wanted.take(keys.indices), False))


def _key(key: PartitionKey) -> bytes:
    try:
        return key_bytes(key)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"keys: {error}") from None


def _numbers(name: str, numbers: Iterable[int] | None, limit: int | None) -> frozenset[int] | None:
    if numbers is None:
        return None
    if isinstance(numbers, str | bytes | int):
        raise ConfigError(f"{name}={numbers!r}: give several numbers, as a list or a range")
    found = frozenset(numbers)
    wrong = [one for one in found if not isinstance(one, int) or one < 0 or (limit is not None and one >= limit)]
    if wrong or not found:
        what = f"holds {wrong[0]!r}" if wrong else "is empty"
        below = "" if limit is None else f" and below {limit}"
        raise ConfigError(f"{name} {what}: give numbers of 0 or more{below}")
    return found


def _bound(name: str, bound: Bound | None) -> Bound | None:
    if isinstance(bound, datetime):
        check_aware(name, bound)
    if isinstance(bound, int) and (isinstance(bound, bool) or bound < 0):
        raise ConfigError(f"{name}={bound!r}: a position is 0 or more")
    if bound is not None and not isinstance(bound, int | Mapping | datetime):
        raise ConfigError(f"{name}={bound!r}: give a position, positions by partition, or an aware datetime")
    return bound


def _position(bound: Bound | None, partition: int) -> int | None:
    if isinstance(bound, Mapping):
        return bound.get(partition)
    return bound if isinstance(bound, int) else None
