"""A long run under faults on a real PostgreSQL: `python -m tests.soak.postgres --seconds 600 [--seed N]`.

The soak repeats rounds of the demo's subscription on one server, with separate schemas. At moments drawn from the seed,
the soak kills, freezes, stops and adds members, ends the sessions of their locks, and restarts the server. The server
crashes in every second round, and shuts down in the other rounds. Freezes last shorter or longer than a lease. The
checkers judge the history of every round.

The soak prints a line for each round, then one JSON object. The exit status is 1 after a broken promise, or after a
repeated message without an allowed cause. `--keep FOLDER` keeps the files of failed rounds in that folder.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final, Literal, cast, get_args

import psycopg

from demo import DemoConfig, Report
from demo.brokers.postgres import application_name
from demo.group.members import Members
from lanes.clock import monotonic
from tests.components import PostgresServer, wait_until
from tests.soak.storm import LEAST, Storm, play, soak

LEASE: Final = 4.0
MEMBERS: Final = 3
EVENTS: Final = 10_000

End = Literal["crash", "shutdown"]
"""How the server ends before it starts again."""


class Restarted:
    """The server of a round, which ends by a crash or by a shutdown."""

    def __init__(self, server: PostgresServer, end: End) -> None:
        self._server = server
        self._end = end

    def kill(self) -> None:
        """End the server, and block until it has ended."""
        if self._end == "crash":
            self._server.kill()
        else:
            # A fast shutdown: the server rolls back, and ends all sessions.
            os.kill(self._server.pid, signal.SIGINT)
            wait_until(lambda: not self._server.alive, "the server to shut down")

    def start(self) -> None:
        """Start the server with its former data, and block until it answers."""
        self._server.start()


class Sessions:
    """The sessions of the members' locks."""

    def __init__(self, chance: random.Random, server: PostgresServer, stream: str) -> None:
        self._chance = chance
        self._server = server
        self._stream = stream

    async def end(self, group: Members) -> None:
        """End the session of a member's locks at the server, so that they are free at once."""
        begun = [one for one in group.running if one.begun]
        if len(begun) <= LEAST:
            return
        member = self._chance.choice(begun)
        since = monotonic()
        # While the server is down, there is no session to end.
        if await asyncio.to_thread(self._terminate, member.name):
            group.note("cut", member.name, begun=since)

    def _terminate(self, member: str) -> bool:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
        try:
            with psycopg.connect(self._server.url, autocommit=True) as connection:
                return bool(connection.execute(query, (application_name(self._stream, member),)).fetchall())
        except psycopg.OperationalError:
            return False


async def round_of(server: PostgresServer, seed: int, kind: str, keep: Path) -> tuple[Report, Counter[str]]:
    """Run the members once with faults, on a server that ends by `kind`."""
    chance = random.Random(seed)
    name = f"soak-{seed}"
    sessions = Sessions(chance, server, f"declarations-{name}")
    storm = Storm(chance, Restarted(server, cast(End, kind)), LEASE, {"unlocked": sessions.end})
    latency, concurrency = chance.choice([0.002, 0.01, 0.03]), chance.choice([50, 300])
    config = DemoConfig(
        broker="postgres",
        server=server.url,
        name=name,
        events=EVENTS,
        seed=seed,
        latency=latency,
        concurrency=concurrency,
        # A low bound, so that the loss of a completed set is visible: a crash may repeat twice this number for each
        # partition.
        max_in_flight=2 * concurrency,
        serial_seconds=0.0,
        stall_timeout=90.0,
        members=MEMBERS,
        partitions=chance.choice([8, 32, 64]),
        lease=LEASE,
        script=storm,
        keep=keep,
    )
    return await play(config, storm, keep), storm.struck


def main() -> int:
    """Run the soak, and return the exit status."""
    with PostgresServer(settings=("max_connections=100",)) as server:
        return soak("python -m tests.soak.postgres", get_args(End), partial(round_of, server))


if __name__ == "__main__":
    sys.exit(main())
