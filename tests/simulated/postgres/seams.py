"""The seams of the adapter: its clocks, its random numbers, its client and its sockets.

Outside of a simulation, all replaced functions act as before.
"""

from __future__ import annotations

import os
import random
import time
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lanes_postgres import connecting, lock_session, steps, transactions
from memsource.sim.loop.event_loop import SimLoop
from memsource.sim.world.world import EPOCH
from tests.simulated.postgres.client import FIRST_DESCRIPTOR, Line, Network, SimConnection, SimCursor


def _simulated(original: Callable[..., Any], virtual: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function on the loop of a simulation. ``virtual`` receives the loop before the arguments."""

    def call(*args: Any) -> Any:
        loop = _get_running_loop()
        return virtual(loop, *args) if isinstance(loop, SimLoop) else original(*args)

    return call


def _line(descriptor: int) -> Line:
    return Network.current.lines[descriptor - FIRST_DESCRIPTOR]


def _add_reader(loop: SimLoop, descriptor: int, callback: Callable[..., object], *arguments: Any) -> None:
    _line(descriptor).watch(callback, arguments)


def _remove_reader(loop: SimLoop, descriptor: int) -> bool:
    return _line(descriptor).unwatch()


@contextmanager
def seams() -> Iterator[None]:
    """Give the adapter virtual time, seeded random numbers, and simulated connections."""
    system = SimpleNamespace(dup=lambda descriptor: descriptor, close=lambda descriptor: None)
    with (
        patch.object(time, "monotonic", _simulated(time.monotonic, lambda loop: loop.time())),
        patch.object(time, "clock_gettime", _simulated(time.clock_gettime, lambda loop, clock: loop.time())),
        patch.object(time, "time", _simulated(time.time, lambda loop: EPOCH + loop.time())),
        patch.object(os, "urandom", _simulated(os.urandom, lambda loop, size: random.randbytes(size))),
        patch.object(random, "_urandom", _simulated(os.urandom, lambda loop, size: random.randbytes(size))),
        patch.object(SimLoop, "add_reader", _add_reader),
        patch.object(SimLoop, "remove_reader", _remove_reader),
        patch.object(lock_session, "os", system),
        patch.object(lock_session, "AsyncConnection", SimConnection),
        patch.object(lock_session, "AsyncCursor", SimCursor),
        patch.object(connecting, "AsyncConnection", SimConnection),
        patch.object(steps, "AsyncCursor", SimCursor),
        patch.object(transactions, "AsyncConnection", SimConnection),
    ):
        yield
