"""Each checker passes a history that keeps its promise, convicts a broken one, and proves nothing without the rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from memsource import CHECKERS, check
from memsource.checkers import (
    MARGIN,
    CommitsInTime,
    DrainInTime,
    ExclusiveOwner,
    KeptWorkGoesOn,
    NoDuplicateCleanly,
    OneTerminalOutcome,
    OrderAcrossAssignments,
    PerKeyOrder,
    checkers_within,
)
from tests.memsource.checkers.cases import CLOSES, COMMITS, Case, Part
from tests.memsource.checkers.commit_cases import BOUNDED, COMMITTING, DRAINING
from tests.memsource.checkers.message_cases import LANES, OUTCOMES
from tests.memsource.checkers.owner_cases import OWNING
from tests.memsource.checkers.rows import (
    PROMISES,
    assigned,
    at,
    confirmed,
    delivered,
    ended,
    judged,
    message,
    owned,
    parsed,
    ran,
    segment,
    sent,
    started,
)
from tests.memsource.checkers.slot_cases import SLOTS

CASES = [*COMMITTING, *BOUNDED, *DRAINING, *OWNING, *LANES, *OUTCOMES, *SLOTS]
CATALOGUE = Path(__file__).resolve().parents[3] / "docs" / "checkers.md"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kept_promise_passes(case: Case) -> None:
    verdict = judged(case.make, *case.kept())
    assert (verdict.status, verdict.witnesses, verdict.reasons) == ("passed", (), ())
    assert case.checked is None or verdict.checked == case.checked


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_promise_is_a_violation(case: Case) -> None:
    verdict = judged(case.make, *case.broken())
    assert (verdict.status, verdict.violations) == ("violated", case.violations), verdict
    assert verdict.witnesses[0].endswith(f": {case.witness}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_missing_row_leaves_a_promise_unproven(case: Case) -> None:
    for index in range(len(case.kept()[0]) - 1):
        segments = case.kept()
        del segments[0][index]
        verdict = judged(case.make, *segments)
        assert verdict.status == "unproven", (index, verdict)
        assert any(reason.startswith("gap in the history") for reason in verdict.reasons)


@pytest.mark.parametrize("case", [case for case in CASES if case.asks], ids=str)
def test_a_history_without_its_settings_proves_nothing(case: Case) -> None:
    kept, broken = judged(case.make, *case.kept(said=False)), judged(case.make, *case.broken(said=False))
    assert kept.status != "violated"
    reason = f"segments whose begin row lacks {case.asks}"
    # A checker may convict if the setting does not matter.
    assert any(one.endswith(reason) for verdict in (kept, broken) for one in verdict.reasons)


def test_every_checker_has_its_cases() -> None:
    cases = Counter(case.make for case in CASES)
    assert set(cases) | set(PROMISES) == set(CHECKERS)


def test_the_catalogue_names_every_checker_and_every_invariant() -> None:
    rows = [line.split("|")[1:3] for line in CATALOGUE.read_text().splitlines() if re.match(r"\| *\d", line)]
    numbers = [int(number) for cell, _ in rows for number in re.findall(r"\d+", cell)]
    assert numbers == list(range(1, 70)), "each invariant once, in order"
    named = {name for _, cell in rows for name in re.findall(r"`([A-Z]\w+)`", cell)}
    assert named == {make.name for make in CHECKERS}  # type: ignore[attr-defined]


def test_a_deadline_missed_in_a_silent_process_is_unproven() -> None:
    rows: list[Part] = [assigned(), delivered(0), ran(0), at(150.0, sent(1), {"event": "end", "reason": "drained"})]
    verdict = judged(CommitsInTime, segment(*rows, rules=COMMITS, end=None))
    assert verdict.status == "unproven"
    assert verdict.reasons[0].startswith("1 deadlines passed while the process wrote nothing")


def test_a_margin_allows_a_delay() -> None:
    def status(late: float, margin: float) -> str:
        drain: list[Part] = [
            owned("revoking", timeout=1.0),
            at(102.0, delivered(1)),
            at(103.002 + late, owned("drained")),
        ]
        rows = parsed(segment(*drain, end=None))
        return next(one.status for one in check(rows, checkers_within(margin)) if one.name == DrainInTime.name)

    assert (status(0.1, 0.2), status(0.3, 0.2)) == ("passed", "unproven")
    assert (status(MARGIN - 0.1, MARGIN), status(MARGIN + 0.1, MARGIN)) == ("passed", "unproven")


def test_only_the_end_of_the_run_cancels_handlers_of_kept_partitions() -> None:
    run = [delivered(0), started(0), ended(0, result="cancelled")]
    assert judged(KeptWorkGoesOn, segment(*run)).status == "passed"
    assert judged(KeptWorkGoesOn, segment(*run, delivered(1))).status == "violated"
    assert judged(KeptWorkGoesOn, segment(*run, delivered(1), rules={"batch": 9})).status == "passed"


def test_a_handler_that_a_freeze_kept_from_its_call_is_recalled() -> None:
    def status(begun: float, silent: float, recalled: float) -> str:
        run = [
            *at(begun, delivered(0), started(0)),
            *at(silent, delivered(2), started(2)),
            *at(recalled, ended(0, result="cancelled"), delivered(1)),
        ]
        return judged(KeptWorkGoesOn, segment(*run)).status

    assert status(102.0, 102.1, 107.0) == "passed"
    assert status(102.0, 102.1, 102.6) == "violated"
    assert status(102.0, 103.0, 107.0) == "violated"


def test_a_process_that_wakes_from_a_freeze_may_write_other_rows_before_the_recalled_handler() -> None:
    def status(woken: float, recalled: float) -> str:
        run = [
            *at(102.0, delivered(0), started(0)),
            *at(woken, delivered(2)),
            *at(recalled, ended(0, result="cancelled"), delivered(1)),
        ]
        return judged(KeptWorkGoesOn, segment(*run)).status

    assert status(107.0, 107.0) == status(107.0, 107.2) == "passed"
    assert status(107.0, 107.5) == status(102.5, 102.6) == "violated"


def test_a_deleted_message_may_be_seen_late_but_must_not_start_late() -> None:
    first = segment(assigned(), at(101.0, delivered(5), ran(5)), end=None)
    other: list[Part] = [assigned(), at(102.0, delivered(1))]

    def status(*rows: Part, deleted: Collection[tuple[str, int]] = ()) -> str:
        second = segment(*other, *rows, start=100.5, pid=2, end=None)
        return judged(lambda timeline: PerKeyOrder(timeline, deleted=deleted), first, second).status

    of_first = delivered(1)["partition"]
    assert status() == "violated"
    assert status(deleted={(of_first, 1)}) == "passed"
    assert status(at(103.0, ran(1)), deleted={(of_first, 1)}) == "violated"


def test_a_process_that_lost_a_partition_is_not_its_owner() -> None:
    first: list[Part] = [assigned(), at(103.0, ran(0), owned("revoking"), owned("drained"), owned("revoked"))]
    for lost, status in (([], "violated"), ([owned("lost")], "passed")):
        second = segment(assigned(), *at(102.0, *lost), start=100.5, pid=2, end=None)
        assert judged(ExclusiveOwner, segment(*first, end=None), second).status == status


def test_processes_may_share_a_partition_if_a_setting_allows_it() -> None:
    first: list[Part] = [assigned(), at(103.0, ran(0), owned("revoking"), owned("drained"), owned("revoked"))]
    # None: a history from before this setting does not have the setting.
    for sharing in (None, {"exclusive": True}, {"exclusive": False}):
        for other in ({}, {"exclusive": False}):
            second = segment(assigned(), start=100.5, pid=2, end=None, rules=other)
            shared = {"exclusive": False} in (sharing, other)
            verdict = judged(ExclusiveOwner, segment(*first, end=None, rules=sharing), second)
            assert verdict.status == ("passed" if shared else "violated")
    twice = segment(assigned(), assigned(assignment=2), rules={"exclusive": False})
    assert judged(ExclusiveOwner, twice).status == "violated"


def test_rows_of_one_moment_have_no_order() -> None:
    rows: list[Part] = [assigned(), at(101.0, ran(0), owned("revoking"), owned("drained"), owned("revoked"))]
    for begun, status in ((101.0, "passed"), (100.9, "violated")):
        other = segment(*at(begun, assigned()), start=begun - 0.5, member="a", pid=2, end=None)
        assert judged(ExclusiveOwner, segment(*rows, end=None), other).status == status


def test_a_zombie_that_holds_its_lane_keeps_the_prefix_open() -> None:
    zombie = [assigned(), delivered(3), started(3), owned("lost")]
    run = [assigned(assignment=2), delivered(0, assignment=2), delivered(1, "b", assignment=2)]
    run += [*ran(1, "b", assignment=2), sent(0, assignment=2), confirmed(0, assignment=2)]
    over = [owned(event, assignment=2) for event in ("revoking", "drained", "revoked")]
    again = segment(assigned(), delivered(0), delivered(1, "b"), ran(1, "b"), start=200.0, pid=2)
    assert judged(NoDuplicateCleanly, segment(zombie, run, over, rules=CLOSES), again).status == "passed"
    assert judged(NoDuplicateCleanly, segment(run, over, rules=CLOSES), again).status == "violated"


def test_a_drain_without_time_to_start_a_message_leaves_the_prefix_open() -> None:
    # A drain soon after a start follows no freeze.
    begun = at(109.5, assigned(), delivered(0, "a"), delivered(1, "b"), ran(1, "b"), sent(0), confirmed(0))
    again = segment(assigned(), delivered(0, "a"), delivered(1, "b"), ran(1, "b"), start=200.0, pid=2)
    left, over = message("abandoned", 0, "a"), [owned("drained"), owned("revoked")]

    def status(*drain: Part) -> str:
        return judged(
            NoDuplicateCleanly, segment(*begun, *drain, at(120.0, over), rules=CLOSES, end=None), again
        ).status

    long, short = at(110.0, owned("revoking", timeout=10.0)), at(110.0, owned("revoking", timeout=5.0))
    assert status(long, at(112.0, left)) == "violated"
    assert status(long, at(120.0, left)) == "passed"
    assert status(short, at(115.0, left)) == "passed"
    # The drain was shortened.
    assert status(long, at(111.0, owned("hastened", timeout=1.0)), at(112.0, left)) == "passed"


@pytest.mark.parametrize(("took", "status"), [(4.0, "violated"), (4.99999, "passed"), (5.0, "passed")])
def test_a_handover_after_a_settle_timeout_is_not_clean(took: float, status: str) -> None:
    rows: list[Part] = [assigned(None), delivered(0), ran(0), owned("revoking"), at(110.0, owned("drained"))]
    # The wait by the clock of the loop differs a little from that by the clock of the rows.
    verdict = judged(NoDuplicateCleanly, segment(*rows, at(110.0 + took, owned("revoked")), end=None))
    assert verdict.status == status


def test_messages_that_would_close_the_prefix_are_abandoned_at_the_deadline() -> None:
    rows: list[Part] = [assigned(), delivered(0, "a"), delivered(1, "b"), ran(1, "b"), owned("revoking")]
    over = [owned("drained"), owned("revoked")]
    assert (
        judged(OneTerminalOutcome, segment(*rows, message("abandoned", 0, "a"), over, rules=CLOSES)).status == "passed"
    )
    assert judged(OneTerminalOutcome, segment(*rows, over, rules=CLOSES)).status == "violated"


def test_an_assignment_at_an_uncommitted_position_is_unproven() -> None:
    first = segment(assigned(), delivered(0), ran(0), sent(1), owned("lost"))
    assert judged(OrderAcrossAssignments, first, segment(assigned(1), start=200.0, pid=2)).status == "passed"
    verdict = judged(OrderAcrossAssignments, first, segment(assigned(7), start=200.0, pid=2))
    assert verdict.reasons == ("1 assignments began at a position that is not committed in this history",)
