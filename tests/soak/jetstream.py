"""A long run under faults on a real NATS server: `python -m tests.soak.jetstream --seconds 600 [--seed N]`.

The soak repeats rounds of the demo's cohort on one server, with separate streams and alternating retentions. At moments
drawn from the seed, the soak kills, freezes, disconnects, isolates, stops and adds members, and kills the server.
Freezes and isolations last shorter or longer than a lease. The checkers judge the history of every round.

The soak prints a line for each round, then one JSON object. The exit status is 1 after a broken promise, or after a
repeated message without an allowed cause. `--keep FOLDER` keeps the files of failed rounds in that folder.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, cast, get_args

from demo import DemoConfig, Report
from demo.config import Retention
from demo.group.members import Members
from lanes.clock import monotonic
from tests.components import NatsServer
from tests.jetstream.proxy import Proxy
from tests.soak.storm import EVENTS, FAULTS, LEAST, Storm, play, soak

LEASE: Final = 4.0
MEMBERS: Final = 3


class Wires:
    """The connections of the members to the server: each member has a separate proxy."""

    def __init__(self, chance: random.Random, url: str) -> None:
        self._chance = chance
        # At most one member joins for each fault, besides the initial members.
        self._wires = {f"member-{number}": Proxy(url) for number in range(1, MEMBERS + FAULTS + 1)}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Wires]:
        """Run the proxies during the context."""
        async with AsyncExitStack() as opened:
            for wire in self._wires.values():
                await opened.enter_async_context(wire.open())
            yield self

    def route(self, member: str) -> str:
        """Return the address that a member connects to."""
        return self._wires[member].url

    async def drop(self, group: Members) -> None:
        """End the connections of a member, which may reconnect at once."""
        await self._cut(group, 0.0, drop=True)

    async def silence(self, group: Members) -> None:
        """Hold back all data of a member for less than a lease, then deliver all data."""
        await self._cut(group, self._chance.uniform(0.1, LEASE / 2), drop=False)

    async def isolate(self, group: Members) -> None:
        """Hold back all data of a member for longer than a lease, then deliver all data or no data."""
        await self._cut(group, self._chance.uniform(LEASE + 1.0, LEASE + 4.0), drop=self._chance.random() < 0.5)

    async def _cut(self, group: Members, seconds: float, *, drop: bool) -> None:
        # Only members that have started, because a starting member may end if it cannot reach the server.
        begun = [one for one in group.running if one.begun]
        if len(begun) <= LEAST:
            return
        member = self._chance.choice(begun)
        wire, since = self._wires[member.name], monotonic()
        # Like a frozen member, a cut-off member does not count as present.
        member.frozen = True
        wire.silence()
        try:
            await asyncio.sleep(seconds)
        finally:
            if drop:
                wire.drop()
            wire.resume()
            member.frozen = False
            group.note("cut", member.name, begun=since)


async def round_of(server: NatsServer, seed: int, kind: str, keep: Path) -> tuple[Report, Counter[str]]:
    """Run the cohort once with faults, on a stream with the retention `kind`."""
    chance = random.Random(seed)
    wires = Wires(chance, server.url)
    more = {"dropped": wires.drop, "silenced": wires.silence, "isolated": wires.isolate}
    storm = Storm(chance, server, LEASE, more)
    latency, concurrency = chance.choice([0.002, 0.01, 0.03]), chance.choice([50, 300])
    config = DemoConfig(
        server=server.url,
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
        retention=cast(Retention, kind),
        route=wires.route,
        script=storm,
        keep=keep,
    )
    async with wires.open():
        return await play(config, storm, keep), storm.struck


def main() -> int:
    """Run the soak, and return the exit status."""
    with NatsServer() as server:
        return soak("python -m tests.soak.jetstream", get_args(Retention), partial(round_of, server))


if __name__ == "__main__":
    sys.exit(main())
