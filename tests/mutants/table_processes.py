"""The mutants that no campaign can show: each is found by the tests of its part."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant

_ENDS: Final = "tests/workers/test_process_ends.py::"
_REPEATS: Final = "tests/cohort/test_cohort_repeats.py::"

PROCESSES: Final = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "late_answer",
            "lanes.workers.processes",
            '                self._drop(process, "its handler did not end within the timeout")\n',
            "",
            "the answer to a call whose timeout has passed settles the next message of the process",
            "processes",
            (f"{_ENDS}test_an_answer_after_the_timeout_is_no_answer_to_the_next_message[asyncio]",),
        ),
        Mutant(
            "death_is_success",
            "lanes.workers.processes",
            "                if self.cancelled:\n                    raise Killed from None\n",
            "                return None\n",
            "a message whose process was killed is settled, and lost",
            "processes",
            (f"{_ENDS}test_a_process_that_is_killed_fails_its_message_alone[asyncio]",),
        ),
        Mutant(
            "cancelled_calls_go_on",
            "lanes.workers.processes",
            '                    call._process.kill("its call is cancelled")',
            "                    pass",
            "a handler outlives its revoked partition",
            "processes",
            (f"{_ENDS}test_a_revoked_partition_kills_its_handlers_and_no_others[asyncio-None]",),
        ),
        # In a simulated run, a worker looks again after it has written the row of the start, so no handler is called.
        Mutant(
            "woken_workers_do_not_look_for_a_freeze",
            "lanes.workers.freezes",
            "        held = self._watch.look(now)",
            "        held = self._watch.held",
            "a worker takes a message that wakes it after a freeze, although the partition may be lost",
            "processes",
            (
                "tests/workers/test_freezes.py::test_a_message_that_wakes_a_worker_after_a_freeze_does_not_start[asyncio]",
            ),
        ),
        # A campaign allows the repeats of ``max_in_flight`` unwritten messages.
        Mutant(
            "checkpoints_only_when_full",
            "lanes.cohort.owned",
            "                self.membership.checkpoint_soon(owned.number, len(ledger), owned.unsaved)\n",
            "                pass\n",
            "a crash of a cohort member repeats up to max_in_flight messages that were finished long before",
            "processes",
            (f"{_REPEATS}test_a_crash_at_300_messages_a_second_repeats_at_most_a_twentieth_of_a_second",),
        ),
        Mutant(
            "checkpoints_at_the_end_of_the_interval",
            "lanes.core.cohort.checkpoint_pace",
            "        return min(self.interval, max(self.interval * PROMPT, cost))\n",
            "        return self.interval\n",
            "a crash of a cohort member repeats the messages of a whole commit_interval",
            "processes",
            (f"{_REPEATS}test_a_crash_at_300_messages_a_second_repeats_at_most_a_twentieth_of_a_second",),
        ),
    )
}
