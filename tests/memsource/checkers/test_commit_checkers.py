"""The checkers judge sources that commit floors correctly at gaps, crashes, retries and handovers."""

from __future__ import annotations

from typing import Any

import pytest

from memsource import check, counts
from tests.memsource.checkers.rows import (
    PROMISES,
    Fields,
    Rows,
    delivered,
    ended,
    message,
    owned,
    parsed,
    produced,
    redelivered,
    segment,
    started,
    unproven,
    verdicts,
    violated,
)


def assigned(floor: int = 0, **more: object) -> Fields:
    return owned("assigned", incarnation="", floor=floor, **more)


def sent(floor: int, completed: int = 0, **more: object) -> Fields:
    return owned("commit_sent", floor=floor, completed=completed, **more)


def ran(position: int, key: str | None = "k", **more: Any) -> Rows:
    return [started(position, key, **more), ended(position, key, **more)]


def handled(position: int, key: str | None = "k", **more: Any) -> Rows:
    return [delivered(position, key, **more), *ran(position, key, **more)]


PAST = {"NoCommitPastUnfinished", "NoSettleBeforeEnd"}


class TestNoCommitPastUnfinished:
    def test_the_message_at_the_committed_position_is_not_settled(self) -> None:
        run = [assigned(), *handled(3), delivered(4)]
        assert not violated(segment(*run, sent(4)))
        assert violated(segment(*run, sent(5))) == {"AtLeastOnce", *PAST}

    def test_the_completed_set_does_not_raise_the_floor(self) -> None:
        run = segment(assigned(), delivered(1, "a"), handled(2, "b"), sent(1, 1), ran(1, "a"), sent(3))
        assert {verdict.status for verdict in check(parsed(run), PROMISES)} == {"passed"}
        assert verdicts(run)["NoCommitPastUnfinished"].checked == 2
        assert counts(parsed(run)).messages == 2

    def test_a_witness_names_the_message_and_the_commit(self) -> None:
        run = segment(assigned(), delivered(1), delivered(2), sent(3), ran(1), ran(2))
        verdict = verdicts(run)["NoCommitPastUnfinished"]
        assert verdict.violations == 2
        assert verdict.witnesses[0] == (
            f"S/0 position 1 key {delivered(1)['key']}, m-1 pid 1 row 5: "
            "a position above it was committed before it had finished"
        )

    def test_a_repeated_commit_is_one_violation(self) -> None:
        run = segment(assigned(), delivered(1), sent(2), owned("commit_failed", floor=2), sent(2), ran(1), sent(2))
        assert verdicts(run)["NoCommitPastUnfinished"].violations == 1

    def test_a_failed_a_held_and_an_unconfirmed_message_are_unfinished(self) -> None:
        failed = [assigned(), delivered(1), started(1), ended(1, result="error")]
        assert violated(segment(failed, message("retry", 1, delay=1), sent(2), ran(1))) == PAST
        parking = [*failed, message("dlq_sent", 1)]
        letters = {"DeadLetterBeforeSettle", "NoCommitPastUnfinished"}
        assert violated(segment(parking, sent(2), message("dlq_confirmed", 1))) == letters
        assert not violated(segment(parking, message("dlq_confirmed", 1), sent(2)))

    def test_an_abandoned_message_is_unfinished(self) -> None:
        run = [assigned(), delivered(1), owned("revoking"), message("abandoned", 1)]
        assert violated(segment(run, sent(2))) == {"AtLeastOnce", *PAST}
        assert not violated(segment(run, sent(1)))

    def test_a_message_must_end_in_the_assignment_that_commits_it(self) -> None:
        first = [assigned(), *handled(1), owned("revoked")]
        again = [assigned(0, assignment=2), delivered(1, assignment=2)]
        assert violated(segment(first, again, sent(2, assignment=2))) == PAST
        assert not violated(segment(first, again, ran(1, assignment=2), sent(2, assignment=2)))

    def test_a_message_that_a_predecessor_completed_is_finished(self) -> None:
        first = segment(assigned(), delivered(1, "a"), handled(2, "b"), sent(1, 1), owned("revoked"))
        again = [assigned(1), delivered(1, "a"), delivered(2, "b"), redelivered(2, "settled", "b")]
        second = segment(again, ran(1, "a"), sent(3), start=200.0, pid=2)
        assert not violated(first, second)
        assert {verdict.status for verdict in check(parsed(first, second), PROMISES)} == {"passed"}

    def test_a_result_after_the_loss_of_the_partition_does_not_count(self) -> None:
        run = segment(assigned(), delivered(1), started(1), owned("drained"), ended(1), sent(2), owned("revoked"))
        assert violated(run) == {"AtLeastOnce", *PAST}

    @pytest.mark.parametrize(
        "falls", [[sent(3), sent(2)], [sent(1)], [sent(3), sent(3), sent(4), sent(3)], [sent(5), sent(3), sent(4)]]
    )
    def test_a_falling_committed_position_is_a_violation(self, falls: Rows) -> None:
        verdict = verdicts(segment(assigned(2), falls))["CommitsRise"]
        assert (verdict.status, verdict.violations) == ("violated", 1)
        assert "the floor fell from" in verdict.witnesses[0]

    def test_another_assignment_has_its_own_floors(self) -> None:
        first = [assigned(5), sent(9), owned("lost")]
        assert not violated(segment(first, assigned(5, assignment=2), sent(6, assignment=2)))

    @pytest.mark.parametrize("over", ["lost", "revoked"])
    def test_a_commit_after_the_revocation_is_a_violation(self, over: str) -> None:
        run = segment(assigned(), handled(1), owned("drained"), sent(2), owned(over), owned("commit_ok", floor=2))
        assert not violated(run)
        late = segment(assigned(), handled(1), owned("drained"), owned(over), sent(2))
        assert violated(late) == {"NoCommitAfterRevoke"}
        assert verdicts(late)["NoCommitAfterRevoke"].witnesses[0].endswith(f"assignment was {over}")

    def test_any_message_may_have_finished_in_a_gap_of_the_history(self) -> None:
        run = segment(assigned(), delivered(1), started(1), ended(1), sent(2))
        del run[4]
        assert not violated(run)
        assert unproven(run) >= PAST

    def test_a_message_delivered_after_a_gap_did_not_finish_in_it(self) -> None:
        run = segment(assigned(), delivered(7, "x"), delivered(8, "x"), delivered(9), sent(10))
        del run[2]
        assert violated(run) == PAST

    def test_without_its_beginning_an_assignment_still_commits(self) -> None:
        run = segment(assigned(), handled(1), delivered(2), sent(3))
        del run[1]
        assert violated(run) == PAST


