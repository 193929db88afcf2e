"""Faults to plant into legal histories: each changes one, as a broken engine would have written it.

A fault takes the segments of a world and returns them changed, or None when this world has no place for it. It
changes as little as it can, so that the checkers it must be convicted by are exactly those in ``FAULTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memsource import counts
from tests.memsource.checkers.rows import Fields, Rows, parsed, positions, redelivered, renumbered

Fault = Callable[[list[Rows]], list[Rows] | None]


class Handling:
    """One message within one assignment: the indices of its rows in its segment."""

    def __init__(self, segments: list[Rows], segment: int, rows: list[int]) -> None:
        self.segment = segment
        self.rows = segments[segment]
        self.first: Fields = self.rows[rows[0]]
        self.lane = (self.first["partition"], self.first["key"])
        self.position: int = self.first["position"]
        self.indices = rows

    def at(self, event: str) -> list[int]:
        return [index for index in self.indices if self.rows[index]["event"] == event]

    @property
    def plain(self) -> bool:
        """The message was delivered, ran once, succeeded and was settled, and has no other row."""
        shape = [self.rows[index]["event"] for index in self.indices]
        return shape == ["delivered", "started", "ended", "ack"] and self.rows[self.at("ended")[0]]["result"] == "ok"

    @property
    def retried(self) -> bool:
        """The message failed, ran again, succeeded and was settled."""
        ends = self.at("ended")
        well = len(ends) == 2 and self.rows[ends[1]]["result"] == "ok"
        return well and len(self.at("retry")) == 1 and len(self.at("ack")) == 1 and not self.at("redelivered")

    @property
    def parked(self) -> bool:
        once = all(len(self.at(event)) == 1 for event in ("dlq_sent", "dlq_confirmed", "ack"))
        return once and not self.at("redelivered")


def handlings(segments: list[Rows]) -> Iterator[Handling]:
    for number, rows in enumerate(segments):
        found: dict[tuple[str, int, int], list[int]] = {}
        for index, row in enumerate(rows):
            if "assignment" in row and "position" in row:
                found.setdefault((row["partition"], row["assignment"], row["position"]), []).append(index)
        for indices in found.values():
            yield Handling(segments, number, indices)


def alone(segments: list[Rows], handling: Handling) -> bool:
    """Whether the message is the last of its key, and no other segment or assignment handles the message."""
    for other in handlings(segments):
        same = other.lane == handling.lane
        if same and other.position > handling.position and handling.lane[1] is not None:
            return False
        again = other.rows is not handling.rows or other.first is not handling.first
        if same and other.position == handling.position and again:
            return False
    return True


def moved(segments: list[Rows], segment: int, source: int, target: int) -> list[Rows]:
    """The rows with the row at ``source`` moved before the row at ``target``."""
    rows = segments[segment]
    row = rows[source]
    neighbour = rows[target - 1]
    rest = rows[:source] + rows[source + 1 :]
    at = target if target <= source else target - 1
    segments[segment] = renumbered([*rest[:at], {**row, "mono": neighbour["mono"]}, *rest[at:]])
    return segments


def without(segments: list[Rows], segment: int, *indices: int) -> list[Rows]:
    rows = segments[segment]
    segments[segment] = renumbered([row for index, row in enumerate(rows) if index not in indices])
    return segments


def two_of_a_key_swapped(segments: list[Rows]) -> list[Rows] | None:
    found = [handling for handling in handlings(segments) if handling.plain and handling.lane[1] is not None]
    for one in found:
        for two in found:
            same = one.first["assignment"] == two.first["assignment"]
            together = one.rows is two.rows and one.lane == two.lane and same
            if not together or one.position >= two.position:
                continue
            ends = max(one.at("ended")[0], two.at("ended")[0])
            if two.at("delivered")[0] < one.at("started")[0] and min(one.at("ack")[0], two.at("ack")[0]) > ends:
                for handling, position in ((one, two.position), (two, one.position)):
                    for index in (*handling.at("started"), *handling.at("ended")):
                        handling.rows[index]["position"] = position
                return segments
    return None


def a_held_message_overtaken(segments: list[Rows]) -> list[Rows] | None:
    found = list(handlings(segments))
    for held in found:
        if not held.retried or held.lane[1] is None:
            continue
        for later in found:
            together = later.rows is held.rows and later.lane == held.lane
            behind = together and later.plain and later.position > held.position
            if behind and later.at("delivered")[0] < held.at("retry")[0]:
                # The message starts and ends while the other message is held.
                target = held.at("retry")[0] + 1
                segments = moved(segments, held.segment, later.at("started")[0], target)
                return moved(segments, held.segment, later.at("ended")[0], target + 1)
    return None


def one_of_a_key_skipped(segments: list[Rows]) -> list[Rows] | None:
    for skipped in handlings(segments):
        partition, key = skipped.lane
        if key is None:
            continue
        later = [row for rows in segments for row in rows if row.get("key") == key and row["event"] == "started"]
        if any(row["position"] > skipped.position and row["partition"] == partition for row in later):
            for number, rows in enumerate(segments):
                kept = [
                    row
                    for row in rows
                    if row["event"] == "produced"
                    or (row.get("partition"), row.get("position")) != (partition, skipped.position)
                ]
                segments[number] = renumbered(kept)
            return segments
    return None


def a_second_attempt_before_the_first_ended(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.retried:
            return moved(segments, handling.segment, handling.at("ended")[0], handling.at("started")[1] + 1)
    return None


def handed_over_while_it_runs(segments: list[Rows]) -> list[Rows] | None:
    for zombie in handlings(segments):
        if not zombie.at("zombie") or zombie.lane[1] is None:
            continue
        start, end = (zombie.rows[zombie.at(event)[-1]]["mono"] for event in ("started", "ended"))
        for rows in segments:
            overlapping = any(
                row["event"] == "started"
                and (row["partition"], row["key"]) == zombie.lane
                and start < row["mono"] < end
                for row in rows
            )
            if rows is not zombie.rows and overlapping:
                assignment = zombie.lane[0], zombie.first["assignment"]
                for row in zombie.rows:
                    if row["event"] == "lost" and (row["partition"], row["assignment"]) == assignment:
                        row["event"] = "revoked"
                        return segments
    return None


def two_of_a_key_at_once(segments: list[Rows]) -> list[Rows] | None:
    found = [handling for handling in handlings(segments) if handling.plain and handling.lane[1] is not None]
    for one in found:
        for two in found:
            same = one.first["assignment"] == two.first["assignment"]
            together = one.rows is two.rows and one.lane == two.lane and same
            if together and one.position < two.position and two.at("started")[0] < one.at("ack")[0]:
                return moved(segments, one.segment, one.at("ended")[0], two.at("started")[0] + 1)
    return None


def settled_again_without_having_been_handled(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.plain and alone(segments, handling):
            ended = handling.at("ended")[0]
            common = {name: handling.rows[ended][name] for name in ("n", "member", "mono", "wall", "assignment")}
            handling.rows[ended] = {
                **redelivered(handling.position, "settled", **common),
                "partition": handling.lane[0],
                "key": handling.lane[1],
            }
            return without(segments, handling.segment, handling.at("started")[0])
    return None


def a_failure_settled(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.plain and alone(segments, handling):
            handling.rows[handling.at("ended")[0]]["result"] = "error"
            return segments
    return None


def a_dead_letter_never_confirmed(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.parked and alone(segments, handling):
            return without(segments, handling.segment, handling.at("dlq_confirmed")[0])
    return None


def a_smaller_bound(segments: list[Rows]) -> list[Rows] | None:
    for rows in segments:
        peak = counts(parsed(rows)).peak_in_flight
        if peak > 1:
            rows[0]["max_in_flight"] = peak - 1
            return segments
    return None


def taking_goes_on_without_settling(segments: list[Rows]) -> list[Rows] | None:
    for number, rows in enumerate(segments):
        ends = (index for index, row in enumerate(rows) if row["event"] in ("revoking", "lost", "end"))
        end = next(ends, len(rows))
        taken, rest = rows[:end], rows[end:]
        if len(set(positions(taken, "delivered"))) > rows[0]["max_in_flight"]:
            acks = [row for row in taken if row["event"] == "ack"]
            segments[number] = renumbered([*(row for row in taken if row["event"] != "ack"), *acks, *rest])
            return segments
    return None


def settled_before_the_dead_letter_was_confirmed(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.parked:
            return moved(segments, handling.segment, handling.at("ack")[0], handling.at("dlq_confirmed")[0])
    return None


def settled_while_it_runs(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.plain:
            return moved(segments, handling.segment, handling.at("ack")[0], handling.at("ended")[0])
    return None


def settled_before_it_was_started(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.plain:
            return moved(segments, handling.segment, handling.at("ack")[0], handling.at("started")[0])
    return None


def settled_between_two_attempts(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        if handling.retried:
            return moved(segments, handling.segment, handling.at("ack")[0], handling.at("retry")[0] + 1)
    return None


FAULTS: dict[Fault, set[str]] = {
    two_of_a_key_swapped: {"PerKeyOrder"},
    a_held_message_overtaken: {"PerKeyOrder"},
    one_of_a_key_skipped: {"PerKeyOrder"},
    a_second_attempt_before_the_first_ended: {"NoOverlap"},
    handed_over_while_it_runs: {"NoOverlap"},
    # The later message starts before the earlier one has ended, so the order is broken too.
    two_of_a_key_at_once: {"NoOverlap", "PerKeyOrder"},
    settled_again_without_having_been_handled: {"AtLeastOnce"},
    # A message that is settled on a failure is lost, and was settled too early.
    a_failure_settled: {"AtLeastOnce", "NoSettleBeforeEnd"},
    a_dead_letter_never_confirmed: {"AtLeastOnce", "DeadLetterBeforeSettle"},
    a_smaller_bound: {"BoundedInFlight"},
    taking_goes_on_without_settling: {"BoundedInFlight"},
    settled_before_the_dead_letter_was_confirmed: {"DeadLetterBeforeSettle"},
    settled_while_it_runs: {"NoSettleBeforeEnd"},
    settled_before_it_was_started: {"NoSettleBeforeEnd"},
    settled_between_two_attempts: {"NoSettleBeforeEnd"},
}
"""fault -> the checkers that must find it, and no others."""
