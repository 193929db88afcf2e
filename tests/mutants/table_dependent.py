"""Mutants that only several events in a row show, which the campaigns over real adapters must find.

No campaign was written for them. Each is of one of six kinds: a fault and a second fault that depends on it, conditions
that are rarely true together, or a check that later passes of a loop leave out. The other kinds are state that outlives
its subject, a broker that goes away during a wait, and a value that changes during an ``await``.
"""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant


def _kafka(name: str, module: str, old: str, new: str, breaks: str, *found_by: str, first: int = 0) -> Mutant:
    return Mutant(name, f"lanes_kafka.{module}", old, new, breaks, "kafka_adapter", found_by, first=first)


def _jetstream(name: str, module: str, old: str, new: str, breaks: str, *found_by: str, first: int = 0) -> Mutant:
    return Mutant(name, f"lanes_jetstream.{module}", old, new, breaks, "jetstream_adapter", found_by, first=first)


_KAFKA: Final = (
    # A fault, and then a fault that depends on it.
    _kafka(
        "a_lost_question_for_ids_stays_open",
        "client.topics",
        "            self._asked = {}\n            self.contact.unanswered(self._asked_at, _NEITHER)\n",
        "            self.contact.unanswered(self._asked_at, _NEITHER)\n",
        "after a question for topic ids that gets neither answer nor error, nothing is committed any more",
        "CaughtUp",
        first=1,
    ),
    # Three conditions that are rarely true together.
    _kafka(
        "a_split_lets_progress_pass",
        "client.prefetch",
        "                    event, rest = _split(event, count)\n                    full.add(partition)\n",
        "                    event, rest = _split(event, count)\n",
        "the end of a gap is delivered before the rest of a run that the room has split",
        "ContractError",
        "NothingLost",
        "AtLeastOnce",
        first=8,
    ),
    _kafka(
        "a_rewind_begins_at_the_last_run",
        "client.prefetch",
        "                positions.setdefault(event.partition, event.run[0].position)\n",
        "                positions[event.partition] = event.run[0].position\n",
        "a rewind of a partition with two prefetched runs skips the first one",
        "NothingLost",
        first=4,
    ),
    # A check that every pass of a loop needs.
    _kafka(
        "retries_of_start_positions_never_end",
        "client.group",
        "                if is_permanent(error) or self.closing or self.clock() >= until:\n                    raise\n",
        "                if is_permanent(error) or self.closing or (not warned and self.clock() >= until):\n"
        "                    raise\n",
        "the second and later questions for start positions outlast max.poll.interval.ms",
        "RevokesEnd",
        first=33,
    ),
    _kafka(
        "a_revoke_waits_for_one_partition",
        "client.group",
        "            while any(self.owns(each.partition) for each in waiting) and not",
        "            while any(self.owns(each.partition) for each in waiting[:1]) and not",
        "a revoke gives all its partitions up when the first one is released",
        "RevokesWait",
        first=4,
    ),
    # State of an earlier assignment, ownership or request.
    _kafka(
        "both_calls_of_a_read_make_one_list",
        "client.intake",
        "        events = self._events(raws)\n"
        "        if events and count > 1:\n"
        "            raws = self._consume(count - 1, 0.0)\n"
        "            events = _joined(events[0], self._events(raws))\n"
        "            count -= 1\n",
        "        if raws and count > 1:\n"
        "            first, raws = raws, self._consume(count - 1, 0.0)\n"
        "            return self._events(first + raws), len(raws) >= count - 1\n"
        "        events = self._events(raws)\n",
        "a revoke between the two calls of a read takes the first message for a gap",
        "PerKeyOrder",
        "OrderAcrossAssignments",
        "AtLeastOnce",
        "NothingLost",
        first=149,
    ),
    # A broker that goes away while a step waits.
    _kafka(
        "a_revoke_commits_without_topic_ids",
        "client.commits",
        "        elif _has_ids(commit):\n"
        "            self._refuse(commit)\n"
        "            return\n"
        "        self._send(client, commit, timeout=",
        "        self._send(client, commit, timeout=",
        "a commit in a revoke is sent although the question for its topic ids was lost",
        "CommitsAreChecked",
        first=30,
    ),
    _kafka(
        "a_failed_question_for_ids_counts",
        "client.commits",
        "        answered = self.topics.wait(deadline - self.clock())\n        self._check()\n        if answered:\n",
        "        answered = self.topics.wait(deadline - self.clock()) or bool(self.topics._failed)\n"
        "        self._check()\n"
        "        if answered:\n",
        "a commit in a revoke is sent after a question for topic ids that failed",
        "CommitsAreChecked",
        first=30,
    ),
)

_JETSTREAM: Final = (
    # A fault, and then a fault that depends on it.
    _jetstream(
        "js_gap_of_a_durable_unseen",
        "durable.source",
        "                if expected is not None and delivery != expected:\n",
        "                if expected is not None and delivery < expected:\n",
        "a delivery of a durable that did not arrive is handled after newer messages of its key",
        "PerKeyOrder",
        first=10,
    ),
    # State of an earlier assignment, ownership or request.
    _jetstream(
        "js_requests_outlive_their_connection",
        "wire.pull_requests",
        "        self.outstanding = 0\n        self._open = 0\n        self._oversized = False\n",
        '        self.outstanding = getattr(self, "outstanding", 0)\n'
        "        self._open = 0\n"
        "        self._oversized = False\n",
        "requests of an ended connection keep their part of the room",
        "CaughtUp",
        first=10,
    ),
    _jetstream(
        "js_expected_of_the_former_durable",
        "cohort.owned_partition",
        "        self.begin()\n        # These",
        "        self.rest()\n        # These",
        "the delivery number of a durable is expected of the durable after it",
        "GapIsReal",
        "SourceError",
        first=2,
    ),
    # A broker that goes away while a step waits.
    _jetstream(
        "js_confirmed_by_nobody",
        "wire.acks",
        "            # No server responds, because the consumer was deleted or has no leader at present.\n"
        "            return\n",
        "            pass\n",
        "an acknowledgement that no server has read counts as confirmed",
        "ConfirmedIsRead",
    ),
    # A value that changes during an await, or between two calls of a client.
    _jetstream(
        "js_a_cancelled_takeover_is_complete",
        "durable.source",
        "                self._taken_over = False\n                self._expected = None\n                collected",
        "                self._expected = None\n                collected",
        "a takeover that was cancelled after its first steps is not repeated",
        "SourceError",
        "PerKeyOrder",
        first=210,
    ),
    _jetstream(
        "js_a_leaderless_durable_is_asked_once",
        "cohort.watch",
        "                    await asyncio.sleep(_RETRY_DELAY)\n                    continue\n",
        "                    return\n",
        "a partition whose durable has no leader when the member asks rests for ever",
        "CaughtUp",
        first=2,
    ),
    Mutant(
        "js_actions_outlast_the_lease",
        "lanes.cohort.keeper",
        "            patience = wait if 0 < wait < math.inf else math.inf\n",
        "            patience = math.inf\n",
        "a request without an answer delays the news that the lease has ended",
        "jetstream_adapter",
        ("LossInTime",),
        first=13,
    ),
)

DEPENDENT: Final = (*_KAFKA, *_JETSTREAM)
"""All of these mutants."""
