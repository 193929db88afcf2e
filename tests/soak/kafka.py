"""A long run under faults on a real Kafka: `python -m tests.soak.kafka --seconds 600 [--seed N]`.

Round after round of the demo's group, each on topics of its own, on one broker and in every protocol in turn: members
are killed with -9, frozen beyond and below their session, stopped, added, and the broker is killed with -9, at moments
drawn from the seed. Every round is checked by its histories. Prints a line a round, then one JSON object; status 1 when
a promise broke, or when a run was repeated that nothing excuses. `--keep FOLDER`: keeps the files of such rounds there.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import cast, get_args

from demo import DemoConfig, Report
from demo.brokers.backends import SESSION
from demo.config import Protocol
from tests.components import KafkaServer
from tests.soak.storm import EVENTS, Storm, play, soak


async def round_of(server: KafkaServer, seed: int, kind: str, keep: Path) -> tuple[Report, Counter[str]]:
    """One run of the group with its faults, by the protocol `kind`."""
    chance = random.Random(seed)
    storm = Storm(chance, server, SESSION)
    config = DemoConfig(
        broker="kafka",
        server=server.url,
        events=EVENTS,
        seed=seed,
        latency=chance.choice([0.002, 0.01, 0.03]),
        concurrency=chance.choice([50, 300]),
        serial_seconds=0.0,
        stall_timeout=90.0,
        protocol=cast(Protocol, kind),
        script=storm,
        keep=keep,
    )
    return await play(config, storm, keep), storm.struck


def main() -> int:
    """The soak; returns the exit status."""
    with KafkaServer() as server:
        return soak("python -m tests.soak.kafka", get_args(Protocol), partial(round_of, server))


if __name__ == "__main__":
    sys.exit(main())
