"""Mutants of the real adapters, which the campaigns over simulated brokers must find.

Tests of single cases miss these kinds of mutants. A fault follows a fault, or three conditions meet. The later passes
of a loop leave out a check. State outlives a loss, a broker goes away during a wait, or a value changes during an
``await``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.mutants import Mutant
from tests.mutants.table_jetstream import JETSTREAM
from tests.mutants.table_kafka import KAFKA as PLANTED
from tests.mutants.table_postgres import POSTGRES
from tests.mutants.table_ranges import RANGES


def _kafka(name: str, module: str, old: str, new: str, breaks: str, *found_by: str, first: int = 0) -> Mutant:
    return Mutant(name, f"lanes_kafka.{module}", old, new, breaks, "kafka_adapter", found_by, first=first)


_DELIVERIES: Final = ("AtLeastOnce", "CaughtUp", "ContractError", "DeliveredThenStarted", "NothingLost")

KAFKA: Final = (
    # --- a fault after a fault
    _kafka(
        "stored_is_not_asked",
        "client.commits",
        "            elif _is_stored(client, commit, timeout):\n",
        "            elif _is_stored(client, commit, timeout) or True:\n",
        "a commit in a revoke counts as stored although its request was lost",
        "ConfirmedIsStored",
    ),
    _kafka(
        "a_late_answer_counts_for_the_repetition",
        "client.commits",
        "any(_content(each) == _content(offset) for each in commit.offsets)",
        "True",
        "the answer to a commit that was given up counts for its repetition, whose request is lost",
        "ConfirmedIsStored",
    ),
    _kafka(
        "a_question_given_up_forgets_its_commands",
        "client.membership",
        '                self._admin = self._future = None\n                self._log_unanswered("no answer")\n',
        "                self._admin = self._future = None\n"
        "                self._asked = []\n"
        '                self._log_unanswered("no answer")\n',
        "a member whose question after a freeze gets neither an answer nor an error starts nothing any more",
        "CaughtUp",
        first=22,
    ),
    # --- three conditions
    _kafka(
        "a_commit_is_sent_after_the_release",
        "client.commits",
        "        if not all(self.owns(each.partition) for each in commit.settlements):\n            # The loop",
        "        if False:\n            # The loop",
        "a commit that waited for a topic id is sent although its partition was given up meanwhile",
        "OwnersCommit",
        "PositionsRise",
    ),
    _kafka(
        "gap_over_unfinished",
        "client.intake",
        "        if assignment is None or assignment.end > committed:\n            return None\n",
        "        if assignment is None:\n            return None\n",
        "a release commits past messages that were delivered and not finished",
        "AtLeastOnce",
        "NothingLost",
        "NoCommitPastUnfinished",
    ),
    _kafka(
        "progress_overtakes_messages",
        "client.prefetch",
        "            elif isinstance(event, Progressed) and event.partition in full:\n",
        "            elif isinstance(event, Progressed) and not room.messages:\n",
        "the end of a gap is delivered before messages below the gap that wait for room",
        "AtLeastOnce",
        "NothingLost",
        "DeliveredThenStarted",
        "ContractError",
    ),
    _kafka(
        "a_new_assignment_makes_no_demand",
        "source",
        " or self._assigned != prefetched.assigned:\n",
        ":\n",
        "the thread waits for a demand that knows the newest assignment",
        "CaughtUp",
    ),
    _kafka(
        "dropped_messages_keep_their_place",
        "client.prefetch",
        "            elif isinstance(event, Delivered):\n                self._remove(event)\n"
        "        self._events = kept\n",
        "        self._events = kept\n",
        "messages that were dropped use up the credit of the thread",
        "CaughtUp",
    ),
    # --- a check of every pass
    _kafka(
        "starts_are_committed_again",
        "client.group",
        " for one in self._uncommitted_starts if one not in decided]\n",
        " for one in self._uncommitted_starts if one not in self.owned]\n",
        "the repetition of a failed commit of start positions overwrites higher positions",
        "PositionsRise",
    ),
    # --- state across a loss
    _kafka(
        "stale_messages_are_not_read_again",
        "client.intake",
        "            self.client.seek(assignment.at(assignment.position))\n",
        "            pass\n",
        "messages that one call returns with the assignment of their partition are dropped",
        "AtLeastOnce",
        "NothingLost",
        "CaughtUp",
    ),
    _kafka(
        "a_rewind_keeps_the_position",
        "client.thread",
        "                assignment.position = position\n",
        "",
        "messages that are read again after a rewind are dropped as outdated",
        *_DELIVERIES,
    ),
    # --- retention
    _kafka(
        "a_move_skips_what_is_left",
        "client.offsets",
        '    target = low if out_of_range == "earliest" else high\n',
        "    target = high\n",
        "a position that retention deleted moves to the end of the log, past the messages that are left",
        "NothingLost",
        "AtLeastOnce",
    ),
    _kafka(
        "a_move_forgets_finished_messages",
        "client.offsets",
        "            found[partition_id] = _beyond(target, completed if floor < low else [])\n",
        "            found[partition_id] = _beyond(target, [])\n",
        "messages that a former owner has finished run again after retention has deleted an unfinished one",
        "NoDuplicateCleanly",
        "CompletedIsKept",
    ),
    _kafka(
        "a_stray_without_answer_is_forgotten",
        "client.group",
        "            self._out_of_range, self._ask_bounds_at = strays, self.clock() + _ASK_BOUNDS_EVERY\n",
        "            self._ask_bounds_at = self.clock() + _ASK_BOUNDS_EVERY\n",
        "a partition whose position was deleted delivers nothing any more if its question for the log finds no broker",
        "CaughtUp",
        first=1_122,
    ),
    # --- dead letters
    _kafka(
        "dropped_letters_count_as_written",
        "dead_letters.producer",
        "            raise cause from failure\n",
        "            return 0, 0\n",
        "a dead letter that a failed producer has dropped counts as written",
        "LetterIsStored",
    ),
    _kafka(
        "a_failed_producer_stays",
        "dead_letters.producer",
        "            self._jobs.put(functools.partial(self._fail, producer, error))\n",
        "            pass\n",
        "no dead letter is written any more after the producer has failed",
        "CaughtUp",
    ),
    # --- permissions
    _kafka(
        "a_refused_commit_counts_as_stored",
        "client.commits",
        "        if error is None:\n            commit.answer.give(None)\n",
        "        if error is None or error.code() in NOT_ALLOWED:\n            commit.answer.give(None)\n",
        "a commit without a permission counts as stored",
        "ConfirmedIsStored",
    ),
    _kafka(
        "a_refused_read_is_silent",
        "client.thread",
        '            self._fail(SourceError(f"{self.name}: {client_message(error, self.config.client)}"))\n',
        "            pass\n",
        "a source goes on without a permission to read, and says nothing",
        "RefusedStops",
    ),
    # --- a topic that is deleted and created again
    _kafka(
        "an_open_question_counts",
        "client.topics",
        "        self._wanted = self._begun + 1\n        return self._wanted\n",
        "        return self._begun\n",
        "a commit is sent after an answer that may be older than its messages",
        "CommitsAreChecked",
    ),
    _kafka(
        "a_recreated_topic_is_read_on",
        "client.topics",
        "        if incarnation and now.id and now.id != incarnation:\n",
        "        if not incarnation and now.id:\n",
        "a source does not notice that its topic has another id",
        "CommitsAreChecked",
        "RecreatedStops",
    ),
    _kafka(
        "a_revoke_commits_to_a_new_topic",
        "client.commits",
        "        answered = self.topics.wait(deadline - self.clock())\n        self._check()\n",
        "        answered = self.topics.wait(deadline - self.clock())\n",
        "a commit in a revoke is sent although the topic has another id",
        "CommitsAreChecked",
    ),
    # --- static members
    _kafka(
        "a_static_member_leaves",
        "client.last_callbacks",
        "        if not static:\n            client.unsubscribe()\n",
        "        client.unsubscribe()\n",
        "a static member that stops leaves its group, and its partitions move",
        "StaticStays",
    ),
    # --- a broker that goes away
    _kafka(
        "unanswered_is_stored",
        "client.commits",
        "        except KafkaException as failure:\n            self._answered(commit, failure.args[0])\n",
        "        except KafkaException as failure:\n"
        "            self._answered(commit, None if timeout is not None else failure.args[0])\n",
        "a commit in a revoke counts as stored when the broker goes away before its answer",
        "ConfirmedIsStored",
    ),
    _kafka(
        "unanswered_members_end_the_question",
        "client.membership",
        "                self._next = self.clock() + _AGAIN\n",
        "                self._next = float('inf')\n",
        "a member whose question after a freeze finds no broker starts nothing any more",
        "CaughtUp",
    ),
    _kafka(
        "refused_without_release",
        "client.commits",
        '"other messages at the same positions; check that a broker runs"\n        )\n        self._finish(commit)\n',
        '"other messages at the same positions; check that a broker runs"\n        )\n',
        "a release whose last commit finds no broker never ends, and neither does its revoke",
        "RevokesEnd",
        "StopEnds",
        "CaughtUp",
    ),
    # --- a value that changes during an await
    _kafka(
        "events_of_a_newer_demand",
        "client.thread",
        "        number = self._applied.number\n",
        "        number = self._demand.number\n",
        "messages read before a rewind are delivered under the number of a demand that the thread has not seen",
        "AtLeastOnce",
        "NothingLost",
        "DeliveredThenStarted",
        "OneTerminalOutcome",
        "PerKeyOrder",
        "ContractError",
        "SourceError",
    ),
    _kafka(
        "a_replaced_demand_rewinds_nothing",
        "client.prefetch",
        "        return dict(self._rewound)\n",
        "        return {each: self._rewound[each] for each in positions}\n",
        "a rewind is lost when a newer demand replaces its demand before the thread has seen it",
        *_DELIVERIES,
        first=1_210,
    ),
)

_ALSO: Final = {
    "closed_before_drained": ("CaughtUp",),
    "commit_in_lost": ("ExclusiveOwner",),
    "completed_forgotten": ("NoDuplicateCleanly",),
    "floor_plus_one": ("ConfirmedIsStored",),
    "kept_partition_stops": ("CaughtUp",),
    "pause_not_reset": ("CaughtUp",),
    "wrong_kind_of_assign": ("OwnersCommit", "CaughtUp"),
}
"""Mutants of ``table_kafka``, planted for other tests, and the checks of the campaign that find them too."""

ADAPTERS: Final = (
    *KAFKA,
    *JETSTREAM,
    *POSTGRES,
    *RANGES,
    *(
        replace(PLANTED[name], name=f"simulated_{name}", campaign="kafka_adapter", found_by=found_by)
        for name, found_by in _ALSO.items()
    ),
)
