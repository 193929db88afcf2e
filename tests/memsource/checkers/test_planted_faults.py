"""Checkers on whole runs with acks: they pass legal runs, convict planted faults, and claim nothing in gaps."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource import CHECKERS, check, counts, exit_status, read_bytes
from tests.effort import is_full
from tests.memsource.checkers.commit_faults import COMMIT_FAULTS
from tests.memsource.checkers.damage import assert_the_last_may_crash, lose_rows
from tests.memsource.checkers.faults import FAULTS, Fault
from tests.memsource.checkers.rows import PROMISES, encoded, violated
from tests.memsource.checkers.worlds import history_of, segments_of

SEEDS = range(120)
ENOUGH = 5
"""Runs in which a fault must be found; `make campaign` plants the fault in all runs."""


@pytest.mark.long
@given(st.integers(0, 2**32))
def test_a_run_that_keeps_every_promise_passes(seed: int) -> None:
    segments = read_bytes(history_of(seed))
    verdicts = check(segments)
    assert [verdict.name for verdict in verdicts] == [make.name for make in CHECKERS]  # type: ignore[attr-defined]
    assert [verdict for verdict in verdicts if verdict.status != "passed"] == []
    assert exit_status(verdicts) == 0


@pytest.mark.long
def test_the_simulated_runs_write_every_kind_of_row() -> None:
    events: Counter[str] = Counter()
    redeliveries: Counter[str] = Counter()
    crashed = full = 0
    for seed in SEEDS:
        segments = read_bytes(history_of(seed))
        figures = counts(segments)
        events.update(figures.events)
        redeliveries.update(figures.redeliveries)
        crashed += figures.crashed
        full += figures.peak_in_flight in {segment.max_in_flight for segment in segments}
    rare = ["retry", "dlq_confirmed", "abandoned", "zombie", "revoked", "lost", "redelivered"]
    assert all(events[event] >= 10 for event in rare)
    assert all(redeliveries[cause] >= 10 for cause in ("held", "settled", "late", "restart"))
    assert crashed >= 10
    assert full >= 10


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_by_the_right_checkers(fault: Fault) -> None:
    planted = 0
    for seed in SEEDS:
        segments = fault(segments_of(seed))
        if segments is not None:
            planted += 1
            assert violated(*segments) == FAULTS[fault], f"seed {seed}"
            if planted >= ENOUGH and not is_full():
                break
    assert planted >= ENOUGH


def test_every_checker_has_two_faults_to_find() -> None:
    found = Counter(name for names in (FAULTS | COMMIT_FAULTS).values() for name in names)
    assert set(found) == {make.name for make in PROMISES}  # type: ignore[attr-defined]
    assert min(found.values()) >= 2


@pytest.mark.long
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_history_with_missing_rows_proves_nothing(seed: int, damage: int) -> None:
    """Without some rows of a legal history, no checker claims a violation, and none passes."""
    segments = segments_of(seed)
    lose_rows(segments, damage)
    verdicts = check(read_bytes(encoded(*segments)))
    assert {verdict.status for verdict in verdicts} == {"unproven"}
    assert exit_status(verdicts) == 2


@pytest.mark.long
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_gap_hides_no_violation_that_stands_without_it(seed: int, damage: int) -> None:
    """A fault within one segment stays one when another segment lacks rows."""
    random = Random(damage)
    fault = random.choice([one for one, names in FAULTS.items() if names <= {"NoSettleBeforeEnd", "BoundedInFlight"}])
    segments = fault(segments_of(seed))
    if segments is None:
        return
    others = segments_of(seed + 1)
    for row in (row for rows in others for row in rows):
        row["member"] = f"other-{row['member']}"
        if "partition" in row:
            row["partition"] = row["partition"].replace("S", "T")
    damaged = max(others, key=len)
    del damaged[random.randrange(1, len(damaged) - 1)]
    assert violated(*segments, *others) == FAULTS[fault]


@pytest.mark.long
@given(st.integers(0, 2**32), st.data())
def test_the_end_of_the_last_segment_may_be_missing(seed: int, data: st.DataObject) -> None:
    assert_the_last_may_crash(segments_of(seed), data)
