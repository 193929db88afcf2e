"""For each place that looks at state before an await and relies on it after the await: the test, or the reason."""

from __future__ import annotations

from typing import Final

from tests.project.await_points import Harmless, Shown

_KAFKA: Final = Shown("tests/simulated/test_kafka.py::test_no_schedule_of_the_kafka_adapter_breaks_a_promise")
_ASKED_AGAIN: Final = Harmless("each pass of the loop looks again")
_SENT_OR_NOT: Final = Harmless(
    "a connection may end at any time, so the client reports the failure of each send; the check saves sends only"
)

_PARTED: Final = Shown("tests/postgres/ring/test_moves.py::test_moves_and_splits_lose_and_repeat_nothing")

# The store compares the epoch of each position.
_FENCED: Final = Shown("tests/postgres/log/test_subscriptions.py::test_lost_lock_fences_late_store")

TABLE: Final[dict[str, Shown | Harmless]] = {
    # --- lanes/cohort
    "lanes/cohort/keeper.py::LeaseKeeper.serve::idle": _ASKED_AGAIN,
    # ``_planned`` looks at the flag again.
    "lanes/cohort/membership.py::Membership._attend::stopping": Shown(
        "tests/cohort/test_cohort_members.py::test_a_member_that_stops_during_its_join_or_an_acquisition_still_leaves_in_order"
    ),
    "lanes/cohort/owned.py::OwnedPartitions.release::of": Shown(
        "tests/cohort/test_owned_partitions.py::test_a_loss_during_a_release_fails_the_release_and_is_reported_after_it"
    ),
    "lanes/cohort/owned.py::OwnedPartitions.release::unended": Harmless(
        "no handler of a drained partition starts, so a later value is at most better: the lease expires without need"
    ),
    # The plan is written on the condition of the revision that was read first.
    "lanes/cohort/roster.py::Roster.look::plan": Shown(
        "tests/cohort/test_cohort_members.py::test_a_plan_from_old_heartbeats_does_not_replace_a_newer_plan"
    ),
    # --- lanes/ownership
    "lanes/ownership/lease_locks.py::LeaseLocks._free::deadline": _ASKED_AGAIN,
    # --- lanes/runtime, lanes/workers
    "lanes/runtime/dead_lettering.py::DeadLetterWriter.write::deadline": Shown(
        "tests/runtime/test_leases.py::test_no_dead_letter_is_written_after_the_deadline"
    ),
    "lanes/runtime/dead_lettering.py::DeadLetterWriter.write::failure": Harmless(
        "the failure of a message that is given up does not change"
    ),
    # Each pass looks at the phase, and a loss ends the drain in any phase.
    "lanes/runtime/handover.py::Handover.drain::phase": Shown(
        "tests/runtime/test_release.py::test_a_loss_during_a_release_is_no_handover"
    ),
    # A drain or a loss ends the parting, and each of them hands the parts over or lets their drains end.
    "lanes/runtime/handover.py::Handover.hand_over::draining": _PARTED,
    "lanes/runtime/handover.py::Handover.hand_over::live": _PARTED,
    # A settlement of a partition that was given up meanwhile is dropped before it is sent.
    "lanes/runtime/settle.py::Settler.settle_finished::draining": _ASKED_AGAIN,
    "lanes/runtime/settle.py::Settler.settle_finished::owns": _ASKED_AGAIN,
    "lanes/runtime/lifecycle.py::Lifecycle.until_ready::ended": _ASKED_AGAIN,
    "lanes/workers/pool.py::Pool._join::ended": Shown(
        "tests/workers/test_thread_ends.py::test_a_message_taken_by_a_thread_during_the_end_is_not_begun"
    ),
    "lanes/workers/tasks.py::TaskWorkers._work_until_cancelled::deadline": Shown(
        "tests/runtime/test_leases.py::test_no_handler_starts_if_the_lease_ends_while_its_row_is_written"
    ),
    # --- lanes_jetstream, cohorts
    "adapters/lanes_jetstream/cohort/source.py::CohortSource._acknowledge_again::by_number": Shown(
        "tests/jetstream/cohort/test_deliveries.py::test_a_redelivery_is_acknowledged_only_before_the_deadline_of_its_partition"
    ),
    "adapters/lanes_jetstream/cohort/source.py::CohortSource._until_joined::joined": Harmless(
        "the event of the join is set once and never cleared"
    ),
    "adapters/lanes_jetstream/cohort/source.py::CohortSource.settle::is_connected": _SENT_OR_NOT,
    "adapters/lanes_jetstream/cohort/view.py::CohortView.status::plan": Harmless(
        "a status for people, whose docstring says that its parts are of different times"
    ),
    "adapters/lanes_jetstream/cohort/watch.py::CohortWatch._check::by_number": Harmless(
        "a partition that is over has no pulls, so it is not asked; dropped messages are a fact of the stream"
    ),
    "adapters/lanes_jetstream/cohort/watch.py::CohortWatch._check_partition::pulls": Harmless(
        "the answer counts only if the partition still pulls from the same durable"
    ),
    "adapters/lanes_jetstream/cohort/watch.py::CohortWatch._resolve::by_number": Shown(
        "tests/jetstream/cohort/test_watch.py::test_a_late_answer_about_a_former_ownership_changes_nothing"
    ),
    "adapters/lanes_jetstream/cohort/watch.py::CohortWatch._run::failure": _ASKED_AGAIN,
    "adapters/lanes_jetstream/queue_survey.py::StreamQueues._survey::of": Harmless(
        "a survey for people; a removal asks again after the subjects are gone"
    ),
    # --- lanes_jetstream, durables
    "adapters/lanes_jetstream/durable/queue.py::QueueSource._pull::pulls": Harmless(
        "a message that arrives during the request is reserved before and after"
    ),
    "adapters/lanes_jetstream/durable/queue.py::QueueSource.receive::assigned": Harmless(
        "only this method sets the flag, and receive has one caller at a time"
    ),
    "adapters/lanes_jetstream/durable/source.py::DurableSource._failure::failure": Harmless(
        "a failure is set once, and the first failure ends the source"
    ),
    "adapters/lanes_jetstream/durable/source.py::DurableSource.receive::assigned": Harmless(
        "only this method sets the flag, and receive has one caller at a time"
    ),
    "adapters/lanes_jetstream/durable/source.py::DurableSource.receive::draining": Shown(
        "tests/jetstream/durable/test_shared.py::test_messages_that_arrive_at_the_stop_go_back_at_once"
    ),
    "adapters/lanes_jetstream/durable/source.py::DurableSource.receive::paused": Shown(
        "tests/jetstream/durable/test_shared.py::test_messages_that_arrive_at_the_pause_go_back_at_once"
    ),
    "adapters/lanes_jetstream/durable/source.py::DurableSource.receive::pulls": Shown(
        "tests/jetstream/durable/test_reconnect.py::test_a_reset_connection_loses_nothing"
    ),
    "adapters/lanes_jetstream/durable/source.py::DurableSource.receive::taken_over": Shown(
        "tests/jetstream/durable/test_takeover.py::test_a_cancelled_receive_repeats_the_takeover"
    ),
    "adapters/lanes_jetstream/durable/watch.py::DurableWatch._run::failure": _ASKED_AGAIN,
    # --- lanes_jetstream, wire
    "adapters/lanes_jetstream/wire/acks.py::give_back::is_connected": _SENT_OR_NOT,
    "adapters/lanes_jetstream/wire/acks.py::keep_alive::is_connected": _SENT_OR_NOT,
    "adapters/lanes_jetstream/wire/connection.py::Connection.api::is_connected": Harmless(
        "a creation may take effect late, as any request without an answer may; the lease machine verifies its lease "
        "after each creation and deletes lower durables"
    ),
    "adapters/lanes_jetstream/wire/queue_watch.py::QueueWatch._look::of": Harmless(
        "a look judges the subjects of its first answer; a finding counts from the second look on"
    ),
    # --- lanes_kafka: a call of ``consume`` runs the callbacks of rebalances
    "adapters/lanes_kafka/client/intake.py::Intake._consume::rebalances": _KAFKA,
    "adapters/lanes_kafka/client/intake.py::Intake.read_past::assignment": Shown(
        "tests/kafka/test_rebalance_callbacks.py::test_a_revoke_does_not_wait_for_a_release_around_it"
    ),
    "adapters/lanes_kafka/client/thread.py::ClientThread._turn::closing": Shown(
        "tests/kafka/test_shutdown.py::test_a_close_during_a_poll_is_served_at_once"
    ),
    "adapters/lanes_kafka/client/last_callbacks.py::serve_last_callbacks::rebalances": Shown(
        "tests/kafka/test_shutdown.py::test_a_queued_rebalance_is_served_before_the_client_closes"
    ),
    "adapters/lanes_kafka/source.py::KafkaSource.receive::failure": _ASKED_AGAIN,
    # After the answer, the position counts only for a partition that is still owned.
    "adapters/lanes_kafka/source.py::KafkaSource.settle::floor": _KAFKA,
    # --- lanes_postgres
    "adapters/lanes_postgres/subscription/connections.py::Connections.lend::idle": Harmless(
        "a connection that comes back meanwhile is lent next time"
    ),
    "adapters/lanes_postgres/subscription/source.py::PostgresSource.settle::floor": _FENCED,
    "adapters/lanes_postgres/subscription/source.py::PostgresSource.settle::lost": _FENCED,
    "adapters/lanes_postgres/subscription/visitor.py::Visitor.run::failure": _ASKED_AGAIN,
    "adapters/lanes_postgres/subscription/visitor.py::Visitor._serve::closed": _SENT_OR_NOT,
    "adapters/lanes_postgres/subscription/visitor.py::Visitor._acquire::owned": Harmless(
        "only this task acquires; a partition that is released meanwhile is acquired in the next look"
    ),
    "adapters/lanes_postgres/subscription/visitor.py::Visitor._acquire::floor": Harmless(
        "the position decides about the order of the visits alone; the claim returns it again"
    ),
    # The read looks again after its answer.
    "adapters/lanes_postgres/subscription/visitor.py::Visitor._read::owned": _ASKED_AGAIN,
    "adapters/lanes_postgres/subscription/visitor.py::Visitor._take::over": _ASKED_AGAIN,
    "adapters/lanes_postgres/subscription/visitor.py::Visitor._take::revoked": _ASKED_AGAIN,
    "adapters/lanes_postgres/subscription/piece_visitor.py::PieceVisitor._try_piece::owned": Harmless(
        "only this task acquires, and the lock of a piece that is owned is not free"
    ),
    "adapters/lanes_postgres/subscription/piece_visitor.py::PieceVisitor._deal::over": Harmless(
        "a piece that is over delivers nothing, whatever is read for it"
    ),
    "adapters/lanes_postgres/subscription/piece_visitor.py::PieceVisitor._deal::revoked": Harmless(
        "a piece that is revoked delivers nothing, and its next owner reads again"
    ),
    # --- lanes_spark
    "adapters/lanes_spark/driver/offset_server.py::OffsetServer.answer::stopping": Harmless(
        "an answer before the stop is as good as one after it: the next question gets the answer to stop"
    ),
}
