"""The calls made of a source in memory: what was called, and what a test lets them do instead of their job."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

import anyio
import anyio.lowlevel

from lanes.core.types import Partition, Room, Settlement
from lanes.dead_letter import DeadLetter
from memsource.memory.broker import Delivery

__all__ = ["Call", "CallName", "Faults", "Scripted", "ScriptedSource"]

CallName = Literal["open", "receive", "settle", "extend", "release", "put", "aclose"]


class Call(NamedTuple):
    """One call that was made, noted when it was made and whatever became of it.

    ``room`` is that of a ``receive``; ``deliveries`` are what a ``settle`` or an ``extend`` was about, in the
    order given, ``commits`` what a ``settle`` of a source that commits was about; ``partition`` is that of a
    ``release``; ``letter`` that of a ``put``.
    """

    name: CallName
    room: Room | None = None
    deliveries: tuple[Delivery, ...] = ()
    partition: int | None = None
    letter: DeadLetter | None = None
    commits: tuple[Settlement, ...] = ()

    @property
    def positions(self) -> list[int]:
        """The positions of the deliveries."""
        return [delivery.record.position for delivery in self.deliveries]


class Faults:
    """What calls do instead of their job, or besides it."""

    def __init__(self) -> None:
        self._failures: dict[CallName, deque[tuple[Exception, bool]]] = {}
        self._gates: dict[CallName, anyio.Event] = {}

    def fail(self, call: CallName, error: Exception, times: int, *, done: bool = False) -> None:
        """Let the next ``times`` of these calls raise ``error``: instead of their job, or when it is ``done``."""
        self._failures.setdefault(call, deque()).extend([(error, done)] * times)

    def block(self, call: CallName) -> None:
        """Let these calls hang until ``unblock``. Idempotent."""
        self._gates.setdefault(call, anyio.Event())

    def unblock(self, call: CallName) -> None:
        """Let them go on. Idempotent."""
        gate = self._gates.pop(call, None)
        if gate is not None:
            gate.set()

    @asynccontextmanager
    async def meet(self, call: CallName) -> AsyncIterator[None]:
        """Suspend once, as every call to a broker may; then hang or raise as told, before the block or behind it.

        Nothing suspends from the beginning of the block on.
        """
        await anyio.lowlevel.checkpoint()
        while call in self._gates:
            await self._gates[call].wait()
        failures = self._failures.get(call)
        error, done = failures.popleft() if failures else (None, False)
        if error is not None and not done:
            raise error
        yield
        if error is not None:
            raise error


class Scripted:
    """What a test does to the calls of anything in memory. ``calls`` is what was called so far. Nothing here blocks."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._faults = Faults()

    def _changed(self) -> None:
        """Whoever waits is to look again."""

    def fail(self, call: CallName, error: Exception, *, times: int = 1, done: bool = False) -> None:
        """Let the next ``times`` of these calls raise ``error``: instead of their job, or when it is ``done``."""
        self._faults.fail(call, error, times, done=done)
        self._changed()

    def block(self, call: CallName) -> None:
        """Let these calls hang until ``unblock``. Idempotent."""
        self._faults.block(call)
        self._changed()

    def unblock(self, call: CallName) -> None:
        """Let them go on. Idempotent."""
        self._faults.unblock(call)

    def called(self, name: CallName) -> list[Call]:
        """The calls of this name so far."""
        return [call for call in self.calls if call.name == name]


class ScriptedSource(Scripted):
    """The same of a source, which owns partitions."""

    def __init__(self) -> None:
        super().__init__()
        self._owned: dict[int, Partition] = {}
        self._finite = False

    def finish(self) -> None:
        """Make it finite: ``Exhausted`` follows once everything published in its own partitions is delivered."""
        self._finite = True
        self._changed()

    @property
    def owned(self) -> list[int]:
        """The partitions it has announced and neither released nor reported lost."""
        return list(self._owned)
