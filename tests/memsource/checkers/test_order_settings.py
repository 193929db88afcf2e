"""The settings of a run decide how its order and its overlaps are judged."""

from __future__ import annotations

from functools import partial

import pytest

from memsource import check
from memsource.checkers import LaneProgress, NoOverlap
from tests.memsource.checkers.message_cases import TURNS
from tests.memsource.checkers.rows import (
    ack,
    at,
    delivered,
    ended,
    handled,
    judged,
    message,
    owned,
    parsed,
    segment,
    started,
    violated,
)


def test_without_order_any_start_order_is_legal() -> None:
    rows = [delivered(1), delivered(2), started(2), ended(2), started(1), ended(1), ack(2), ack(1)]
    for order in ("key", "partition", "serial"):
        assert violated(segment(*rows, rules={"order": order})) == {"PerKeyOrder"}
    assert not violated(segment(*rows, rules={"order": "none"}))


def test_an_ordered_run_counts_messages_ended_by_an_unordered_run() -> None:
    first = segment(delivered(1), delivered(2), started(2), ended(2), end=None, rules={"order": "none"})
    both = segment(handled(1), handled(2), start=200.0, pid=2)
    assert not violated(first, both)
    assert violated(first, segment(handled(3), start=200.0, pid=2)) == {"PerKeyOrder"}


def test_without_order_messages_of_a_key_may_overlap() -> None:
    rows = [delivered(1), delivered(2), started(1), started(2), ended(1), ended(2), ack(1), ack(2)]
    assert "NoOverlap" in violated(segment(*rows))
    none = {"order": "none"}
    assert not violated(segment(*rows, rules=none))
    # A message never runs beside itself, in any process.
    one, two = segment(*rows, rules=none), segment(*rows, rules=none, member="m-2", start=100.0005)
    assert violated(one, two) == {"NoOverlap"}
    assert violated(segment(delivered(1), started(1), started(1), rules=none)) == {"NoOverlap"}


@pytest.mark.parametrize(("begins", "excused"), [(100.0, True), (130.9, True), (131.5, False)])
def test_a_process_frozen_in_the_grace_is_excused_for_earlier_starts(begins: float, excused: bool) -> None:
    first = [owned("assigned"), delivered(1), *at(101.0, owned("revoking")), *at(begins, started(1))]
    first = sorted(first, key=lambda row: row.get("mono", 0.0))
    drained = at(133.0, owned("drained"), owned("revoked"))
    one = segment(first, drained, *at(135.0, ended(1), message("zombie", 1)), end=None)
    two = segment(*at(134.0, handled(1)), member="m-2", pid=2, start=133.5, end=None)
    (usual,) = check(parsed(one, two), [NoOverlap])
    (late,) = check(parsed(one, two), [partial(NoOverlap, late=True)])
    assert usual.status == "violated"
    assert late.status == ("passed" if excused else "violated")


def test_a_frozen_process_is_not_excused_before_its_drain_ends() -> None:
    one = segment(owned("assigned"), delivered(1), started(1), owned("revoking"), at(109.0, ended(1)), end=None)
    two = segment(*at(105.0, handled(1)), member="m-2", pid=2, start=104.0, end=None)
    (late,) = check(parsed(one, two), [partial(NoOverlap, late=True)])
    assert late.status == "violated"


@pytest.mark.parametrize(("lanes", "status"), [(0, "violated"), (2, "passed")])
def test_keys_of_folded_lanes_are_not_measured(lanes: int, status: str) -> None:
    rows = segment(delivered(0, "a"), *TURNS, started(0, "a"), max_in_flight=3, rules={"lanes": lanes})
    assert judged(LaneProgress, rows).status == status
