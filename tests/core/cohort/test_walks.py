"""Random walks of lease machines reach every pair of faults in every phase of a lease, and break no promise."""

from __future__ import annotations

import json

import pytest

from tests.core.cohort.campaign import tally, walk
from tests.core.cohort.pairs import KINDS, PHASES, Pair, Pairs, unreached
from tests.effort import is_full, runs

WALKS = 23_000
SLICE = 3_000
"""Walks that reach all pairs of faults."""


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(300)
def test_walks_reach_every_pair_of_faults_in_every_phase() -> None:
    result = tally(range(runs(SLICE, least=600)))
    assert result.violations == []
    assert result.unreached == [] if is_full() else len(result.pairs) > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_walk_of_the_campaign_of_23000_breaks_a_promise() -> None:
    result = tally(range(WALKS))
    print(json.dumps({str(pair): count for pair, count in sorted(result.pairs.items())}, indent=1))
    print(json.dumps(result.figures()))
    assert result.violations == []
    assert result.unreached == []


def test_a_walk_with_the_same_number_repeats() -> None:
    first, second = walk(17), walk(17)
    assert repr(first.run()) == repr(second.run())
    assert first.world.calls == second.world.calls
    assert first.pairs.counts == second.pairs.counts


def test_two_faults_of_one_member_count_as_a_pair_and_faults_of_two_members_do_not() -> None:
    pairs = Pairs()
    pairs.note(0.0, "a", "request lost", ["steady"])
    assert not pairs.counts
    pairs.note(1.0, "b", "freeze", ["steady"])
    assert not pairs.counts
    pairs.note(2.0, "a", "cut off", ["renewal", "handover"])
    assert set(pairs.counts) == {
        Pair("request lost", "cut off", "renewal"),
        Pair("request lost", "cut off", "handover"),
    }
    pairs.note(100.0, "a", "freeze", ["join"])  # too late for a pair
    assert pairs.counts.total() == 2
    assert len(unreached(pairs.counts)) == len(KINDS) ** 2 * len(PHASES) - 2
