"""Mutants with the tests that must find them: mistakes in the use of a Kafka client, and in the waking of workers."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant
from tests.mutants.table_transactions import TRANSACTIONS

_ASSIGNMENTS: Final = "tests/kafka/test_assignments.py::test_"
_COMMIT_ANSWERS: Final = "tests/kafka/test_commit_answers.py::test_"
_GROUP_MOVES: Final = "tests/kafka/test_group_moves.py::test_"
_MEMBERSHIP: Final = "tests/kafka/test_membership.py::test_"
_OUT_OF_RANGE: Final = "tests/kafka/test_out_of_range.py::test_"
_PREFETCH: Final = "tests/kafka/test_prefetch.py::test_"
_PREFETCH_BOUNDS: Final = "tests/kafka/test_prefetch_bounds.py::test_"
_SHUTDOWN: Final = "tests/kafka/test_shutdown.py::test_"
_SOURCE: Final = "tests/kafka/test_source.py::test_"
_START_POSITIONS: Final = "tests/kafka/test_start_positions.py::test_"
_START_TIMES: Final = "tests/kafka/test_start_times.py::test_"
_THREAD_TURNS: Final = "tests/kafka/test_thread_turns.py::test_"
_WAKE_LIMIT: Final = "tests/workers/test_wake_limit.py::test_"
_TOPIC_IDS: Final = "tests/kafka/test_topic_ids.py::test_"
_CONTRACT: Final = "tests/memsource/contract/test_kafka.py::test_the_kafka_source_keeps_the_contract_on_a_mock"


def _contract(check: str, protocol: str = "848") -> str:
    every = "" if protocol == "848" else "_in_every_protocol"
    return f"{_CONTRACT}{every}[{check}-{protocol}-asyncio]"


def _mutant(name: str, module: str, old: str, new: str, breaks: str, *found_by: str) -> Mutant:
    return Mutant(name, f"lanes_kafka.{module}", old, new, breaks, "kafka", found_by)


_COMMITTING: Final = (
    _mutant(
        "floor_plus_one",
        "client.commits",
        "        partition_id, floor = settlement.partition.id, settlement.floor\n",
        "        partition_id, floor = settlement.partition.id, (settlement.floor or 0) + 1\n",
        "the first unfinished message counts as finished",
        _contract("starts_at_the_committed_floor"),
    ),
    _mutant(
        "metadata_of_another_snapshot",
        "client.commits",
        "        text = encode(floor, settlement.completed, self.limit)\n",
        "        held = self.__dict__.setdefault('held', {})\n"
        "        text = encode(floor, held.get(partition_id, settlement.completed), self.limit)\n"
        "        held[partition_id] = settlement.completed\n",
        "a position is committed with the completed set of the commit before",
        _COMMIT_ANSWERS + "completed_runs_are_committed_with_their_own_position",
    ),
    _mutant(
        "commit_after_release",
        "client.group",
        "        return assignment is not None and not assignment.released\n",
        "        return True\n",
        "a released or lost partition is committed, over the commit of the next owner",
        _ASSIGNMENTS + "a_released_partition_is_not_committed",
        _ASSIGNMENTS + "a_lost_partition_is_neither_revoked_nor_committed",
    ),
    _mutant(
        "commit_in_lost",
        "client.group",
        "        self._lose(self._leaving(partitions), reason)\n",
        "        self.on_revoke(client, partitions)\n",
        "a lost partition is drained and committed, although another member owns it",
        _ASSIGNMENTS + "a_lost_partition_is_neither_revoked_nor_committed",
    ),
    _mutant(
        "sync_commit_on_the_thread",
        "client.mailbox",
        "                return served\n            self._perform(command, until=None)\n",
        "                return served\n            self._perform(command, until=1e12)\n",
        "every commit blocks the source until the broker has answered",
        _COMMIT_ANSWERS + "only_callbacks_commit_synchronously",
    ),
    _mutant(
        "never_sync_in_a_revoke",
        "client.thread",
        "        self._topic_id_check.resend(self._client, until)\n"
        "        self._mailbox.wait(min(until - self.clock(), _HOUSEKEEPING_EVERY), until=until)\n",
        "        self._mailbox.wait(min(until - self.clock(), _HOUSEKEEPING_EVERY))\n",
        "a revoke waits for an answer that arrives only after the revoke",
        _COMMIT_ANSWERS + "only_callbacks_commit_synchronously",
    ),
    _mutant(
        "presumed_lost_goes_on",
        "client.commits",
        '            self.lost(f"a commit was refused: {error.name()}")\n',
        "            pass\n",
        "a member that the broker has removed starts handlers",
        _COMMIT_ANSWERS + "commit_errors_are_classified[lost-25-awaited]",
        _COMMIT_ANSWERS + "commit_errors_are_classified[lost-25-sent]",
    ),
    _mutant(
        "a_removed_member_is_not_doubted",
        "client.membership",
        "                self.group.doubt()\n            elif not self._waiting:\n",
        "                pass\n            elif not self._waiting:\n",
        "a member that the group has removed starts handlers again, because its client still believes to own them",
        _MEMBERSHIP + "a_member_that_is_not_listed_has_lost_its_partitions",
        _MEMBERSHIP + "a_removed_member_starts_nothing_although_its_client_believes_in_its_partitions[eager]",
    ),
    _mutant(
        "presumed_lost_is_not_fenced",
        "client.thread",
        "        self._group.lose_all(reason, presumed=True)\n",
        "        pass\n",
        "a member that the broker has removed continues with its partitions",
        _COMMIT_ANSWERS + "a_commit_by_a_former_member_fences_at_once",
    ),
    _mutant(
        "committed_without_asking",
        "client.commits",
        "        elif _has_ids(commit):\n            commit.deadline",
        "        elif False:\n            commit.deadline",
        "positions of the former topic are committed to a recreated topic",
        _TOPIC_IDS + "messages_read_on_in_a_recreated_topic_are_not_committed",
        _TOPIC_IDS + "nothing_is_committed_to_a_recreated_topic[sent]",
    ),
    _mutant(
        "an_old_answer_is_enough",
        "client.topics",
        "        self._wanted = self._begun + 1\n        return self._wanted\n",
        "        return self._begun\n",
        "a commit relies on a topic id that was read before its messages",
        _TOPIC_IDS + "a_commit_waits_for_a_topic_id_asked_for_after_it",
    ),
    _mutant(
        "error_swallowed",
        "client.thread",
        "        elif is_permanent(error):\n            self._fail(",
        "        elif False:\n            self._fail(",
        "a source without permission to join its group waits without end",
        _SHUTDOWN + "a_permanent_error_ends_the_source",
    ),
)

_ASSIGNING: Final = (
    _mutant(
        "pause_not_reset",
        "client.group",
        "not to an assignment.\n        self.set_paused(client, started, self.is_full())\n",
        "not to an assignment.\n",
        "a partition that was paused at its release stays paused after its next assignment",
        _ASSIGNMENTS + "a_pause_ends_with_its_assignment",
    ),
    _mutant(
        "wrong_kind_of_assign",
        "client.group",
        '        elif self.config.protocol == "eager":\n            client.assign(offsets)\n',
        '        elif self.config.protocol == "848":\n            client.assign(offsets)\n',
        "the start positions are set by the call of the other rebalance protocol",
        _contract("assigns_before_it_delivers"),
        _contract("assigns_before_it_delivers", "eager"),
    ),
    _mutant(
        "kept_partition_stops",
        "client.group",
        "            waiting = [each for each in leaving if not each.released and not each.returning]\n",
        "            waiting = [each for each in self.owned.values() if not each.released]\n",
        "a revoke also drains partitions that stay",
        _ASSIGNMENTS + "a_revoke_concerns_the_leaving_partitions_alone",
    ),
    _mutant(
        "start_at_every_start",
        "client.offsets",
        "    fresh = [one for one in ids if committed[one].offset < 0]\n",
        "    fresh = list(ids)\n",
        'start="next" skips all messages that arrived while no member ran',
        _START_POSITIONS + "the_start_of_a_group_is_decided_once",
    ),
    _mutant(
        "start_time_rounded_down",
        "client.offsets",
        "    return max(0, -((_EPOCH - start) // timedelta(milliseconds=1)))\n",
        "    return max(0, (start - _EPOCH) // timedelta(milliseconds=1))\n",
        "a start at a time delivers messages of the millisecond before",
        _START_TIMES + "a_time_is_rounded_up_to_its_millisecond[fraction]",
        _START_TIMES + "a_time_is_rounded_up_to_its_millisecond[last]",
    ),
    _mutant(
        "start_not_decided",
        "client.group",
        "                self._uncommitted_starts[one] = start.floor\n",
        "                pass\n",
        'start="next" is decided again until the first commit',
        _START_POSITIONS + "the_start_of_a_group_is_decided_once",
    ),
    _mutant(
        "completed_forgotten",
        "client.offsets",
        '        completed = decode(text or "", floor, _ANY_DISTANCE) or []\n',
        "        completed: Runs = []\n",
        "messages in the completed set of the former owner are repeated",
        _contract("completed_is_handed_over"),
    ),
    _mutant(
        "out_of_range_is_silent",
        "client.offsets",
        '    if out_of_range == "fail":\n',
        "    if False:\n",
        "a missing position is skipped although the configuration forbids it",
        _OUT_OF_RANGE + "a_position_out_of_range_ends_the_source",
    ),
)

_READING: Final = (
    _mutant(
        "stale_messages_not_filtered",
        "client.intake",
        "        return self._without_stale(raws, rebalances) if raws and "
        "self.group.rebalances != rebalances else raws\n",
        "        return raws\n",
        "messages fetched for a former assignment move the position of the new one",
        _ASSIGNMENTS + "messages_of_a_former_assignment_are_read_again",
    ),
    _mutant(
        "held_messages_outlive_a_loss",
        "client.prefetch",
        "            elif isinstance(event, Lost | Revoking):\n                self.drop(event.partition)\n",
        "            elif isinstance(event, Lost | Revoking):\n",
        "messages of a lost partition are delivered after its loss",
        _ASSIGNMENTS + "prefetched_messages_of_a_lost_partition_are_dropped",
    ),
    _mutant(
        "resumed_without_room",
        "client.thread",
        "        self._group.apply_pauses(self._client, demand.client_paused, demand.paused, resume=False)\n",
        "        self._group.apply_pauses(self._client, demand.client_paused, demand.paused)\n",
        "a full client is paused and resumed repeatedly",
        _ASSIGNMENTS + "without_room_nothing_is_resumed",
    ),
    _mutant(
        "rests_at_once",
        "client.prefetch",
        "            self.client_paused = (self.client_paused & room.paused) | over\n",
        "            self.client_paused = room.paused\n",
        "a slow commit makes the client discard its fetched messages",
        _PREFETCH + "the_client_is_paused_for_a_long_pause_or_for_all_partitions",
    ),
    _mutant(
        "messages_of_a_rewind_are_not_counted",
        "client.prefetch",
        "            if isinstance(event, Delivered):\n                self.received = ",
        "            if isinstance(event, Delivered) and self._rewound.get(event.partition, _NEVER)[0] <= number:\n"
        "                self.received = ",
        "the credit of the thread shrinks by the messages that were on their way during a rewind",
        _PREFETCH_BOUNDS + "messages_read_for_the_demand_of_a_rewind_are_delivered",
    ),
    _mutant(
        "demand_only_after_the_last_message",
        "client.prefetch",
        "    return left < wanted - received and left <= (wanted - received) // 2\n",
        "    return left < wanted - received and left == 0\n",
        "the client's thread waits for a new demand although the event loop has room",
        _PREFETCH + "a_credit_is_renewed_when_half_of_it_is_used_up",
    ),
    _mutant(
        "paused_messages_are_not_in_the_credit",
        "client.prefetch",
        "        most = min(most, places + READ_AHEAD - waiting - aside)\n",
        "",
        "the messages of paused partitions exceed the bound of the prefetch",
        _PREFETCH + "messages_of_paused_partitions_are_bounded",
    ),
    _mutant(
        "read_bytes_are_not_in_the_credit",
        "client.thread",
        "        size = demand.credit.bytes - self._bytes_sent\n",
        "        size = demand.credit.bytes\n",
        "the prefetch exceeds 8 MiB",
        _THREAD_TURNS + "a_credit_in_bytes_is_exceeded_by_one_message_at_most",
    ),
    _mutant(
        "an_announced_delivery_never_comes",
        "client.thread",
        "        if events or self._filling:\n",
        "        if events:\n",
        "the first messages of an assignment wait for messages that the client turned out not to have",
        _THREAD_TURNS + "an_announced_delivery_follows_without_a_message_and_without_a_wait",
    ),
    _mutant(
        "waits_for_a_delivery_without_a_credit",
        "source",
        "                events = self._prefetched.take(room)\n            if events:\n",
        "            if events:\n",
        "messages wait up to a second after a pause has used up the credit for the others",
        _SOURCE + "a_pause_of_the_other_partitions_ends_the_wait_for_their_first_messages",
    ),
    _mutant(
        "a_slow_callback_counts_as_no_room",
        "client.thread",
        "            self._idle_since = self.polled\n",
        "            pass\n",
        "the client discards the first fetch after a slow assignment",
        _THREAD_TURNS + "an_assignment_that_takes_long_pauses_no_partition",
    ),
    _mutant(
        "a_second_allowance",
        "client.group",
        "            self.reclaim(client, until=until)\n",
        "            self.reclaim(client, until=self._starts_until())\n",
        "an assignment with restarts takes longer than max.poll.interval.ms",
        _GROUP_MOVES + "an_assignment_and_the_restarts_after_it_share_one_allowance",
    ),
    _mutant(
        "no_demand_of_the_newest_assignment",
        "client.thread",
        "        if self._failure is not None or demand.assigned < self._assigned:\n",
        "        if self._failure is not None:\n",
        "the first partition that is read gets the whole room",
        _THREAD_TURNS + "nothing_is_read_for_a_demand_that_does_not_know_the_newest_assignment",
    ),
    _mutant(
        "closed_before_drained",
        "client.thread",
        "            self._group.release(command.partition)\n",
        "            self._group.release(command.partition)\n            self._group.closing = True\n",
        "the client is closed when the first of several partitions is drained",
        _SHUTDOWN + "a_stop_closes_the_client_after_all_partitions_are_drained",
    ),
)

_WAKING: Final = (
    Mutant(
        "few_workers_for_ever",
        "lanes.workers.wake_limit",
        "        self.share += (1.0 - self.share) * _WEIGHT\n",
        "        pass\n",
        "most handlers are idle while their lanes are ready, because eight workers are woken in a turn",
        "kafka",
        (
            _WAKE_LIMIT + "all_handlers_that_wait_start_within_few_turns_of_the_loop[asyncio]",
            _WAKE_LIMIT + "a_burst_wakes_a_worker_for_each_message_after_handlers_have_suspended[asyncio]",
        ),
    ),
    Mutant(
        "a_worker_for_each_lane",
        "lanes.workers.wake_limit",
        "            return ALONE\n",
        "            return max(FEW, ready)\n",
        "a worker is woken for each ready lane, although handlers never suspend and the first worker handles all lanes",
        "kafka",
        (_WAKE_LIMIT + "handlers_that_never_suspend_wake_few_workers[asyncio]",),
    ),
)

KAFKA: Final = {mutant.name: mutant for mutant in (*_COMMITTING, *_ASSIGNING, *_READING, *_WAKING, *TRANSACTIONS)}
