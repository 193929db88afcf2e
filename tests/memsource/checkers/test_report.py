"""``lanes check`` prints counts, verdicts, witnesses and gaps, with an exit status for each verdict."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from memsource import check_files, counts
from memsource.checkers.verdict import WITNESSES
from tests.memsource.checkers.rows import (
    ack,
    delivered,
    encoded,
    ended,
    handled,
    parsed,
    produced,
    redelivered,
    renumbered,
    segment,
    started,
)

PASSED = [
    ("PerKeyOrder", "1 checked"),
    ("NoOverlap", "1 checked"),
    ("OrderAcrossAssignments", "0 checked"),
    ("DeliveredThenStarted", "1 checked"),
    ("LaneProgress", "1 checked"),
    ("PartitionTurns", "0 checked"),
    ("ExclusiveOwner", "0 checked"),
    ("AtLeastOnce", "1 checked"),
    ("NoSettleBeforeEnd", "1 checked"),
    ("OneTerminalOutcome", "1 checked"),
    ("ZombiesDoNotCount", "0 checked"),
    ("RedeliveryNotRun", "0 checked"),
    ("KeptAlive", "0 checked"),
    ("OutputsAtLeastOnce", "0 checked"),
    ("NoCommitPastUnfinished", "0 checked"),
    ("CommitsRise", "0 checked"),
    ("OneCommitAtATime", "0 checked"),
    ("NoCommitAfterRevoke", "0 checked"),
    ("CommitsInTime", "0 checked"),
    ("UnknownCommitRepeated", "0 checked"),
    ("BoundedInFlight", "1 checked, peak 1 of 100"),
    ("BoundedBytes", "1 checked, peak 10 of 1000"),
    ("PartitionBudgets", "0 checked"),
    ("MaxAhead", "0 checked"),
    ("StallNamed", "0 checked"),
    ("PauseAtBounds", "0 checked"),
    ("AttemptsCount", "1 checked"),
    ("RetryHoldsLane", "0 checked"),
    ("DeadLetterBeforeSettle", "0 checked"),
    ("DrainStartsNothing", "0 checked"),
    ("DrainWaitsForRunning", "0 checked"),
    ("DrainInTime", "0 checked"),
    ("HandedOverAfterDrain", "0 checked"),
    ("KeptWorkGoesOn", "0 checked"),
    ("NoDuplicateCleanly", "0 checked"),
    ("ExclusiveSlot", "0 checked"),
    ("DrainBeforeFeed", "0 checked"),
]


def write(directory: Path, data: bytes) -> Path:
    path = directory / "history.jsonl"
    path.write_bytes(data)
    return path


def test_a_report_counts_messages_assignments_and_repeats() -> None:
    first = segment(produced(1), handled(1), delivered(2), started(2), end=None)
    again = [delivered(2), redelivered(2, "held"), started(2), ended(2, result="error"), started(2), ended(2), ack(2)]
    settled = [delivered(1), redelivered(1, "settled"), ack(1)]
    second = segment(delivered(2), again, settled, {"event": "dropped", "count": 3}, start=200.0, pid=2)
    figures = counts(parsed(first, second))
    assert (figures.segments, figures.crashed, figures.members, figures.messages) == (2, 1, 1, 2)
    assert figures.redeliveries == {"held": 1, "settled": 1, "late": 0, "restart": 1}
    assert (figures.dropped, figures.gaps, figures.peak_in_flight) == (3, 0, 1)
    assert figures.events["started"] == 4


def test_the_report_of_a_history_that_keeps_every_promise_has_status_0(tmp_path: Path) -> None:
    verdicts, text, status = check_files([write(tmp_path, encoded(segment(handled(1))))])
    assert status == 0
    assert {verdict.status for verdict in verdicts} == {"passed"}
    assert text.splitlines() == [
        "segments: 1, 0 of them without an end, of 1 members",
        "messages: 1, in 6 rows; 0 rows dropped, 0 gaps",
        "events: begin 1, delivered 1, started 1, ended 1, ack 1, end 1",
        "redeliveries: held 0, settled 0, late 0, restart 0",
        "",
        *(f"passed    {name:<23} {what}" for name, what in PASSED),
    ]


def test_a_violation_is_status_1_and_witnesses_are_bounded(tmp_path: Path) -> None:
    many = [[delivered(position, str(position)), ack(position, str(position))] for position in range(20)]
    path = write(tmp_path, encoded(segment(*many)))
    verdicts, text, status = check_files([path])
    assert status == 1
    lost = next(verdict for verdict in verdicts if verdict.name == "AtLeastOnce")
    assert (lost.violations, len(lost.witnesses)) == (20, WITNESSES)
    assert "violated  AtLeastOnce             20 checked, 20 violations" in text
    assert "          ! and 15 more" in text


def test_an_unproven_promise_is_status_2_with_its_reason(tmp_path: Path) -> None:
    rows = segment(handled(1))
    del rows[2]
    path = write(tmp_path, encoded(rows))
    verdicts, text, status = check_files([path])
    assert status == 2
    assert {verdict.status for verdict in verdicts} == {"unproven"}
    assert f"          ? gap in the history: {path}:3: rows 3…3 are missing" in text


def test_gaps_are_listed_up_to_a_bound(tmp_path: Path) -> None:
    rows = segment(*(handled(position) for position in range(20)))
    verdicts, _, _ = check_files([write(tmp_path, encoded(rows[::2]))])
    assert all(len(verdict.reasons) <= WITNESSES + 2 for verdict in verdicts)
    assert any("and 35 more of these" in verdict.reasons for verdict in verdicts)


def test_names_from_a_history_cannot_control_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b[2J\n\u202e" + "x" * 500
    rows = segment(delivered(1, partition=hostile), ack(1, partition=hostile))
    _, text, status = check_files([write(tmp_path, encoded(rows))])
    assert status == 1
    assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, text.splitlines())) < 400


@pytest.mark.long
def test_a_large_history_takes_seconds(tmp_path: Path) -> None:
    rows = segment(*(handled(position, f"case-{position % 5000}") for position in range(25_000)))
    path = write(tmp_path, encoded(renumbered(rows)))
    began = time.process_time()
    _, _, status = check_files([path])
    # 100,000 rows: about 1.3 s of CPU, which a busy machine does not change by much.
    assert time.process_time() - began < 20
    assert status == 0
