"""Consumers on a group: sources that commit positions."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Final

from lanes import Partition, Retry, SourceTraits
from memsource import Group, GroupSource
from tests.fakes.support import Run, turns, until

ONCE: Final = Retry(attempts=1)


def group_of(keys: Iterable[str], *, partitions: int = 1, cooperative: bool = False) -> Group:
    """A group with a message for each key."""
    group = Group(partitions, cooperative=cooperative)
    for number, key in enumerate(keys):
        group.publish(str(number), key=key)
    return group


def commits(source: GroupSource) -> list[int]:
    """The floors that were sent, in order."""
    return [each.floor for call in source.called("settle") for each in call.commits if each.floor is not None]


def epochs(run: Run) -> list[int]:
    """The epochs of a consumer's partitions."""
    return [partition.epoch for partition in run.consumer.status().partitions.values()]


class HandClock:
    """A clock that the test moves. ``asked`` counts the reads; in an idle run only timers read the clock."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now

    async def asked_again(self, times: int = 3) -> None:
        """Wait until timers that are not due have read the clock."""
        await turns()
        before = self.asked
        await until(lambda: self.asked >= before + times)


class RunClock(HandClock):
    """A clock that the test moves, for a run whose thread watches the loop.

    ``looks`` counts the reads by this thread.
    """

    looks = 0

    def __call__(self) -> float:
        self.looks += threading.current_thread().name == "lanes.loop"
        return super().__call__()

    async def looked(self) -> None:
        """Wait until the thread has read the clock, waited, and read the clock again."""
        before = self.looks
        await until(lambda: self.looks >= before + 3)


class Knowing(GroupSource):
    """A source that knows the lag of its first partition, and its number of partitions."""

    partitions: int | None = None

    async def open(self) -> SourceTraits:
        return dataclasses.replace(await super().open(), partitions=self.partitions)

    def lag(self, partition: Partition) -> int | None:
        return 41 if partition.id.number == 0 else None
