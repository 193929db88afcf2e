"""A long run under faults on a real NATS server: `python -m tests.soak.jetstream --seconds 600 [--seed N]`.

Round after round of the demo's cohort, each on streams of its own, on one server and with every retention in turn:
members are killed with -9, frozen beyond and below their lease, cut off from the server for as long, disconnected,
stopped, added, and the server is killed with -9, at moments drawn from the seed. Every round is checked by its
histories. Prints a line a round, then one JSON object; status 1 when a promise broke, or when a run was repeated that
nothing excuses. `--keep FOLDER`: keeps the files of such rounds there.
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
    """How members reach the server: each by a wire of its own."""

    def __init__(self, chance: random.Random, url: str) -> None:
        self._chance = chance
        # No more members ever join than there are at first, and one for each fault.
        self._wires = {f"member-{number}": Proxy(url) for number in range(1, MEMBERS + FAULTS + 1)}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Wires]:
        """For as long as the context lasts."""
        async with AsyncExitStack() as opened:
            for wire in self._wires.values():
                await opened.enter_async_context(wire.open())
            yield self

    def route(self, member: str) -> str:
        """The address that a member is told."""
        return self._wires[member].url

    async def drop(self, group: Members) -> None:
        """End the connections of one; it may connect again at once."""
        await self._cut(group, 0.0, drop=True)

    async def silence(self, group: Members) -> None:
        """Let nothing pass for less than a lease, and then everything that was said."""
        await self._cut(group, self._chance.uniform(0.1, LEASE / 2), drop=False)

    async def isolate(self, group: Members) -> None:
        """Let nothing pass for longer than a lease, and then nothing or everything that was said."""
        await self._cut(group, self._chance.uniform(LEASE + 1.0, LEASE + 4.0), drop=self._chance.random() < 0.5)

    async def _cut(self, group: Members, seconds: float, *, drop: bool) -> None:
        # One that has only begun may end for want of a server, as a process should.
        begun = [one for one in group.running if one.begun]
        if len(begun) <= LEAST:
            return
        member = self._chance.choice(begun)
        wire, since = self._wires[member.name], monotonic()
        # Like a frozen one it is not counted upon until it is back.
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
    """One run of the cohort with its faults, on a stream of the retention `kind`."""
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
        # So few that a done-set which is lost shows: a crash may repeat twice as many of a partition.
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
    """The soak; returns the exit status."""
    with NatsServer() as server:
        return soak("python -m tests.soak.jetstream", get_args(Retention), partial(round_of, server))


if __name__ == "__main__":
    sys.exit(main())
