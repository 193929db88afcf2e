"""A worker of the demo with a planted fault, of the engine or of the Kafka side:
``python -m tests.demo.kafka_mutants NAME``."""

from __future__ import annotations

import sys
from typing import Final

from tests.mutants import Mutant, install, table

KAFKA: Final = (
    Mutant(
        "begins_one_later",
        "lanes_kafka.client.offsets",
        "found[partition_id] = StartPosition(floor, completed, uncommitted=False)",
        "found[partition_id] = StartPosition(floor + (floor < high), completed, uncommitted=False)",
        "the lowest unfinished message is taken for finished by the next owner",
        "demo",
        ("lost: ",),
    ),
    Mutant(
        "completed_set_left_out",
        "lanes_kafka.client.commits",
        "if not self.limit or not settlement.completed:",
        "if True:",
        "the next owner does not hear of what had finished above the position",
        "demo",
        ("duplicates: ",),
    ),
    Mutant(
        "revoke_does_not_wait",
        "lanes_kafka.client.group",
        "while any(self._is_owned(each) for each in waiting) and not self.closing:",
        "while False:",
        "a partition is given away while its handlers run",
        "demo",
        ("duplicates: ", "overlaps: "),
    ),
    Mutant(
        "two_of_a_lane_that_commits",
        "lanes.core.chains",
        "            lane = message.lane\n            if lane is None:",
        "            lane = message.lane = None\n            if lane is None:",
        "no message waits for the one before it of its key",
        "demo",
        ("order violations: ",),
    ),
)

MUTANTS: Final = {mutant.name: mutant for mutant in KAFKA}


def main() -> int:
    """Install the mutant named first, then run the worker."""
    name = sys.argv[1]
    install(MUTANTS.get(name) or table.MUTANTS[name])
    from demo.workers.worker import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
