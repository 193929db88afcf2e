"""Ports for servers that are killed and come back to the same address."""

from __future__ import annotations

import random
import socket
from typing import Final

__all__ = ["ROUTES", "free_port", "free_ports"]

HOST: Final = "127.0.0.1"

# A client that tries again and again to reach a dead server may be given the server's own port to come from, and then
# talks to itself; and while a server is away, anybody's connection may get it. So none that the system hands out.
_PORTS: Final = range(20_000, 32_000)

ROUTES: Final = range(12_000, 20_000)
"""For servers of a cluster among themselves. Each is told all of them before any is taken, and cannot choose another
when it starts, so whoever asks for any port gets none of these."""


def free_ports(count: int, among: range = _PORTS) -> list[int]:
    """Ports of loopback that were free a moment ago, all different. Raises ``OSError`` where there are none."""
    found: list[int] = []
    for port in random.SystemRandom().sample(among, 1_000):
        if len(found) == count:
            break
        with socket.socket() as probe:
            # As a server itself does: what an ended connection has left is not in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.append(port)
    if len(found) < count:
        raise OSError(f"no port free on {HOST} among 1,000 of {among.start}–{among.stop - 1}")
    return found


def free_port() -> int:
    """One of them."""
    (port,) = free_ports(1)
    return port
