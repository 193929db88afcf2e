"""Checkers on whole runs with commits: they pass legal runs, convict planted faults, and claim nothing in gaps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memsource import check, counts, exit_status, read_bytes
from tests.effort import is_full
from tests.memsource.checkers.commit_faults import COMMIT_FAULTS
from tests.memsource.checkers.commit_world import history_of, segments_of
from tests.memsource.checkers.damage import assert_the_last_may_crash, lose_rows
from tests.memsource.checkers.faults import Fault
from tests.memsource.checkers.rows import encoded, violated

SEEDS = range(120)
ENOUGH = 5
"""Runs in which a fault must be found; `make campaign` plants the fault in all runs."""


@pytest.mark.long
@given(st.integers(0, 2**32))
@example(200680)  # Two owners at the same moment, one of which had lost the partition.
def test_a_run_that_keeps_every_promise_passes(seed: int) -> None:
    verdicts = check(read_bytes(history_of(seed)))
    assert [verdict for verdict in verdicts if verdict.status != "passed"] == []
    assert exit_status(verdicts) == 0


@pytest.mark.long
def test_the_simulated_runs_of_a_log_write_every_kind_of_row() -> None:
    events: Counter[str] = Counter()
    redeliveries: Counter[str] = Counter()
    full = 0
    for seed in SEEDS:
        segments = read_bytes(history_of(seed))
        figures = counts(segments)
        events.update(figures.events)
        redeliveries.update(figures.redeliveries)
        full += figures.peak_in_flight in {segment.max_in_flight for segment in segments}
        assert figures.messages == figures.events["produced"]
    rare = ["retry", "dlq_confirmed", "abandoned", "zombie", "revoked", "lost", "commit_ok", "commit_failed"]
    assert all(events[event] >= 10 for event in rare)
    assert all(redeliveries[cause] >= 10 for cause in ("settled", "restart"))
    assert full >= 10


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.parametrize("fault", COMMIT_FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_by_the_right_checkers(fault: Fault) -> None:
    planted = 0
    for seed in SEEDS:
        segments = fault(segments_of(seed))
        if segments is not None:
            planted += 1
            assert violated(*segments) == COMMIT_FAULTS[fault], f"seed {seed}"
            if planted >= ENOUGH and not is_full():
                break
    assert planted >= ENOUGH


@pytest.mark.long
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_history_of_a_log_with_missing_rows_proves_nothing(seed: int, damage: int) -> None:
    """Without some rows of a legal history, no checker claims a violation, and none passes."""
    segments = segments_of(seed)
    lose_rows(segments, damage)
    verdicts = check(read_bytes(encoded(*segments)))
    assert {verdict.status for verdict in verdicts} == {"unproven"}


@pytest.mark.long
@given(st.integers(0, 2**32), st.data())
def test_the_end_of_the_last_segment_may_be_missing(seed: int, data: st.DataObject) -> None:
    assert_the_last_may_crash(segments_of(seed), data)
