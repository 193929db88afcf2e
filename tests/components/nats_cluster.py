"""A cluster of several NATS servers, for streams with more than one copy."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path

from tests.components.nats_server import NatsServer
from tests.components.ports import ROUTES, free_ports
from tests.components.server import Started
from tests.components.supervised import ComponentError

_HOST = "127.0.0.1"


class NatsCluster(Started):
    """A cluster of `size` servers, named n1, n2, …; a test may kill and start each of `servers`. Not thread-safe.

    `seconds` bounds the start of each server.
    """

    def __init__(self, size: int = 3, *, seconds: float = 60.0, program: Path | None = None) -> None:
        routes = free_ports(size, ROUTES)
        urls = ",".join(f"nats://{_HOST}:{port}" for port in routes)
        self.names: Sequence[str] = [f"n{number}" for number in range(1, size + 1)]
        self.servers: Sequence[NatsServer] = [
            NatsServer(
                arguments=[
                    *("-n", name, "--cluster_name", "lanes"),
                    *("--cluster", f"nats://{_HOST}:{port}", "--routes", urls),
                ],
                seconds=seconds,
                program=program,
            )
            for name, port in zip(self.names, routes, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<NatsCluster of {len(self.servers)}: {', '.join(map(repr, self.servers))}>"

    @property
    def url(self) -> str:
        """The address for clients: the addresses of all servers, separated by commas."""
        return ",".join(server.url for server in self.servers)

    def server(self, name: str) -> NatsServer:
        """The server with this name in the cluster."""
        return self.servers[self.names.index(name)]

    def prepare(self) -> None:
        """Check that `nats-server` is installed. Raises `MissingComponent` if the program is missing."""
        for server in self.servers:
            server.prepare()

    def start(self) -> None:
        """Start all servers, and block until each server answers. A server answers once most servers have started.
        Idempotent."""
        try:
            with concurrent.futures.ThreadPoolExecutor(len(self.servers)) as pool:
                for started in [pool.submit(server.start) for server in self.servers]:
                    started.result()
        except ComponentError:
            self.stop()
            raise

    def stop(self) -> None:
        """End all servers and remove their folders. Idempotent; blocks until done."""
        for server in self.servers:
            server.stop()