class TestAtLeastOnce:
    def test_a_floor_settles_the_messages_below_it(self) -> None:
        run = segment(assigned(), handled(1), delivered(2), sent(3))
        verdict = verdicts(run)["AtLeastOnce"]
        assert (verdict.status, verdict.violations) == ("violated", 1)
        assert f"S/0 position 2 key {delivered(2)['key']}, m-1 pid 1 row 7: settled" in verdict.witnesses[0]

    def test_an_undelivered_message_below_a_commit_is_lost(self) -> None:
        producer = segment(*[produced(position) for position in (1, 2, 3)], member="producer")
        one = [assigned(1), *handled(1), *handled(3)]
        verdict = verdicts(producer, segment(one, sent(4), start=200.0))["AtLeastOnce"]
        assert (verdict.status, verdict.violations) == ("violated", 1)
        assert "S/0 position 2 key none, m-1 pid 1 row 9: settled, and never handled" in verdict.witnesses[0]
        # Positions below the begin belong to an earlier owner, positions from the floor on to a later owner.
        for begun, floor in ((3, 4), (1, 2)):
            run = segment(assigned(begun), handled(1, "a"), handled(3, "b"), sent(floor), start=200.0)
            assert verdicts(producer, run)["AtLeastOnce"].status == "unproven"

    def test_a_completed_message_that_never_ran_is_lost(self) -> None:
        run = segment(assigned(), delivered(1), redelivered(1, "settled"))
        assert violated(run) == {"AtLeastOnce"}

    def test_a_gap_in_a_history_may_hide_the_end_of_a_handler(self) -> None:
        producer = segment(produced(1), produced(2), member="producer")
        run = segment(assigned(), handled(1), handled(2), sent(3), start=200.0)
        del run[4]
        verdict = verdicts(producer, run)["AtLeastOnce"]
        assert verdict.status == "unproven"
        assert "1 messages were settled, and handled at most in a gap" in verdict.reasons

    def test_a_commit_that_failed_may_have_been_made(self) -> None:
        run = segment(assigned(), delivered(1), sent(2), owned("commit_failed", floor=2))
        assert "AtLeastOnce" in violated(run)


class TestBoundedInFlight:
    LATER = (assigned(partition="S/1"), delivered(9, "z", partition="S/1"))

    @pytest.mark.parametrize(
        "leaves",
        [
            [started(1), ended(1)],
            [started(1), ended(1, result="error"), message("dlq_sent", 1), message("dlq_confirmed", 1)],
            [redelivered(1, "settled")],
        ],
    )
    def test_a_finished_message_leaves_room_for_another_one(self, leaves: Rows) -> None:
        before = [assigned(), delivered(1)]
        assert "BoundedInFlight" not in violated(segment(before, leaves, *self.LATER, max_in_flight=1))
        assert "BoundedInFlight" in violated(segment(before, *self.LATER, leaves, max_in_flight=1))

    def test_a_finished_message_of_a_source_that_acknowledges_stays_in_flight_until_its_settlement(self) -> None:
        run = segment(owned("assigned", incarnation=""), handled(1), delivered(2, "b"), max_in_flight=1)
        assert violated(run) == {"BoundedInFlight"}

    def test_a_message_that_waits_for_admission_is_in_flight(self) -> None:
        waited = [assigned(), delivered(1, "a"), delivered(2, "b"), started(1, "a"), redelivered(2, "settled", "b")]
        for more, status in (([delivered(3, "c")], "passed"), ([delivered(3, "c"), delivered(4, "d")], "violated")):
            verdict = verdicts(segment(waited, more, max_in_flight=2))["BoundedInFlight"]
            assert (verdict.status, verdict.note) == (status, f"peak {len(more) + 1} of 2")


@pytest.mark.parametrize(
    "row",
    [
        sent(-1),
        sent(2**64),
        sent(1, -1),
        {**sent(1), "completed": None},
        {**sent(1), "assignment": 1.0},
        {**owned("commit_ok"), "floor": "1"},
        owned("commit_failed"),
        assigned(-1),
    ],
)
def test_an_impossible_row_is_a_gap(row: Fields) -> None:
    (one,) = parsed(segment(row, delivered(1)))
    assert [each.event for each in one.rows] == ["begin", "gap", "delivered", "end"]
