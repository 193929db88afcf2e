"""Rosters of members without their members: one bucket and one stream in memory, in virtual time."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Final

import pytest

from lanes.cohort.roster import Roster
from lanes.core.cohort.plan import PLAN_RULES
from lanes.core.cohort.records import CohortConfig, Heartbeat, encode, member_key
from memsource.jetstream.epoch_consumers import MemoryEpochConsumers
from memsource.jetstream.lease_store import MemoryLeaseStore
from memsource.jetstream.link import Link
from tests.cohort.members import Servers, config_of, never

__all__ = ["MARGIN", "TTL", "Desk", "Store", "lines"]

TTL: Final = 6.0
MARGIN: Final = 1.0


class Store(MemoryLeaseStore):
    """A store that runs ``before[key]`` once before the next write of a key, and raises the error that it returns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: dict[str, Any] = {}

    async def write(self, key: str, *arguments: Any, **named: Any) -> int:
        act = self.before.pop(key, None)
        error = None if act is None else act()
        if isinstance(error, Exception):
            raise error
        return await super().write(key, *arguments, **named)


class Desk:
    """Rosters of members over one bucket and one stream."""

    def __init__(self, partitions: int = 2, retention: Any = "limits") -> None:
        self.servers = Servers(retention, partitions)
        self.clock = self.servers.clock
        self.config = config_of(partitions=partitions, retention=retention)
        self.stores: list[Store] = []

    def roster(self, member: str, config: CohortConfig | None = None, *, consumers: Any = None, **about: Any) -> Roster:
        link = Link(self.clock, never)
        self.stores.append(Store(self.servers.bucket, link))
        named = {"nonce": f"of {member}", "session": 1000, "ttl": TTL, "start": None, "clock": self.clock, **about}
        durables = (consumers or MemoryEpochConsumers)(self.servers.stream, link, int(named["ttl"]))
        return Roster(self.stores[-1], durables, config or self.config, member=member, **named)

    async def joined(self, member: str, **about: Any) -> Roster:
        """A member that has set the cohort up, joined and planned."""
        made = self.roster(member, **about)
        await made.set_up()
        await made.join()
        await made.look()
        return made

    def read(self, key: str) -> bytes | None:
        return self.servers.bucket.read(key, self.clock()).value

    def write(self, key: str, value: bytes, ttl: float | None = None) -> None:
        bucket, now = self.servers.bucket, self.clock()
        bucket.write(key, value, now, revision=bucket.read(key, now).revision, ttl=ttl)

    def heartbeat(self, member: str, **changed: Any) -> None:
        """Write the heartbeat of another member."""
        made = Heartbeat(nonce=f"of {member}", weight=1, active_members=None, session=1000, lease=6, rules=PLAN_RULES)
        self.write(member_key(member), encode(dataclasses.replace(made, **changed)), ttl=TTL)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]
