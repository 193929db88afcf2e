"""A long run under faults on a real Kafka: `python -m tests.soak.kafka --seconds 600 [--seed N]`.

The soak repeats rounds of the demo's group on one broker, with separate topics and alternating rebalance protocols. At
moments drawn from the seed, the soak kills, freezes, stops and adds members, and kills the broker. Freezes last shorter
or longer than a session. The checkers judge the history of every round.

The soak prints a line for each round, then one JSON object. The exit status is 1 after a broken promise, or after a
repeated message without an allowed cause. `--keep FOLDER` keeps the files of failed rounds in that folder.
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
    """Run the group once with faults, with the rebalance protocol `kind`."""
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
    """Run the soak, and return the exit status."""
    with KafkaServer() as server:
        return soak("python -m tests.soak.kafka", get_args(Protocol), partial(round_of, server))


if __name__ == "__main__":
    sys.exit(main())
