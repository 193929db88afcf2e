"""A member with ranges gives pieces up on a simulated server whose answers are late or lost, in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from lanes.core.types import Partition, Room
from lanes.errors import SourceError
from lanes.source import Assigned
from lanes_postgres import Log, PostgresSource, RangeMap
from memsource.adapters.choices import DELIVER, Choice
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run
from tests.simulated.postgres.client import Network, SimConnection
from tests.simulated.postgres.log import ReferenceLog
from tests.simulated.postgres.member import SUBSCRIPTION, URL
from tests.simulated.postgres.seams import seams
from tests.simulated.postgres.server import PostgresServer
from tests.simulated.postgres.statements import LOG, SCHEMA

ROOM = Room(10, 1_000)
SLOTS, PART = 1, 3
"""Numbers of the piece with all slots, and of its first part. The second piece has the messages without a key."""


class Owner:
    """The owner of all slots, and the fates of its next statements by their names."""

    def __init__(self) -> None:
        self.fates: dict[str, list[Choice]] = {}
        self.network = Network(PostgresServer(ReferenceLog(1)), Random(0), (0.001,), self._fate)
        self.map = RangeMap(Log(LOG, schema=SCHEMA), group=SUBSCRIPTION)
        self.source = self.member("a")

    def member(self, consumer: str) -> PostgresSource:
        """A source that is not open."""
        return PostgresSource(URL, self.map.log, subscription=SUBSCRIPTION, ranges=self.map.member(consumer))

    def _fate(self, member: str, call: str) -> Choice:
        fates = self.fates.get(call)
        return fates.pop(0) if fates else DELIVER

    async def assigned(self, seconds: float, piece: int = SLOTS) -> Partition | None:
        """The next assignment of a piece within some seconds."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    for event in await self.source.receive(ROOM):
                        if isinstance(event, Assigned) and event.partition.id.piece == piece:
                            return event.partition
        except TimeoutError:
            return None


def played(play: Callable[[Owner, Partition], Awaitable[None]]) -> None:
    """Let a member own all slots, and play."""

    async def main() -> None:
        owner = Owner()
        try:
            connection = await SimConnection.connect()
            assert await owner.map.assign(connection, 0, 65_535, "a")  # type: ignore[call-overload]
            await owner.source.open()
            piece = await owner.assigned(10.0)
            assert piece is not None
            await play(owner, piece)
            await owner.source.aclose()
        finally:
            owner.network.end()

    with seams():
        run(main, chooser=Fifo())


def test_a_member_acquires_no_piece_again_before_its_release_has_ended() -> None:
    async def play(owner: Owner, piece: Partition) -> None:
        # The hand-over notifies too, before the lock is free.
        owner.fates["notify"] = [DELIVER, Choice("delay", 5.0)]
        releasing = asyncio.ensure_future(owner.source.release(piece))
        assert await owner.assigned(4.0) is None
        assert not releasing.done()
        await releasing
        assert await owner.assigned(10.0) is not None

    played(play)


def test_a_piece_whose_release_failed_is_acquired_again() -> None:
    async def play(owner: Owner, piece: Partition) -> None:
        owner.fates["hand over"] = [Choice("drop_request", 0.1)]
        with pytest.raises(SourceError, match=rf"^{re.escape(owner.source.declared().name)}: "):
            await owner.source.release(piece)
        assert await owner.assigned(10.0) is not None

    played(play)


def test_a_piece_whose_release_was_cancelled_is_acquired_again() -> None:
    async def play(owner: Owner, piece: Partition) -> None:
        owner.fates["hand over"] = [Choice("delay", 2.0)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await owner.source.release(piece)
        assert await owner.assigned(10.0) is not None

    played(play)


def test_a_part_whose_former_owner_has_left_is_acquired() -> None:
    """The former owner has not seen the move, so it has not ended the drain."""

    async def play(owner: Owner, piece: Partition) -> None:
        await owner.source.aclose()
        connection = await SimConnection.connect()
        await owner.map.assign(connection, 32_768, 65_535, "b")  # type: ignore[call-overload]
        owner.source = owner.member("b")
        await owner.source.open()
        assert await owner.assigned(10.0, PART) is not None

    played(play)
