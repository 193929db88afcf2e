"""How far a replay is: positions of partitions, cut into batches. Pure.

A batch takes of every partition a range of positions that follows the one before, and never rows of two eras. As many
positions as the cap are taken at most, so never more rows than that; where positions have gaps, fewer.
"""

from __future__ import annotations

from collections.abc import Mapping

from lanes.errors import SourceError
from lanes_spark.plan import Eras

__all__ = ["Positions", "Span", "check_kept", "check_start", "next_positions"]

Positions = Mapping[int, int]
"""Partition -> the next position to read."""

Span = tuple[int, int]
"""The first position and the one behind the last."""


def check_start(topic: str, start: Positions, spans: Mapping[int, Span]) -> None:
    """Raise ``SourceError`` where rows that were not read yet are gone, naming the range."""
    for partition, position in start.items():
        if partition not in spans:
            raise SourceError(
                f"{topic}/{partition}: the replay goes on at position {position}, and the source has nothing of that "
                "partition any more: restore it, or begin again with another checkpoint"
            )
        first, end = spans[partition]
        if position < first:
            raise SourceError(
                f"{topic}/{partition}: positions {position} … {first - 1} are gone from the source and were not read: "
                "restore them, or begin behind them with another checkpoint"
            )
        if position > end:
            raise SourceError(
                f"{topic}/{partition}: the replay was at position {position}, and the source ends at {end}: it is "
                "another one, or rows were removed; begin again with another checkpoint"
            )


def check_kept(topic: str, wanted: Positions, spans: Mapping[int, Span]) -> None:
    """Raise ``SourceError`` where a replay is to begin with positions that are gone, naming the range."""
    for partition, (first, _) in sorted(spans.items()):
        position = wanted.get(partition)
        if position is not None and position < first:
            raise SourceError(
                f"{topic}/{partition}: positions {position} … {first - 1} are gone from the source: begin at {first}, "
                "or leave out from_ for whatever is there"
            )


def next_positions(start: Positions, spans: Mapping[int, Span], cap: int | None, eras: Eras = ()) -> dict[int, int]:
    """Where a batch ends that begins at ``start`` and has ``cap`` positions at most, None = any number.

    The partitions share the cap by what each has left, so that all of them end in about the same batch. Equal to
    ``start`` when there is nothing left.
    """
    at = {partition: start.get(partition, first) for partition, (first, _) in spans.items()}
    ends = _era_ends(at, {partition: end for partition, (_, end) in spans.items()}, eras)
    left = {partition: ends[partition] - position for partition, position in at.items() if ends[partition] > position}
    total = sum(left.values())
    if cap is None or total <= cap:
        return {**at, **{partition: ends[partition] for partition in left}}
    taken = {partition: count * cap // total for partition, count in left.items()}
    # What rounding left over goes to those who have most left, one each.
    for partition in sorted(left, key=lambda partition: (-left[partition], partition))[: cap - sum(taken.values())]:
        taken[partition] += 1
    return {**at, **{partition: at[partition] + count for partition, count in taken.items()}}


def _era_ends(at: Positions, ends: Positions, eras: Eras) -> Mapping[int, int]:
    """Until where the first era goes that is not read to its end."""
    for era in eras:
        # A partition that an era does not name has been added by it.
        of_era = {partition: min(end, era.get(partition, 0)) for partition, end in ends.items()}
        if any(at[partition] < end for partition, end in of_era.items()):
            return of_era
    return ends
