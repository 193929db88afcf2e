"""The seams of the nats client and the adapter: their clocks, their random numbers, and their network.

Outside of a simulation, all replaced functions act as before.
"""

from __future__ import annotations

import os
import random
import time
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import nats.aio.client

from lanes_jetstream.wire import connection
from memsource.sim.loop.event_loop import SimLoop
from memsource.sim.world.world import EPOCH
from tests.simulated.jetstream.network import SimTransport

_RealTransport: Final[Any] = vars(nats.aio.client)["TcpTransport"]


def _simulated(original: Callable[..., Any], virtual: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function on the loop of a simulation. ``virtual`` receives the loop before the arguments."""

    def call(*args: Any) -> Any:
        loop = _get_running_loop()
        return virtual(loop, *args) if isinstance(loop, SimLoop) else original(*args)

    return call


async def _accepts(url: str) -> bool:
    """Replace the probe of a port. A member that is cut off reaches no port."""
    return False


@contextmanager
def seams() -> Iterator[None]:
    """Give the adapter and its client virtual time, seeded random numbers, and the simulated network."""
    with (
        patch.object(time, "monotonic", _simulated(time.monotonic, lambda loop: loop.time())),
        patch.object(time, "clock_gettime", _simulated(time.clock_gettime, lambda loop, clock: loop.time())),
        patch.object(time, "time", _simulated(time.time, lambda loop: EPOCH + loop.time())),
        patch.object(time, "time_ns", _simulated(time.time_ns, lambda loop: int((EPOCH + loop.time()) * 1e9))),
        patch.object(os, "urandom", _simulated(os.urandom, lambda loop, size: random.randbytes(size))),
        patch.object(random, "_urandom", _simulated(os.urandom, lambda loop, size: random.randbytes(size))),
        patch.object(nats.aio.client, "TcpTransport", _simulated(_RealTransport, lambda loop: SimTransport())),
        patch.object(connection, "_accepts", _accepts),
    ):
        yield
