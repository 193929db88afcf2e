"""A long run under faults on a real PostgreSQL: `python -m tests.soak.postgres --seconds 600 [--seed N] [--ranges]`.

The soak repeats rounds of the demo's subscription on one server, with separate schemas. At moments drawn from the seed,
the soak kills, freezes, stops and adds members, ends the sessions of their locks, and restarts the server. The server
crashes in every second round, and shuts down in the other rounds. Freezes last shorter or longer than a lease. The
checkers judge the history of every round.

With `--ranges`, the members own ranges of keys. At such moments the soak also moves a range, or a part of one, to
another member. An operator gives the ranges of members that have gone to others.

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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, cast, get_args

import psycopg

from demo import DemoConfig, Report
from demo.brokers.postgres import application_name
from demo.brokers.ranges import RangedBroker
from demo.errors import NoAnswer
from demo.group.members import Members
from lanes.clock import monotonic
from lanes.ring import Range
from tests.components import PostgresServer, wait_until
from tests.soak.storm import LEAST, Fault, Storm, arguments, play, soak

LEASE: Final = 4.0
MEMBERS: Final = 3
EVENTS: Final = 10_000
LOOK: Final = 0.5
"""Seconds between two looks of the operator at the map."""

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


class Operator:
    """The script of a round with ranges: a storm, and an operator who assigns the ranges of gone members.

    Args:
        chance: Source of all random choices.
        storm: The storm.
    """

    def __init__(self, chance: random.Random, storm: Storm) -> None:
        self._chance = chance
        self._storm = storm
        # A move chooses a range of a map that no other change may make stale.
        self._turn = asyncio.Lock()

    async def __call__(self, group: Members) -> None:
        """Run the storm to its end."""
        operating = asyncio.create_task(self._operate(group))
        try:
            await self._storm(group)
        finally:
            operating.cancel()
            await asyncio.gather(operating, return_exceptions=True)

    async def move(self, group: Members) -> None:
        """Move a range to another member. While the server is down, nothing moves."""
        await self._change(group, part=False)

    async def split(self, group: Members) -> None:
        """Move the upper half of a range, of a width that the seed chooses, to another member."""
        await self._change(group, part=True)

    async def _change(self, group: Members, *, part: bool) -> None:
        ranges = _ranges_of(group)
        async with self._turn:
            with suppress(NoAnswer):
                moved, _ = self._chance.choice(list(await ranges.owned()))
                if part and len(moved) > 1:
                    moved = Range(self._chance.randint(moved.lo + 1, moved.hi), moved.hi)
                await ranges.assign(moved, self._chance.choice(group.running).name)

    async def _operate(self, group: Members) -> None:
        ranges = _ranges_of(group)
        while True:
            await asyncio.sleep(LOOK)
            names = [one.name for one in group.running]
            if not names:
                continue
            async with self._turn:
                with suppress(NoAnswer):
                    for owner in sorted({each.consumer for each in await ranges.owned()} - set(names)):
                        await ranges.give_away(owner, self._chance.sample(names, len(names)))


def _ranges_of(group: Members) -> RangedBroker:
    assert isinstance(group.broker, RangedBroker), "only a round with ranges has an operator"
    return group.broker


async def round_of(
    server: PostgresServer, ranges: bool, seed: int, kind: str, keep: Path
) -> tuple[Report, Counter[str]]:
    """Run the members once with faults, on a server that ends by `kind`."""
    chance = random.Random(seed)
    name = f"soak-{seed}"
    sessions = Sessions(chance, server, f"declarations-{name}")
    faults: dict[str, Fault] = {"unlocked": sessions.end}
    storm = Storm(chance, Restarted(server, cast(End, kind)), LEASE, faults)
    operator = Operator(random.Random(seed + 1), storm)
    if ranges:
        storm.add({"moved": operator.move, "split": operator.split})
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
        partitions=chance.choice([8, 16] if ranges else [8, 32, 64]),
        lease=LEASE,
        ranges=ranges,
        script=operator if ranges else storm,
        keep=keep,
    )
    return await play(config, storm, keep), storm.struck


def main() -> int:
    """Run the soak, and return the exit status."""
    program = "python -m tests.soak.postgres"
    parser = arguments(program)
    parser.add_argument("--ranges", action="store_true", help="let the members own ranges of keys, which move")
    options = parser.parse_args()
    with PostgresServer(settings=("max_connections=100",)) as server:
        return soak(program, get_args(End), partial(round_of, server, options.ranges), options)


if __name__ == "__main__":
    sys.exit(main())
