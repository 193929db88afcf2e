"""A real PgBouncer in front of a PostgreSQL server, on a free loopback port."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from tests.components.kafka_properties import HOST
from tests.components.ports import free_port
from tests.components.postgres_server import DATABASE, USER, PostgresServer
from tests.components.server import Server
from tests.components.supervised import ComponentError, MissingComponent, Supervised
from tests.components.waiting import wait_until

_PLACES: Final = (Path("/usr/sbin/pgbouncer"), Path("/usr/bin/pgbouncer"))
_NOBODY: Final = "nobody"


def find_pgbouncer() -> Path:
    """Return the program of PgBouncer. Raises ``MissingComponent`` if it is not installed."""
    found = shutil.which("pgbouncer")
    for place in (*([Path(found)] if found else []), *_PLACES):
        if place.is_file():
            return place
    raise MissingComponent("PgBouncer is missing: install the package of your system (Debian: apt install pgbouncer)")


class PgBouncer(Server):
    """A proxy in front of one server, in one folder, which `stop` removes. Not thread-safe.

    Args:
        server: The server, which has been started.
        mode: Time for which a client has a connection of the server.
        settings: Further lines of its configuration.
    """

    name = "pgbouncer"

    def __init__(
        self,
        server: PostgresServer,
        mode: Literal["session", "transaction", "statement"],
        *,
        settings: Sequence[str] = (),
    ) -> None:
        self._process = Supervised(self.name)
        self._server = server
        self._mode = mode
        self._settings = settings
        self._port = free_port()

    def __repr__(self) -> str:
        return f"<PgBouncer {self._mode} {self.url}, {self._process!r}>"

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"postgresql://{USER}@{HOST}:{self._port}/{DATABASE}"

    def prepare(self) -> None:
        """Check that PgBouncer is installed. Raises `MissingComponent` if not."""
        find_pgbouncer()

    def start(self) -> None:
        """Start the proxy, and block until it accepts connections."""
        folder = self._process.folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # the proxy changes to an ordinary user
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n{DATABASE} = host={HOST} port={self._server.port} dbname={DATABASE} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {self._port}\nunix_socket_dir =\nauth_type = any\n"
            + "".join(f"{line}\n" for line in (f"pool_mode = {self._mode}", "default_pool_size = 5", *self._settings))
        )
        config.chmod(0o644)
        user = ["-u", _NOBODY] if os.geteuid() == 0 else []
        self._process.launch([str(find_pgbouncer()), *user, str(config)])
        wait_until(self._answers, f"{self!r} to be ready", seconds=15.0)

    def stop(self) -> None:
        """End the proxy and remove its folder. Idempotent; blocks until done."""
        self._process.stop()

    def _answers(self) -> bool:
        if not self._process.alive:
            raise ComponentError(f"PgBouncer ended while starting: {self._process.last_words()}")
        try:
            with socket.create_connection((HOST, self._port), timeout=1.0):
                return True
        except OSError:
            return False
