"""Ports for servers that are killed and started again at the same address."""

from __future__ import annotations

import random
import socket
from typing import Final

__all__ = ["ROUTES", "free_port", "free_ports"]

HOST: Final = "127.0.0.1"

# The range excludes the ports that the system assigns to connections. Otherwise a client of a dead server could get the
# server's port for itself, and connect to itself.
_PORTS: Final = range(20_000, 32_000)

ROUTES: Final = range(12_000, 20_000)
"""Ports between the servers of a cluster. They are chosen before the first server starts and cannot change, so no other
server gets a port of this range."""


def free_ports(count: int, among: range = _PORTS) -> list[int]:
    """Return different loopback ports that are free at the time of the call.

    Raises ``OSError`` if too few ports are free.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(among, 1_000):
        if len(found) == count:
            break
        with socket.socket() as probe:
            # A server sets this option too, so the remains of an ended connection do not occupy the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.append(port)
    if len(found) < count:
        raise OSError(
            f"{HOST}: of 1,000 ports in {among.start}–{among.stop - 1}, fewer than {count} are free; end other servers"
        )
    return found


def free_port() -> int:
    """Return one free port, like `free_ports`."""
    (port,) = free_ports(1)
    return port
