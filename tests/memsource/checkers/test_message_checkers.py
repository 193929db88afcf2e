"""The checkers judge single messages correctly at gaps, crashes, retries, redeliveries and unsynchronized clocks."""

from __future__ import annotations

from functools import partial

import pytest

from memsource import check
from memsource.checkers import PerKeyOrder
from tests.memsource.checkers.rows import (
    Rows,
    ack,
    delivered,
    ended,
    handled,
    judged,
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

DEAD_LETTER = [message("dlq_sent", 1), message("dlq_confirmed", 1)]


def failed(position: int, key: str | None = "k", **more: object) -> Rows:
    return [started(position, key, **more), ended(position, key, "error", **more)]


class TestPerKeyOrder:
    def test_other_keys_and_keyless_messages_have_their_own_order(self) -> None:
        run = segment(
            [delivered(position, key) for position, key in ((1, "a"), (2, "b"), (3, None), (4, None))],
            [started(4, None), started(3, None), started(2, "b"), started(1, "a")],
            [ended(4, None), ended(3, None), ended(2, "b"), ended(1, "a")],
            [ack(position, key) for position, key in ((1, "a"), (2, "b"), (3, None), (4, None))],
        )
        assert {verdict.status for verdict in check(parsed(run))} == {"passed"}
        assert verdicts(run)["PerKeyOrder"].checked == 2

    def test_a_witness_names_partition_key_member_and_row(self) -> None:
        run = segment(delivered(1), delivered(2), started(2), ended(2), started(1), ended(1), ack(1), ack(2))
        verdict = verdicts(run)["PerKeyOrder"]
        assert (verdict.status, verdict.violations) == ("violated", 2)
        assert verdict.witnesses[0] == (
            "S/0 position 2 key 5cb51da2a8bf2d14, m-1 pid 1 row 4: "
            "started before position 1 of its key had ended for good in the same assignment"
        ).replace("5cb51da2a8bf2d14", delivered(1)["key"])
        assert "started after position 2 of its key (m-1 pid 1 row 4)" in verdict.witnesses[1]

    def test_a_failed_message_must_end_before_the_next_one_of_its_key(self) -> None:
        run = segment(delivered(1), delivered(2), failed(1), started(2), ended(2), started(1), ended(1))
        assert violated(run) == {"PerKeyOrder"}

    def test_a_confirmed_dead_letter_is_an_end(self) -> None:
        sent = segment(delivered(1), failed(1), message("dlq_sent", 1), handled(2), message("dlq_confirmed", 1))
        assert violated(sent) == {"PerKeyOrder"}
        confirmed = segment(delivered(1), failed(1), DEAD_LETTER, ack(1), handled(2))
        assert not violated(confirmed)

    def test_a_finished_message_does_not_run_again_in_its_assignment(self) -> None:
        assert violated(segment(handled(1), started(1), ended(1))) == {"PerKeyOrder"}

    def test_a_replay_may_repeat_and_has_its_own_order(self) -> None:
        crashed = segment(handled(1), handled(2), delivered(3), started(3), end=None)
        replay = [handled(position, assignment=1) for position in (1, 2, 3)]
        assert not violated(crashed, segment(*replay, start=200.0, pid=2))
        replay.reverse()
        assert "PerKeyOrder" in violated(crashed, segment(*replay, start=200.0, pid=2))

    def test_a_repeated_message_that_the_broker_delivers_twice_waits_for_the_queue(self) -> None:
        handled_before = segment(handled(1), end=None)
        twice = [delivered(1), redelivered(1, "late"), delivered(1), redelivered(1, "held")]
        in_turn = [row for position in (2, 3, 1) for row in (started(position), ended(position))]
        queued = [delivered(2), delivered(3), *twice, *in_turn]
        assert not violated(handled_before, segment(*queued, start=200.0, pid=2))

    def test_a_message_that_arrives_late_is_out_of_order(self) -> None:
        late = [delivered(1), redelivered(1, "late")]
        assert violated(segment(handled(2), late)) == {"PerKeyOrder"}
        assert violated(segment(handled(2), late, started(1), ended(1), ack(1))) == {"PerKeyOrder"}
        in_time = segment(delivered(2), late, started(1), ended(1), started(2), ended(2), ack(1), ack(2))
        assert not violated(in_time)

    def test_a_late_repeat_of_an_ended_message_is_counted(self) -> None:
        late = [delivered(1), redelivered(1, "late")]
        again = [started(1), ended(1), ack(1)]
        verdict = verdicts(segment(handled(1), handled(2), late, again, handled(3)))["PerKeyOrder"]
        assert (verdict.status, verdict.note) == ("passed", "1 late repeats")
        # The message is in its lane again, so no message of the key overtakes it.
        overtaken = segment(handled(1), handled(2), late, handled(3), again)
        assert violated(overtaken) == {"PerKeyOrder"}

    def test_a_retry_goes_before_a_late_repeat(self) -> None:
        late = [delivered(1), redelivered(1, "late")]
        run = segment(handled(1), delivered(2), failed(2), late, started(2), ended(2), started(1), ended(1))
        assert not violated(run)

    def test_queued_messages_start_before_a_late_repeat(self) -> None:
        late = [delivered(1), redelivered(1, "late")]
        queued = [started(3), ended(3), ack(3)]
        again = [started(1), ended(1), ack(1)]
        verdict = verdicts(segment(handled(1), handled(2), delivered(3), late, queued, again))["PerKeyOrder"]
        assert (verdict.status, verdict.note) == ("passed", "1 late repeats")

    def test_a_late_repeat_may_have_ended_in_a_gap(self) -> None:
        late = [delivered(1), redelivered(1, "late"), started(1), ended(1), ack(1)]
        run = segment(handled(1), handled(2), late)
        del run[1:5]
        assert not violated(run)

    def test_a_skipped_produced_message_is_out_of_order(self) -> None:
        producer = segment(produced(1), produced(2), member="producer")
        assert violated(producer, segment(handled(2), start=200.0)) == {"PerKeyOrder"}
        # A producer may record a message after the message is handled.
        late = segment(produced(2), produced(1), member="producer", start=300.0)
        assert not violated(segment(handled(1), handled(2)), late)

    @pytest.mark.parametrize("deleted", [True, False])
    def test_a_former_owner_may_report_a_message_that_the_broker_has_deleted(self, deleted: bool) -> None:
        # The former owner has slept since it fetched the message, and only then learns of its loss.
        frozen = segment(owned("assigned"), delivered(1, t=300.0), owned("lost", t=300.0))
        newer = segment(handled(2), start=200.0, pid=2)
        verdict = judged(partial(PerKeyOrder, deleted=[("S/0", 1)] if deleted else []), frozen, newer)
        assert verdict.status == ("passed" if deleted else "violated")

    def test_an_end_after_the_fence_does_not_count(self) -> None:
        for fence in ("lost", "revoked", "drained"):
            first = segment(owned("assigned"), delivered(1), started(1), owned(fence), ended(1))
            second = segment(handled(2), start=200.0, pid=2)
            assert violated(first, second) == {"PerKeyOrder"}

    def test_the_earlier_message_may_have_ended_in_a_gap(self) -> None:
        run = segment(delivered(1), started(1), ended(1), delivered(2), started(2))
        del run[3]
        assert unproven(run) >= {"PerKeyOrder", "NoOverlap"}
        assert not violated(run)

    def test_a_gap_does_not_excuse_a_violation_before_it(self) -> None:
        run = segment(delivered(1), delivered(2), started(2), ended(2), ack(2), handled(3, "other"))
        del run[-2]
        verdict = verdicts(run)["PerKeyOrder"]
        assert verdict.status == "violated"
        assert verdict.reasons == ("gap in the history: history:10: rows 10…10 are missing",)

    def test_a_gap_does_not_excuse_a_violation_after_it(self) -> None:
        run = segment(
            delivered(9, "x"), delivered(8, "x"), delivered(1), delivered(2), started(2), ended(2), started(1)
        )
        del run[1]
        assert verdicts(run)["PerKeyOrder"].violations == 2

    def test_a_message_may_have_arrived_late_in_a_gap(self) -> None:
        again = [delivered(1), redelivered(1, "late"), started(1), ended(1), ack(1)]
        for hidden in (slice(9, 11), slice(10, 11)):
            run = segment(handled(1), handled(2), again)
            del run[hidden]
            assert not violated(run)


class TestNoOverlap:
    def test_a_handler_ends_with_its_process(self) -> None:
        crashed = segment(delivered(1), started(1), end=None)
        assert not violated(crashed, segment(handled(1), start=200.0, pid=2))

    def test_handlers_of_one_message_at_two_members_overlap(self) -> None:
        one = segment(delivered(1), started(1), ended(1), ack(1))
        two = segment(delivered(1), started(1), ended(1), ack(1), member="m-2", start=100.0005)
        assert violated(one, two) == {"NoOverlap"}

    @pytest.mark.parametrize("event", ["lost", "revoked"])
    def test_only_a_lost_assignment_excuses_its_handlers(self, event: str) -> None:
        one = segment(delivered(1), started(1), message("delivered", 9, "other", size=1), owned(event), ended(1))
        two = segment(delivered(1), started(1), ended(1), ack(1), member="m-2", start=100.0005)
        assert violated(one, two) == (set() if event == "lost" else {"NoOverlap"})

    def test_a_second_handler_that_starts_after_the_loss_is_not_excused(self) -> None:
        owner = segment(delivered(1), started(1), delivered(5), delivered(6), delivered(7), ended(1), end=None)
        late = segment(delivered(1), started(1), owned("lost"), ended(1), member="m-2", start=100.0015)
        assert "NoOverlap" in violated(owner, late)

    def test_a_lane_waits_for_a_lost_handler_of_its_own_process(self) -> None:
        lost = [delivered(1), started(1), owned("lost")]
        again = [delivered(1, assignment=2), started(1, assignment=2), ended(1, assignment=2), ack(1, assignment=2)]
        assert violated(segment(lost, again)) == {"NoOverlap"}
        assert not violated(segment(lost, ended(1), again))
        assert not violated(segment(lost, message("zombie", 1), again))

    def test_a_keyless_message_does_not_run_beside_itself(self) -> None:
        twice = segment(delivered(1, None), started(1, None), started(1, None))
        assert violated(twice) == {"NoOverlap"}
        lost = [delivered(1, None), started(1, None), owned("lost")]
        assert not violated(segment(lost, delivered(1, None, assignment=2), started(1, None, assignment=2)))

    def test_a_gap_may_hide_the_end_or_the_loss(self) -> None:
        run = segment(delivered(1), started(1), ended(1, result="error"), started(1), ended(1))
        del run[3]
        assert not violated(run)
        one = segment(delivered(1), started(1), delivered(5, "x"), owned("lost"), ended(1))
        del one[4]
        two = segment(delivered(1), started(1), ended(1), ack(1), member="m-2", start=100.0005)
        assert not violated(one, two)
        assert "NoOverlap" in unproven(one, two)


class TestAtLeastOnce:
    def test_messages_left_at_the_broker_are_not_proven(self) -> None:
        producer = segment(produced(1, "a"), produced(2, "b"), produced(3, "c"), member="producer")
        run = segment(delivered(1, "a"), delivered(2, "b"), message("abandoned", 2, "b"), start=200.0)
        verdict = verdicts(producer, run)["AtLeastOnce"]
        assert (verdict.status, verdict.checked) == ("unproven", 3)
        assert verdict.reasons == ("3 messages were left at the broker: neither settled nor handled",)

    def test_a_message_handled_in_another_segment_is_handled(self) -> None:
        crashed = segment(delivered(1), started(1), end=None)
        assert verdicts(crashed, segment(handled(1), start=200.0, pid=2))["AtLeastOnce"].status == "passed"

    def test_a_handled_message_without_a_settlement_is_handled(self) -> None:
        assert verdicts(segment(delivered(1), started(1), ended(1)))["AtLeastOnce"].status == "passed"

    def test_a_settled_message_that_was_never_handled_is_lost(self) -> None:
        verdict = verdicts(segment(handled(1), delivered(2), ack(2)))["AtLeastOnce"]
        assert (verdict.status, verdict.violations) == ("violated", 1)
        assert "S/0 position 2" in verdict.witnesses[0]

    def test_a_handler_that_ends_after_the_loss_of_its_partition_does_not_count(self) -> None:
        run = segment(delivered(1), started(1), owned("lost"), ended(1))
        assert "AtLeastOnce" in unproven(run)

    def test_a_gap_in_a_history_may_hide_the_end_of_a_handler(self) -> None:
        run = segment(delivered(1), started(1), ended(1), ack(1))
        del run[3]
        verdict = verdicts(run)["AtLeastOnce"]
        assert verdict.status == "unproven"
        assert "1 messages were settled, and handled at most in a gap" in verdict.reasons


class TestBoundedInFlight:
    def test_exactly_max_in_flight_messages_keep_the_bound(self) -> None:
        run = segment([delivered(position, str(position)) for position in range(5)], max_in_flight=5)
        verdict = verdicts(run)["BoundedInFlight"]
        assert (verdict.status, verdict.note) == ("passed", "peak 5 of 5")

    def test_exceeding_max_in_flight_several_messages_long_is_one_violation(self) -> None:
        run = segment([delivered(position, str(position)) for position in range(8)], max_in_flight=5)
        verdict = verdicts(run)["BoundedInFlight"]
        assert (verdict.status, verdict.violations, verdict.note) == ("violated", 1, "peak 8 of 5")
        assert "8 in flight, max_in_flight is 5" in verdict.witnesses[0]

    def test_a_redelivered_message_counts_once_in_flight(self) -> None:
        held = [delivered(1), delivered(2, "b"), redelivered(1, "held"), redelivered(2, "held", "b")]
        run = segment(handled(3, "c"), delivered(1), delivered(2, "b"), held, max_in_flight=2)
        assert not violated(run)
        settled = [delivered(3, "c"), delivered(4, "d"), redelivered(3, "settled", "c"), ack(3, "c")]
        assert not violated(segment(handled(3, "c"), delivered(1), settled, max_in_flight=2))

    def test_a_message_may_come_several_times_in_one_run(self) -> None:
        twice = [delivered(1), delivered(1), redelivered(1, "held")]
        assert not violated(segment(twice, max_in_flight=1))
        assert violated(segment(delivered(2, "b"), twice, max_in_flight=1)) == {"BoundedInFlight"}
        settled = [delivered(3), delivered(3), redelivered(3, "settled"), redelivered(3, "settled")]
        assert not violated(segment(handled(3), delivered(4, "b"), settled, max_in_flight=1))

    def test_a_redelivery_while_the_settlement_is_under_way_is_not_fresh(self) -> None:
        again = [delivered(3, "c"), redelivered(3, "held", "c")]
        assert not violated(segment(handled(3, "c"), delivered(1), again, max_in_flight=1))

    def test_a_torn_off_redelivery_row_proves_nothing(self) -> None:
        rows = [*handled(3, "c"), delivered(1), delivered(2, "b"), delivered(3, "c")]
        assert not violated(segment(rows, max_in_flight=2, end=None))
        assert violated(segment(rows, max_in_flight=2)) == {"BoundedInFlight"}
        assert violated(segment(rows, started(1), max_in_flight=2, end=None)) == {"BoundedInFlight"}

    @pytest.mark.parametrize(
        "leaves",
        [
            [message("abandoned", 1)],
            [started(1), ended(1, result="cancelled")],
            [owned("revoking"), started(1), ended(1, result="error")],
            [owned("lost")],
            [owned("revoked")],
        ],
    )
    def test_a_message_that_is_settled_or_lost_leaves_room_in_flight(self, leaves: Rows) -> None:
        later = delivered(2, "b", partition="S/1")
        assert not violated(segment(delivered(1), leaves, later, max_in_flight=1))
        assert violated(segment(delivered(1), later, leaves, max_in_flight=1)) == {"BoundedInFlight"}

    def test_a_failed_message_stays_in_flight_until_its_retry(self) -> None:
        run = segment(delivered(1), failed(1), message("retry", 1, delay=1), delivered(2, "b"), max_in_flight=1)
        assert violated(run) == {"BoundedInFlight"}

    def test_any_message_may_have_left_in_a_gap(self) -> None:
        run = segment(delivered(1), delivered(2, "b"), ack(1), delivered(3, "c"), max_in_flight=2)
        del run[3]
        assert not violated(run)
        assert "BoundedInFlight" in unproven(run)

    def test_without_a_begin_row_the_bound_is_unknown(self) -> None:
        run = segment(delivered(1))
        del run[0]
        verdict = verdicts(run)["BoundedInFlight"]
        assert (verdict.status, verdict.note) == ("unproven", "peak 1 of ?")


class TestSettlement:
    def test_an_unconfirmed_dead_letter_is_no_reason_to_settle(self) -> None:
        sent = [delivered(1), *failed(1), message("dlq_sent", 1)]
        early = segment(sent, ack(1), message("dlq_confirmed", 1))
        assert violated(early) == {"DeadLetterBeforeSettle"}
        assert not violated(segment(sent, message("dlq_sent", 1), message("dlq_confirmed", 1), ack(1)))

    def test_a_message_that_waits_for_unblock_is_not_finished(self) -> None:
        archived = [delivered(1), *failed(1), message("dlq_sent", 1), message("archived", 1)]
        assert violated(segment(archived, ack(1))) == {"AtLeastOnce", "NoSettleBeforeEnd"}
        # The message was unblocked and has ended.
        assert not violated(segment(archived, handled(1), ack(1)))
        # The message was parked: its dead letter was written before.
        assert not violated(segment(archived, DEAD_LETTER[1:], ack(1)))
        assert violated(segment(archived, DEAD_LETTER, ack(1))) == {"DeadLetterBeforeSettle"}

    def test_a_gap_may_hide_the_confirmation(self) -> None:
        run = segment(delivered(1), failed(1), DEAD_LETTER, ack(1))
        del run[5]
        assert not violated(run)
        assert "DeadLetterBeforeSettle" in unproven(run)

    def test_a_message_must_end_in_the_assignment_that_settles_it(self) -> None:
        first = [delivered(1), started(1), ended(1), owned("revoked")]
        run = segment(first, delivered(1, assignment=2), ack(1, assignment=2))
        assert violated(run) == {"NoSettleBeforeEnd"}

    def test_a_message_that_is_redelivered_and_settled_again_needs_no_second_run(self) -> None:
        run = segment(handled(1), delivered(1), redelivered(1, "settled"), ack(1), ack(1))
        assert {verdict.status for verdict in check(parsed(run))} == {"passed"}

    def test_a_message_that_came_late_is_to_be_handled_again(self) -> None:
        run = segment(handled(1, None), delivered(1, None), redelivered(1, "late", None), ack(1, None))
        assert violated(run) == {"NoSettleBeforeEnd"}

    def test_a_settlement_of_an_undelivered_message_is_a_violation(self) -> None:
        assert violated(segment(ack(1))) == {"AtLeastOnce", "NoSettleBeforeEnd"}

    def test_a_result_after_the_loss_of_the_partition_settles_nothing(self) -> None:
        run = segment(delivered(1), started(1), owned("lost"), ended(1), message("zombie", 1), ack(1))
        assert violated(run) == {"AtLeastOnce", "NoSettleBeforeEnd"}

    def test_a_message_delivered_after_a_gap_did_not_end_in_the_gap(self) -> None:
        hole = [delivered(7, "x"), delivered(8, "x")]
        fresh = segment(hole, delivered(1), ack(1))
        del fresh[1]
        assert violated(fresh) == {"NoSettleBeforeEnd"}
        held = segment(hole, delivered(1), redelivered(1, "held"), ack(1))
        del held[1]
        assert not violated(held)
        older = segment(delivered(1), hole, ack(1))
        del older[2]
        assert not violated(older)


class TestAcrossSegments:
    BROKEN_ACROSS = (segment(delivered(1), end=None), segment(handled(2), start=200.0, pid=2))

    def test_segments_of_one_boot_are_ordered_by_its_clock(self) -> None:
        first, second = self.BROKEN_ACROSS
        for row in second:
            row["wall"] = 5.0  # the clock was set
        assert violated(first, second) == violated(second, first) == {"PerKeyOrder"}

    @pytest.mark.parametrize("boots", [("a", "b"), ("", ""), ("a", "")])
    def test_segments_of_different_boots_are_ordered_by_the_wall_clock(self, boots: tuple[str, str]) -> None:
        # ``mono`` says the opposite: the second machine started later.
        first = segment(delivered(1), boot=boots[0], start=9000.0, wall=0.0, end=None)
        second = segment(handled(2), boot=boots[1], start=10.0, wall=20000.0, pid=2)
        assert violated(second, first) == {"PerKeyOrder"}
        good = segment(handled(1), handled(2), boot=boots[1], start=10.0, wall=20000.0, pid=2)
        assert not violated(first, good)

    def test_overlapping_segments_of_different_boots_prove_nothing_about_each_other(self) -> None:
        first = segment(delivered(1), started(1), boot="a", start=9000.0, wall=0.0)
        second = segment(handled(1), handled(2), boot="b", start=10.0, wall=8990.001, pid=2)
        assert not violated(first, second)
        assert unproven(first, second) == {"PerKeyOrder", "NoOverlap"}
        verdict = verdicts(first, second)["NoOverlap"]
        assert verdict.reasons == ("S/0 across segments: in overlapping segments of different boots",)

    def test_rows_of_one_segment_still_count_without_an_order(self) -> None:
        first = segment(delivered(1), boot="a", start=9000.0, wall=0.0)
        second = segment(handled(2), started(1), boot="b", start=10.0, wall=8990.001, pid=2)
        assert violated(first, second) == {"PerKeyOrder"}

    def test_other_partitions_and_producers_do_not_affect_the_order_of_segments(self) -> None:
        first = segment(handled(1, partition="S/1"), boot="a", start=9000.0, wall=0.0)
        second = segment(handled(1), boot="b", start=10.0, wall=8990.001, pid=2)
        producer = segment(produced(1), boot="c", start=10.0, wall=8990.001, pid=3)
        assert {verdict.status for verdict in check(parsed(first, second, producer))} == {"passed"}

    def test_a_changed_wall_clock_between_two_boots_proves_no_order(self) -> None:
        # By the wall clocks of the rows c comes after b; by the clock of a's boot, which c shares, before.
        a = segment(delivered(9, "x", partition="S/1"), boot="a", start=10.0, wall=1000.0, end=None)
        c = segment(handled(2), boot="a", start=20.0, wall=9000.0, pid=3)
        b = segment(handled(1), boot="b", start=10.0, wall=5000.0, pid=2)
        assert unproven(a, b, c) >= {"PerKeyOrder", "NoOverlap"}

    def test_a_recreated_stream_has_other_messages(self) -> None:
        first = segment(owned("assigned", incarnation="i-1"), delivered(1))
        second = segment(owned("assigned", incarnation="i-2"), handled(2), start=200.0, pid=2)
        assert not violated(first, second)
        verdict = verdicts(first, second)["PerKeyOrder"]
        assert "S/0 across segments: recreated: its positions started again" in verdict.reasons
        assert "AtLeastOnce" in unproven(first, second)
        second[1]["incarnation"] = "i-1"
        assert violated(first, second) == {"PerKeyOrder"}

    def test_a_lost_beginning_leaves_the_order_across_assignments_unproven(self) -> None:
        first, second = self.BROKEN_ACROSS
        headless = segment(handled(9, "z"), member="m-3", start=300.0)[1:]
        assert not violated(first, second, headless)
        assert "PerKeyOrder" in unproven(first, second, headless)

    def test_a_clock_reading_older_than_the_row_before_changes_nothing(self) -> None:
        run = segment(handled(1), handled(2))
        run[4]["mono"] -= 50.0
        assert {verdict.status for verdict in check(parsed(run))} == {"passed"}
