"""All mutants of the campaigns: plausible mistakes of a few lines."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant
from tests.mutants.table_adapters import ADAPTERS
from tests.mutants.table_cohort import COHORT
from tests.mutants.table_combined import COMBINED
from tests.mutants.table_dependent import DEPENDENT
from tests.mutants.table_publishing import PUBLISHING
from tests.mutants.table_runtime import RUNTIME
from tests.mutants.table_widths import WIDTHS

_ORDER: Final = (
    Mutant(
        "two_of_a_lane",
        "lanes.core.engine",
        "            lane = message.lane\n            if lane is None:",
        "            lane = message.lane = None\n            if lane is None:",
        "a message does not wait for the earlier message of its key",
        "jetstream",
        ("NoOverlap",),
    ),
    Mutant(
        "wrong_lane_head",
        "lanes.core.engine",
        "            self._ready.append(following)",
        "            self._ready.append(partition.tails[message.lane])",
        "the last message of a key follows its head, not the next one",
        "jetstream",
        ("PerKeyOrder",),
        first=49,
    ),
    Mutant(
        "block_forgets_successors",
        "lanes.core.engine",
        '            stopped.stop(message, "block", failure)\n',
        '            stopped.stop(message, "block", failure)\n            self.chains.free(message)\n',
        "the key of a blocked message continues with later messages",
        "jetstream",
        ("PerKeyOrder",),
        first=12,
    ),
    Mutant(
        "serial_runs_keys_concurrently",
        "lanes.core.chains",
        'self._key = policy.order == "key"',
        'self._key = policy.order in ("key", "serial")',
        "serial order runs a message of each key at once",
        "kafka",
        ("DeliveredThenStarted",),
        first=5,
    ),
    Mutant(
        "batch_does_not_give_back",
        "lanes.core.engine",
        "            while outcome is not ACK and partition.live",
        "            while False and partition.live",
        "outcomes after a failed message of the same lane count",
        "jetstream",
        ("PerKeyOrder",),
        machine=("modes", "effects_say_what_happened", "everything_holds"),
        first=18,
    ),
    Mutant(
        "zombie_frees_its_key",
        "lanes.core.ownership",
        "partition.tails = self.chains.tails.setdefault(partition.id.whole, {})",
        "partition.tails = self.chains.tails[partition.id.whole] = {}",
        "a partition that is assigned again does not wait for zombies of its keys",
        "jetstream",
        ("NoOverlap",),
        first=20,
    ),
    Mutant(
        "redelivery_runs_again",
        "lanes.core.engine",
        "        if ledger.is_settled(message.position):\n            step(",
        "        if False:\n            step(",
        "a message whose acknowledgement was lost is handled again",
        "jetstream",
        ("RunsOnce", "RedeliveryNotRun"),
    ),
)

_RETRY: Final = (
    Mutant(
        "failure_counts_as_done",
        "lanes.core.engine",
        "            self._failed(message, outcome, now)",
        '            step(message, "ack")\n            self._finished(message)',
        "a failed message is settled",
        "jetstream",
        ("NoSettleBeforeEnd",),
    ),
    Mutant(
        "retry_lost",
        "lanes.core.lane",
        "                over.append(message)",
        "                pass",
        "a held message never gets its next attempt",
        "jetstream",
        ("CaughtUp",),
        first=91,
    ),
    Mutant(
        "attempts_not_counted",
        "lanes.core.lane",
        "                message.attempt += message.state == HELD\n",
        "",
        "a message that always fails is retried without end",
        "jetstream",
        ("AttemptsCount",),
        first=2,  # in earlier seeds, a message without an end of attempts makes a run of many seconds
    ),
    Mutant(
        "settled_before_its_letter",
        "lanes.core.engine",
        "            stopped.stop(message, follows, failure)",
        '            step(message, "ack")\n            self._finished(message)',
        "a message that is given up is settled while its dead letter is being written",
        "jetstream",
        ("DeadLetterBeforeSettle",),
    ),
    Mutant(
        "parked_without_a_dead_letter",
        "lanes.core.engine",
        '        self.effects += [fx.DeadLetterDue(lane.head, lane.failure, "dead_letter") for lane in parked]',
        "        for lane in parked:\n            self.dead_lettered(lane.head)",
        "a blocked message that is parked is settled without a dead letter",
        "jetstream",
        ("AtLeastOnce",),
        first=4,
    ),
)

_SETTLING: Final = (
    Mutant(
        "settled_while_it_runs",
        "lanes.runtime.settle",
        "            await self._source.settle(settlements)",
        """            await self._source.settle(
                settlements
                + [
                    type(s)(s.partition, [m for m in s.partition.ledger.unsettled.values() if m.state == 2])
                    for s in settlements
                ]
            )""",
        "running messages are acknowledged together with finished ones, so a crash loses them",
        "jetstream",
        ("NothingLost",),
    ),
    Mutant(
        "failed_settlement_forgotten",
        "lanes.core.engine",
        "                self.outbox.give_back(settlement)",
        "                pass",
        "a failed settlement is not repeated",
        "jetstream",
        ("CaughtUp",),
        first=49,
    ),
    Mutant(
        "token_not_swapped",
        "lanes.core.engine",
        "            known.token = message.token",
        "            pass",
        "a redelivered message is settled by the token of its old delivery",
        "jetstream",
        ("NewestToken",),
    ),
    Mutant(
        "commit_highest",
        "lanes.core.commits",
        "ledger.floor(), ledger.completed())",
        "max(ledger.floor(), ledger.highest + 1), [])",
        "the highest delivered position is committed, not the lowest unfinished",
        "kafka",
        ("NoCommitPastUnfinished",),
    ),
    Mutant(
        "commits_cross",
        "lanes.core.commits",
        "return self.changes > 0 and self.sending is None",
        "return self.changes > 0",
        "a second commit of a partition is sent before the answer to the first",
        "kafka",
        ("OneCommitAtATime",),
    ),
    Mutant(
        "two_snapshots",
        "lanes.core.commits",
        "            settlement = Settlement(partition, [], ledger.floor(), ledger.completed())",
        "            completed = ledger.completed()\n"
        "            settlement = Settlement(partition, [], ledger.floor(), completed)",
        "the floor and the completed set of a commit are from different times",
        "kafka",
        ("CaughtUp", "NoDuplicateCleanly"),
        machine=("modes", "one_snapshot"),
    ),
    Mutant(
        "floor_past_a_gap",
        "lanes.core.ledgers",
        "        self._messages[message.ordinal - self._base] = None",
        "        self._messages[message.ordinal - self._base] = None\n"
        "        self._open[message.ordinal - self._base] = 0",
        "abandoned messages count as finished",
        "kafka",
        ("NoCommitPastUnfinished",),
    ),
    Mutant(
        "floor_past_waiting",
        "lanes.core.ledgers",
        "            self._floor = max(self._floor, self.highest + 1, -1 if self.waiting else self._trailing)",
        "            self._floor = max(self._floor, self.highest + 1, self._trailing)",
        "messages that wait for max_ahead are committed",
        "kafka",
        ("NoCommitPastUnfinished",),
        machine=("modes", "one_snapshot"),
        first=89,
    ),
    Mutant(
        "completed_off_by_one",
        "lanes.core.ledgers",
        "offsets[end - 1] + 1))",
        "offsets[end - 1] + 2))",
        "the next owner skips an unhandled message",
        "kafka",
        ("AtLeastOnce",),
        first=7,
    ),
    Mutant(
        "completed_ignored",
        "lanes.core.ledgers",
        "        return self._seed(run) if self._seeded else []",
        "        return []",
        "the next owner repeats finished messages of the completed set",
        "kafka",
        ("NoDuplicateCleanly",),
        first=7,
    ),
)

_BOUNDS: Final = (
    Mutant(
        "no_bound",
        "lanes.core.flow",
        "        return Room(self.max_in_flight - self.in_flight,",
        "        return Room(self.max_in_flight,",
        "messages in flight do not reduce the room for deliveries",
        "jetstream",
        ("BoundedInFlight",),
    ),
    Mutant(
        "partitions_take_no_turns",
        "lanes.core.fair_queue",
        "            self._turns.remove(name)\n            self._turns.append(name)\n",
        "            pass\n",
        "with bounds per partition, a partition with many heads starves the others",
        "jetstream",
        ("PartitionTurns",),
        machine=("budgets", "no_partition_waits_for_two_calls_of_another"),
        first=4,
    ),
    Mutant(
        "no_room_of_a_partition",
        "lanes.core.partition_budgets",
        "        most = min([self._bound, *(count for budget, count in left.items() if budget not in full)])",
        "        most = self._bound",
        "messages of a partition in flight do not reduce the room for its deliveries",
        "kafka",
        ("PartitionBudgets",),
        machine=("budgets", "the_room_keeps_the_bound"),
        first=4,
    ),
    Mutant(
        "handlers_of_a_partition_unbounded",
        "lanes.core.fair_queue",
        "self._limit - self.running.get(name, 0)",
        "self._limit",
        "a partition runs more handlers than concurrency_per_partition",
        "jetstream",
        ("PartitionBudgets",),
        machine=("budgets", "everything_holds", "take"),
        first=9,
    ),
    Mutant(
        "stuck_lane_stops_intake",
        "lanes.core.engine",
        "        if not (self.flow.stopped_early and self._has_idle_handler()):\n",
        "        if True:\n",
        "messages that wait for a blocked message stop the intake of all others below the bound",
        "jetstream",
        ("CaughtUp",),
        first=12,
    ),
    Mutant(
        "full_partition_never_resumes",
        "lanes.core.partition_budgets",
        "            self.full.remove(budget)\n",
        "",
        "a partition that was full delivers no message any more",
        "kafka",
        ("CaughtUp",),
        machine=("budgets", "the_room_keeps_the_bound"),
        first=4,
    ),
    Mutant(
        "no_max_ahead",
        "lanes.core.commits",
        "        return self._policy.max_ahead - ",
        "        return 1_000_000 - ",
        "one stuck key lets its partition run ahead without a limit",
        "kafka",
        ("MaxAhead",),
    ),
    Mutant(
        "ahead_for_ever",
        "lanes.core.commits",
        "            self.ahead.discard(partition)\n            self._effects",
        "            self._effects",
        "after a partition has reached max_ahead, it delivers no more messages",
        "kafka",
        ("CaughtUp",),
    ),
    Mutant(
        "resume_flaps",
        "lanes.core.flow",
        "        if not self.taking and self.in_flight <= self.low",
        "        if not self.taking and self.in_flight < self.max_in_flight",
        "intake resumes after each settled message, instead of at low water",
        "jetstream",
        ("PauseAtBounds",),
    ),
    Mutant(
        "pause_forgotten",
        "lanes.core.flow",
        "        self.taking = True\n",
        "        self.taking = True\n        self.paused = False\n",
        "the user's pause ends when the bound is left",
        "jetstream",
        ("PauseTakesNothing",),
        first=13,
    ),
    Mutant(
        "zombie_stays_in_flight",
        "lanes.core.engine",
        "            chains.forget(partition.id, self.partitions)\n            self._released(1, message.size)\n"
        "            return\n",
        "            chains.forget(partition.id, self.partitions)\n            return\n",
        "each zombie counts as in flight without end",
        "jetstream",
        ("PlacesGivenBack", "CaughtUp"),
        machine=("engine", "taking_changes_at_the_marks", "teardown"),
    ),
)

_OWNERSHIP: Final = (
    Mutant(
        "no_fence",
        "lanes.core.engine",
        "        if outcome is not ACK or not partition.steady or partition.partings:",
        "        if outcome is not ACK or partition.draining:",
        "a handler that ends after its assignment counts",
        "jetstream",
        ("ZombiesDoNotCount",),
        first=28,
    ),
    Mutant(
        "lost_is_committed",
        "lanes.runtime.run",
        "        zombies = self.engine.lose(partition)",
        "        zombies = self.engine.fence(partition)",
        "the former owner commits a lost partition",
        "kafka",
        ("NoCommitAfterLoss", "NoCommitAfterRevoke"),
        first=25,
    ),
    Mutant(
        "no_drain",
        "lanes.runtime.handover",
        "            await begun.ended.wait()\n",
        "            begun.ended.set()\n",
        "a partition is handed over while its handlers run",
        "kafka",
        ("NoOverlap",),
        first=12,
    ),
    Mutant(
        "queued_dropped",
        "lanes.runtime.handover",
        "close_prefix=self._close_prefix and not held)",
        "close_prefix=False)",
        "without a handed-over completed set, messages finished above a queued message are repeated",
        "kafka",
        ("NoDuplicateCleanly",),
    ),
    Mutant(
        "drain_waits_for_held",
        "lanes.core.ownership",
        "sum(1 for m in unfinished if m.state in UNENDED)",
        "sum(1 for m in unfinished if m.state in UNENDED | {3})",
        "a drain waits for a message that is held for a retry, until its deadline",
        "jetstream",
        ("DrainWaitsForRunning",),
        first=8,
    ),
)

MUTANTS: Final = {
    mutant.name: mutant
    for mutant in _ORDER
    + _RETRY
    + _SETTLING
    + _BOUNDS
    + _OWNERSHIP
    + RUNTIME
    + COMBINED
    + COHORT
    + ADAPTERS
    + DEPENDENT
    + WIDTHS
    + PUBLISHING
}
