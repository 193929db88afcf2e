"""Planted faults that the reports of the demo must show, on Kafka and in a JetStream cohort."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant
from tests.mutants.table import MUTANTS as CAMPAIGNS

GROUP: Final = (
    Mutant(
        "begins_one_later",
        "lanes_kafka.client.offsets",
        "found[partition_id] = StartPosition(floor, completed, uncommitted=False)",
        "found[partition_id] = StartPosition(floor + (floor < high), completed, uncommitted=False)",
        "the next owner treats the lowest unfinished message as finished",
        "demo",
        ("lost: ",),
    ),
    Mutant(
        "completed_set_left_out",
        "lanes_kafka.client.commits",
        "if not self.limit or not settlement.completed:",
        "if True:",
        "the next owner does not get the completed set",
        "demo",
        ("duplicates: ",),
    ),
    Mutant(
        "revoke_does_not_wait",
        "lanes_kafka.client.group",
        "while any(self.owns(each.partition) for each in waiting) and not self.closing and self.clock() < until:",
        "while False:",
        "a partition is released while its handlers run",
        "demo",
        ("duplicates: ", "overlaps: "),
    ),
    Mutant(
        "two_of_a_lane_that_commits",
        "lanes.core.chains",
        "            lane = message.lane\n            if lane is None:",
        "            lane = message.lane = None\n            if lane is None:",
        "a message does not wait for the earlier message of its key",
        "demo",
        ("order violations: ",),
    ),
)

COHORT: Final = (
    Mutant(
        "starts_behind_the_deadline",
        "lanes.workers.tasks",
        "                if now >= message.partition.deadline:\n",
        "                if False:\n",
        "a process that was frozen beyond its lease starts handlers",
        "demo",
        ("overlaps: ",),
    ),
)

MUTANTS: Final = CAMPAIGNS | {mutant.name: mutant for mutant in (*GROUP, *COHORT)}
"""All mutants that ``tests.mutants.worker`` can plant."""
