"""Faults to plant into legal histories of a source that commits, as ``tests.memsource.checkers.faults`` does for
the others."""

from __future__ import annotations

from collections.abc import Iterator

from tests.memsource.checkers.faults import Fault, Handling, a_smaller_bound, handlings, moved, without
from tests.memsource.checkers.rows import Fields, Rows, renumbered


def commits(rows: Rows, assigned: Fields) -> list[int]:
    """The indices of the sent commits of an assignment."""
    return [
        index
        for index, row in enumerate(rows)
        if row["event"] == "commit_sent" and _assignment(row) == _assignment(assigned)
    ]


def _assignment(row: Fields) -> tuple[object, object]:
    return row.get("partition"), row.get("assignment")


def covered(segments: list[Rows]) -> Iterator[tuple[Handling, int]]:
    """Messages that ended well at their first attempt, each with the index of the first commit that passes it.

    Nothing is delivered between the end and that commit, so no other message has filled the room."""
    for handling in handlings(segments):
        shape = [handling.rows[index]["event"] for index in handling.indices]
        if shape == ["delivered", "started", "ended"] and handling.rows[handling.at("ended")[0]]["result"] == "ok":
            rows = handling.rows
            passing = [i for i in commits(rows, handling.first) if rows[i]["floor"] > handling.position]
            if passing and not _any(rows[handling.at("ended")[0] : passing[0]], "delivered"):
                yield handling, passing[0]


def _any(rows: Rows, *events: str) -> bool:
    return any(row["event"] in events for row in rows)


def handled_once(segments: list[Rows], handling: Handling) -> bool:
    """Whether the message is the last of its key, and no other member handles the message."""
    for other in handlings(segments):
        same = other.lane == handling.lane
        if same and other.first is not handling.first and other.position >= handling.position:
            return False
    return True


def committed_while_it_runs(segments: list[Rows]) -> list[Rows] | None:
    for handling, commit in covered(segments):
        if handling.lane[1] is None and not _any(handling.rows[handling.at("ended")[0] : commit], "drained", "lost"):
            return moved(segments, handling.segment, handling.at("ended")[0], commit + 1)
    return None


def committed_on_a_failure(segments: list[Rows]) -> list[Rows] | None:
    for handling, _ in covered(segments):
        if handled_once(segments, handling):
            handling.rows[handling.at("ended")[0]]["result"] = "error"
            return segments
    return None


def committed_past_a_parking_message(segments: list[Rows]) -> list[Rows] | None:
    for handling in handlings(segments):
        confirmed = handling.at("dlq_confirmed")
        if confirmed and handling.lane[1] is None:
            rows = handling.rows
            passing = [i for i in commits(rows, handling.first) if rows[i]["floor"] > handling.position]
            if passing and not _any(rows[confirmed[0] : passing[0]], "drained", "lost", "delivered"):
                return moved(segments, handling.segment, confirmed[0], passing[0] + 1)
    return None


def a_message_skipped_and_committed_past(segments: list[Rows]) -> list[Rows] | None:
    for handling, _ in covered(segments):
        if handled_once(segments, handling):
            return without(segments, handling.segment, *handling.indices)
    return None


def completed_that_never_was(segments: list[Rows]) -> list[Rows] | None:
    for skipped in handlings(segments):
        again = skipped.at("redelivered")
        if not again or not _only_ends_elsewhere(segments, skipped):
            continue
        for number, rows in enumerate(segments):
            segments[number] = renumbered(
                [
                    row
                    for row in rows
                    if row["event"] == "produced"
                    or (rows is skipped.rows and row["event"] in ("delivered", "redelivered"))
                    or (row.get("partition"), row.get("position")) != (skipped.lane[0], skipped.position)
                ]
            )
        return segments
    return None


def _only_ends_elsewhere(segments: list[Rows], skipped: Handling) -> bool:
    """Whether no later message has the same key: a broken order is a different fault."""
    return all(
        other.lane != skipped.lane or other.position <= skipped.position or skipped.lane[1] is None
        for other in handlings(segments)
    )


def a_floor_that_falls(segments: list[Rows]) -> list[Rows] | None:
    for rows in segments:
        for row in rows:
            if row["event"] == "assigned":
                sent = commits(rows, row)
                if len(sent) > 1 and rows[sent[0]]["floor"] > row["floor"]:
                    rows[sent[-1]]["floor"] = row["floor"]
                    return segments
    return None


def a_floor_below_where_it_began(segments: list[Rows]) -> list[Rows] | None:
    for rows in segments:
        for row in rows:
            sent = commits(rows, row) if row["event"] == "assigned" else []
            if sent and row["floor"] > 0:
                rows[sent[0]]["floor"] = row["floor"] - 1
                return segments
    return None


def a_commit_after_the_loss(segments: list[Rows]) -> list[Rows] | None:
    for number, rows in enumerate(segments):
        begun = {_assignment(row): row["floor"] for row in rows if row["event"] == "assigned"}
        for index, row in enumerate(rows):
            if row["event"] == "lost" and not commits(rows, row):
                late = {**row, "event": "commit_sent", "floor": begun[_assignment(row)], "completed": 0}
                segments[number] = renumbered([*rows[: index + 1], late, *rows[index + 1 :]])
                return segments
    return None


def a_commit_after_the_release(segments: list[Rows]) -> list[Rows] | None:
    for number, rows in enumerate(segments):
        for index, row in enumerate(rows):
            events = [each["event"] for each in rows[index : index + 3]]
            if row["event"] == "commit_sent" and events[-1] == "revoked":
                return moved(segments, number, index, index + 3)
    return None


COMMIT_FAULTS: dict[Fault, set[str]] = {
    committed_while_it_runs: {"NoCommitPastUnfinished", "NoSettleBeforeEnd"},
    # A failed message below a commit is lost, and was settled too early.
    committed_on_a_failure: {"AtLeastOnce", "NoCommitPastUnfinished", "NoSettleBeforeEnd"},
    # The message is given up, so ``DeadLetterBeforeSettle`` judges it.
    committed_past_a_parking_message: {"DeadLetterBeforeSettle", "NoCommitPastUnfinished"},
    # Only the producer's row names the message.
    a_message_skipped_and_committed_past: {"AtLeastOnce"},
    completed_that_never_was: {"AtLeastOnce"},
    a_floor_that_falls: {"CommitsRise"},
    a_floor_below_where_it_began: {"CommitsRise"},
    a_commit_after_the_loss: {"NoCommitAfterRevoke"},
    a_commit_after_the_release: {"NoCommitAfterRevoke"},
    a_smaller_bound: {"BoundedInFlight"},
}
"""fault -> the checkers that must find it, and no others."""
