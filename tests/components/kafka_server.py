"""A real Apache Kafka broker, a whole cluster of one node, on loopback ports of its own choice."""

from __future__ import annotations

import shutil
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.components.kafka_installation import install, wait_started
from tests.components.kafka_properties import HOST, Ports, choose_ports, server_properties, write_properties
from tests.components.server import Server
from tests.components.supervised import ComponentError, Supervised
from tests.components.waiting import wait_until

_ATTEMPTS = 5
_ANSWER_SECONDS = 2.0
# ApiVersions, version 0, without a client id: what a broker answers to anybody.
_WHO_ARE_YOU = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class KafkaServer(Server):
    """One broker in one folder, which is removed at `stop`. Not for use by several threads at once.

    `directory`: an empty or missing folder; none = a fresh one among the system's temporary files. `properties` are
    server settings that win over the usual ones (fast groups, no automatic topics, factor 1). Once started, the broker
    keeps its ports and data through `kill` and a second `start`. `users`: passwords by name; clients then have to log
    in by SASL/PLAIN, `admin` may do everything, and the others what an ACL allows them. `arguments` are for Java, such
    as `-Xmx512m`. `seconds` bounds a start, without what is fetched before the first one.
    """

    name = "kafka"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        properties: Mapping[str, str | int] | None = None,
        users: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        seconds: float = 45.0,
    ) -> None:
        if isinstance(arguments, str):
            raise TypeError(f"arguments is a sequence of strings, not the string {arguments!r}")
        self._process = Supervised(self.name, directory)
        self._ports: Ports | None = None
        self._properties = dict(properties or {})
        self._users = dict(users or {})
        self._arguments = tuple(arguments)
        self._seconds = seconds

    def __repr__(self) -> str:
        return f"<KafkaServer {self.url if self._ports else 'not started'}, {self._process!r}>"

    @property
    def url(self) -> str:
        """Where clients connect (`bootstrap.servers`); known, and the same, from the first start to `stop`."""
        return f"{HOST}:{self._known_ports().clients}"

    @property
    def admin_url(self) -> str:
        """Where nobody has to log in and everybody may do everything; without `users` it is `url`."""
        return f"{HOST}:{self._known_ports().inside}"

    def config(self, user: str | None = None) -> dict[str, Any]:
        """What a client has to set to reach this broker, as this user of `users`. It holds the password."""
        config: dict[str, Any] = {"bootstrap.servers": self.url}
        if user is not None:
            config |= {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": user,
                "sasl.password": self._users[user],
            }
        return config

    def prepare(self) -> None:
        """Have the broker's jars. Blocks, the first time for seconds to minutes; MissingComponent without them."""
        install()

    def start(self) -> None:
        """Start the broker and block until it says it has started. Idempotent; ends a `pause`.

        The first group of a new broker still takes one to three seconds: it makes its own topic for groups.
        """
        if self.alive:
            self.resume()
            wait_until(self._answers, f"{self!r} to answer", seconds=self._seconds)
            return
        first = self._ports is None
        for attempt in range(_ATTEMPTS):
            self._ports = self._ports or choose_ports(login=bool(self._users))
            try:
                self._launch(self._ports)
                break
            except ComponentError as error:
                if "Address already in use" not in str(error):
                    self._give_up(first)
                    raise
                taken = f"one of the ports {tuple(self._ports)} on {HOST} is taken"
                self._give_up(first)
                if not first or attempt == _ATTEMPTS - 1:
                    raise ComponentError(f"{taken}: end what listens there, then start again") from error
            except BaseException:
                self._give_up(first)
                raise
        self._process.write_state({"component": self.name, "pid": self.pid, "url": self.url})

    def stop(self) -> None:
        """End the broker and remove its folder. Idempotent; blocks until done."""
        if self.alive:
            self._process.signal(signal.SIGKILL)  # nothing of it is kept, so it need not put anything in order
        self._process.stop()
        self._ports = None

    def _known_ports(self) -> Ports:
        if self._ports is None:
            raise ComponentError("the Kafka broker has no address yet: call start()")
        return self._ports

    def _launch(self, ports: Ports) -> None:
        """Start a broker on these ports, on the data that is there, and block until it has started."""
        installation = install()
        folder = self._process.folder
        folder.mkdir(parents=True, exist_ok=True)
        data, properties, log = folder / "data", folder / "server.properties", folder / "log"
        wanted = server_properties(data, ports, self._users, self._properties)
        command = installation.command(properties, temporary=folder / "run", arguments=self._arguments)
        if self._process.occupied():
            raise ComponentError(f"a broker lives in {folder} already: stop it, or give this one a folder of its own")
        if not data.exists():
            draft = folder / "data.new"
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(installation.formatted, draft)
            draft.rename(data)  # at once: half a copy would be taken for a broker of another cluster
        write_properties(properties, wanted)
        begin = log.stat().st_size if log.exists() else 0
        if self._process.launch(command) is None:
            raise ComponentError(f"a broker was started in {folder} just now: give this one a folder of its own")
        try:
            wait_started(self._process, begin, self._seconds)
        except TimeoutError as error:
            raise ComponentError(f"{error}; it said: {self._process.last_words()}") from error

    def _give_up(self, first: bool) -> None:
        """After a start that failed: nothing of a first one is worth keeping, all data of a later one is."""
        if first:
            self.stop()
        elif self.alive:
            self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self._known_ports().clients), _ANSWER_SECONDS) as connection:
                connection.sendall(_WHO_ARE_YOU)
                return len(connection.recv(4)) == 4
        except OSError:
            return False
