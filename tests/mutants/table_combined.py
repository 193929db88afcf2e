"""The mutants that need several conditions at once, a further pass of a retry loop, or a change during an ``await``."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant

COMBINED: Final = (
    Mutant(
        "progress_passes_completed_of_waiting",
        "lanes.core.ledgers",
        "above = max(self.highest + 1, self._floor, -1 if self.waiting else self._trailing)",
        "above = max(self.highest + 1, self._floor, self._trailing)",
        "a commit forgets finished messages of the former owner that wait for max_ahead and were read past",
        "modes",
        ("accept",),
    ),
    Mutant(
        "completed_passed_by_waiting",
        "lanes.core.ledgers",
        "while passed < len(seeded) and seeded[passed][1] <= self.highest + 1:",
        "while passed < len(seeded) and seeded[passed][1] <= self._delivered + 1:",
        "finished messages of the former owner that wait for max_ahead run again",
        "modes",
        ("accept", "take"),
    ),
    Mutant(
        "progress_passes_dropped_messages",
        "lanes.core.ledgers",
        "            self._trailing = -1\n",
        "",
        "a drain commits messages that waited for max_ahead, because the source has read past them",
        "modes",
        ("accept", "one_snapshot"),
    ),
    Mutant(
        "answer_counts_later_messages",
        "lanes.core.commits",
        "self.finished -= self._sent",
        "self.finished = 0",
        "an answer to a commit also counts messages that finished after its request",
        "modes",
        ("everything_holds",),
    ),
    Mutant(
        "expired_answer_counts",
        "lanes.core.commits",
        "        partition = settlement.partition\n        ledger = self.partitions.get(partition)\n",
        "        partition = settlement.partition\n"
        "        partition = next((p for p in self.partitions if p.id == partition.id), partition)\n"
        "        ledger = self.partitions.get(partition)\n",
        "the late answer to a commit of an earlier assignment confirms positions of the new assignment",
        "modes",
        ("one_snapshot", "everything_holds", "effects_say_what_happened"),
    ),
    Mutant(
        "attempts_count_from_the_handover",
        "lanes.core.engine",
        '        follows = policy.follows(message.attempt, failure)\n        if follows == "hold":',
        "        first = message.partition.recalled.get(message.position, 1)\n"
        '        follows = policy.follows(message.attempt - first + 1, failure)\n        if follows == "hold":',
        "a message gets all its attempts again after a hand-over",
        "modes",
        ("everything_holds", "effects_say_what_happened"),
    ),
    Mutant(
        "unblocked_attempt_not_counted",
        "lanes.core.lane",
        'step(message, "unblock")\n            del self.by_head[message]\n            message.attempt += 1\n',
        'step(message, "unblock")\n            del self.by_head[message]\n'
        "            message.attempt += not message.partition.recalled\n",
        "an unblocked message repeats its attempt if its partition was handed over",
        "modes",
        ("take", "teardown"),
    ),
    Mutant(
        "first_pass_looks_at_the_lease",
        "lanes.runtime.dead_lettering",
        "            if partition.deadline != NEVER and self._context.overdue(partition):",
        "            first = pause == DEAD_LETTER_RETRY[0]\n"
        "            if first and partition.deadline != NEVER and self._context.overdue(partition):",
        "a dead letter that was not confirmed is written again after the end of the lease",
        "retry_loops",
        ("dead letters",),
    ),
    Mutant(
        "first_pass_looks_for_a_freeze",
        "lanes.runtime.dead_lettering",
        "            if freezes is not None and freezes.look(",
        "            if pause == DEAD_LETTER_RETRY[0] and freezes is not None and freezes.look(",
        "a dead letter that was not confirmed is written again after a freeze, although another process may own it",
        "retry_loops",
        ("dead letters",),
    ),
    Mutant(
        "first_pass_looks_at_the_message",
        "lanes.runtime.dead_lettering",
        "        while message.state != ABANDONED:",
        "        while message.state != ABANDONED or pause > DEAD_LETTER_RETRY[0]:",
        "a dead letter that was not confirmed is written again after the loss of its partition",
        "retry_loops",
        ("dead letters",),
    ),
    Mutant(
        "failing_store_looks_for_no_freeze",
        "lanes.runtime.attempts",
        "                while freezes is not None and freezes.look(",
        "                while pause == STORE_RETRY[0] and freezes is not None and freezes.look(",
        "an attempt that was not stored is written again after a freeze, although another process may own the message",
        "retry_loops",
        ("attempts to keep", "attempts to drop"),
    ),
    Mutant(
        "repeated_settlement_looks_at_no_lease",
        "lanes.runtime.settle",
        "        late = [settlement for settlement in settlements if now >= settlement.partition.deadline]\n",
        "        unsettled = self.unsettled.partitions\n"
        "        late = [each for each in settlements if now >= each.partition.deadline and not unsettled]\n",
        "a settlement that has failed is repeated after the end of the lease",
        "retry_loops",
        ("acknowledgements", "commits", "commits of a drain"),
    ),
    Mutant(
        "second_freeze_confirmed_by_the_first",
        "lanes.runtime.confirmation",
        "            if watch.open(number, context.clock()):",
        "            if watch.open(watch.number, context.clock()):",
        "handlers start after a freeze that began while an earlier freeze was confirmed",
        "retry_loops",
        ("Asking",),
    ),
    Mutant(
        "commit_of_a_given_up_partition_begins",
        "lanes.runtime.settle",
        "        settlements = self._still_ours(settlements)\n",
        "",
        "a commit begins although its partition was lost after the commit was collected",
        "kafka",
        ("NoCommitAfterLoss", "NoCommitAfterRevoke"),
    ),
    Mutant(
        "flush_waits_for_one_write",
        "lanes.runtime.attempts",
        "        while entries is not None and entries.writers and partition in self._entries:\n",
        "        if entries is not None and entries.writers and partition in self._entries:\n",
        "a drain hands its partition over after the first of several writes to the store of attempts",
        "kept_attempts",
        ("HandedOver", "AttemptsContinue"),
    ),
    Mutant(
        "loaded_after_the_partition_has_gone",
        "lanes.runtime.attempts",
        "        if known is None or self._loading.get(partition) is not loading:\n",
        "        if known is None:\n",
        "the attempts of a partition that was given up during their load stop the run",
        "retry_loops",
        ("attempts to load",),
    ),
    Mutant(
        "blocked_message_recalled_as_held",
        "lanes.runtime.attempts",
        '        if state == "blocked":\n            return policy.given_up(dead_lettered=True) == "block"\n',
        '        if state == "blocked":\n            return False\n',
        "a message that its former owner has blocked runs once more after each hand-over",
        "kept_attempts",
        ("AttemptsContinue", "KeptBeforeRetry", "BlockedStays"),
    ),
)
