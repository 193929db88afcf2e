"""Divides positions into batches. No function in this module calls Spark.

A batch has one range of positions of every partition. Unless a journal selects positions, this range directly follows
the range of the previous batch. All rows of a batch belong to one era. A cap limits the number of positions of a batch.
The batch has fewer rows if positions have no message. If a journal selects positions, the replay merges near positions
into ranges, called islands. A batch then contains at most one island of each partition. The replay reads no positions
between islands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from lanes.errors import SourceError
from lanes_spark.plan import Eras

Positions = Mapping[int, int]
"""The next position to read, by partition."""

Span = tuple[int, int]
"""A range of positions: the first position, and the end, exclusive."""

Islands = Mapping[int, Sequence[Span]]
"""Separate ranges to read, in rising order, by partition. If a partition is missing, the replay reads all its
positions, except in ``narrowed``.
"""


def check_start(topic: str, start: Positions, spans: Mapping[int, Span]) -> None:
    """Raise ``SourceError`` if the source has lost a partition or unread rows, or ends below ``start``."""
    for partition, position in start.items():
        if partition not in spans:
            raise SourceError(
                f"{topic}/{partition}: the replay continues at position {position}, but the source has lost that "
                "partition; restore the partition, or begin again with another checkpoint"
            )
        first, end = spans[partition]
        if position < first:
            raise SourceError(
                f"{topic}/{partition}: positions {position} … {first - 1} are unread, and the source has lost them; "
                f"restore these positions, or begin at {first} with another checkpoint"
            )
        if position > end:
            raise SourceError(
                f"{topic}/{partition}: the replay was at position {position}, but the source ends at {end}, because "
                "this is another source or rows were removed; begin again with another checkpoint"
            )


def check_incarnation(topic: str, begun: str, now: str, *, read: bool = False) -> None:
    """Raise ``SourceError`` if the topic's id has changed since the run began.

    Args:
        topic: Topic name.
        begun: Id of the topic at the start of the run; "" = unknown.
        now: Current id of the topic; "" = unknown.
        read: Whether the run has read a batch before this check.
    """
    if begun and now and begun != now:
        also = ", and the last batch may have read messages of the new topic" if read else ""
        raise SourceError(
            f"{topic}: the topic was deleted and recreated after this run had begun, so its unread messages are gone"
            f"{also}; begin again with another checkpoint"
        )


def check_kept(topic: str, wanted: Positions, spans: Mapping[int, Span], *, only: bool = False) -> None:
    """Raise ``SourceError`` if the source has lost the first positions of a replay. The error names the range.

    Args:
        topic: Topic name.
        wanted: First position to read, by partition.
        spans: Ranges of positions in the source, by partition.
        only: Whether a journal selected ``wanted``.
    """
    for partition, (first, _) in sorted(spans.items()):
        position = wanted.get(partition)
        if position is not None and position < first:
            remedy = (
                f"only=… selects some of these positions; leave them out by from_={{{partition}: {first}}}, or "
                "restore them"
                if only
                else f"from_ selects these positions; begin at {first}, or leave out from_ to read all positions"
            )
            raise SourceError(
                f"{topic}/{partition}: positions {position} … {first - 1} are lost in the source, and {remedy}"
            )


def islands_of(found: Iterable[tuple[int, int, int]], gap: int) -> dict[int, list[Span]]:
    """Merge ranges (partition, first position, last position) into islands.

    The ranges do not overlap and may have any order. The function merges two ranges of a partition if fewer than
    ``gap`` positions lie between them.
    """
    islands: dict[int, list[Span]] = {}
    for partition, first, last in sorted(found):
        of_partition = islands.setdefault(partition, [])
        if of_partition and first - of_partition[-1][1] < gap:
            of_partition[-1] = (of_partition[-1][0], last + 1)
        else:
            of_partition.append((first, last + 1))
    return islands


def next_wanted(at: Positions, islands: Islands) -> dict[int, int]:
    """Return the positions ``at``. For a position outside the islands, return the begin of the next island."""
    return {partition: _next_island(position, islands.get(partition))[0] for partition, position in at.items()}


def narrowed(ranges: Mapping[int, Span], islands: Islands) -> dict[int, Span]:
    """Cut each range to its first and last selected position.

    The result omits a partition without a selected position.
    """
    found = {}
    for partition, (first, end) in ranges.items():
        if of_partition := islands.get(partition):
            end = min(end, of_partition[-1][1])
            found[partition] = (min(max(first, of_partition[0][0]), end), end)
    return found


def clipped(ranges: Mapping[int, Span], islands: Islands) -> dict[int, Span]:
    """Cut each range to its first and last position inside an island.

    A partition without an entry in ``islands`` keeps its range. The result omits an empty range.
    """
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
    """Count the positions of ``ranges`` inside islands, and all positions of a partition without islands."""
    count = 0
    for partition, (first, end) in ranges.items():
        for one, other in islands.get(partition, ((first, end),)):
            count += max(0, min(end, other) - max(first, one))
    return count


def _next_island(position: int, islands: Sequence[Span] | None) -> tuple[int, int | None]:
    """Return the first island position at or above ``position``, and the island's end; or ``position`` and None."""
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
    """Return the end of the next batch, by partition.

    Partitions share the cap in proportion to their remaining positions. Batches therefore reach the ends of all
    partitions at about the same time. Without remaining positions, the batch has no rows.

    Args:
        start: First position of the batch, by partition.
        spans: Ranges of positions in the source, by partition.
        cap: Maximum number of positions of the batch; None = no bound.
        eras: Changes of the number of partitions.
        islands: The only ranges to read, by partition; None = all positions.

    Returns:
        The end of the batch by partition, exclusive.
    """
    at = next_wanted({partition: start.get(partition, first) for partition, (first, _) in spans.items()}, islands or {})
    # The next island may lie after the current end of the source.
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
    # Give the remainder of the division to the partitions with the most remaining positions, one position each.
    for partition in sorted(left, key=lambda partition: (-left[partition], partition))[: cap - sum(taken.values())]:
        taken[partition] += 1
    return {**at, **{partition: at[partition] + count for partition, count in taken.items()}}


def _era_ends(at: Positions, ends: Positions, eras: Eras) -> Mapping[int, int]:
    """Return the end of each partition in the first era that has unread positions."""
    for era in eras:
        # If an era does not name a partition, the partition was added by that era or a later era.
        of_era = {partition: min(end, era.get(partition, 0)) for partition, end in ends.items()}
        if any(at[partition] < end for partition, end in of_era.items()):
            return of_era
    return ends
