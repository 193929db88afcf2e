"""How far a replay is: positions of partitions, cut into batches. Pure.

A batch takes of every partition a range of positions that follows the one before, and never rows of two eras. As many
positions as the cap are taken at most, so never more rows than that; where positions have gaps, fewer. Where only some
positions are wanted, a batch takes those of one island in each partition, and what lies between islands is not read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from lanes.errors import SourceError
from lanes_spark.plan import Eras

Positions = Mapping[int, int]
"""Partition -> the next position to read."""

Span = tuple[int, int]
"""The first position and the one behind the last."""

Islands = Mapping[int, Sequence[Span]]
"""By partition the ranges that are read, rising and apart; a partition that is not in it is read whole."""


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


def check_incarnation(topic: str, begun: str, now: str, *, read: bool = False) -> None:
    """Raise ``SourceError`` where the topic is another one ``now`` than when the run was ``begun``; "" = it cannot be
    told. ``read``: a batch was, meanwhile."""
    if begun and now and begun != now:
        also = ", and the last batch may have had messages of the new one" if read else ""
        raise SourceError(
            f"{topic}: the topic was deleted and made anew since this run was begun: what of the former one was not "
            f"read is gone{also}; begin again with another checkpoint"
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


def islands_of(found: Iterable[tuple[int, int, int]], gap: int) -> dict[int, list[Span]]:
    """Islands of ranges (partition, first position, last position) that do not overlap, in any order: two of a
    partition are one where fewer than ``gap`` positions are between them."""
    islands: dict[int, list[Span]] = {}
    for partition, first, last in sorted(found):
        of_partition = islands.setdefault(partition, [])
        if of_partition and first - of_partition[-1][1] < gap:
            of_partition[-1] = (of_partition[-1][0], last + 1)
        else:
            of_partition.append((first, last + 1))
    return islands


def next_wanted(at: Positions, islands: Islands) -> dict[int, int]:
    """The same positions, but where that is between two islands, the begin of the next one."""
    return {partition: _next_island(position, islands.get(partition))[0] for partition, position in at.items()}


def narrowed(ranges: Mapping[int, Span], islands: Islands) -> dict[int, Span]:
    """These ranges from the first to the last wanted position; partitions without one are left out."""
    found = {}
    for partition, (first, end) in ranges.items():
        if of_partition := islands.get(partition):
            end = min(end, of_partition[-1][1])
            found[partition] = (min(max(first, of_partition[0][0]), end), end)
    return found


def clipped(ranges: Mapping[int, Span], islands: Islands) -> dict[int, Span]:
    """What is to be read of these ranges: of each from its first to its last wanted position; without empty ones."""
    found = {}
    for partition, (first, end) in ranges.items():
        of_partition = islands.get(partition)
        if of_partition is not None:
            inside = [(max(first, one), min(end, other)) for one, other in of_partition if one < end and other > first]
            if not inside:
                continue
            first, end = inside[0][0], inside[-1][1]
        if first < end:
            found[partition] = (first, end)
    return found


def wanted_count(ranges: Mapping[int, Span], islands: Islands) -> int:
    """How many positions are to be read of these ranges."""
    count = 0
    for partition, (first, end) in ranges.items():
        for one, other in islands.get(partition, ((first, end),)):
            count += max(0, min(end, other) - max(first, one))
    return count


def _next_island(position: int, islands: Sequence[Span] | None) -> tuple[int, int | None]:
    """The first wanted position that is at or behind ``position``, and the end of its island; None = there is none."""
    if islands is None:
        return position, None
    number = bisect_right(islands, position, key=lambda island: island[1])
    if number == len(islands):
        return position, None
    first, end = islands[number]
    return max(position, first), end


def next_positions(
    start: Positions, spans: Mapping[int, Span], cap: int | None, eras: Eras = (), islands: Islands | None = None
) -> dict[int, int]:
    """Where a batch ends that begins at ``start`` and has ``cap`` positions at most, None = any number.

    The partitions share the cap by what each has left, so that all of them end in about the same batch. Equal to
    ``start`` when there is nothing left.
    """
    at = next_wanted({partition: start.get(partition, first) for partition, (first, _) in spans.items()}, islands or {})
    # Never beyond the end of what there is: the next island may not have come yet.
    at = {partition: max(start.get(partition, 0), min(one, spans[partition][1])) for partition, one in at.items()}
    ends = _era_ends(at, {partition: end for partition, (_, end) in spans.items()}, eras)
    for partition, of_partition in (islands or {}).items():
        if partition in at:
            _, end = _next_island(at[partition], of_partition)
            ends = {**ends, partition: ends[partition] if end is None else min(end, ends[partition])}
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
