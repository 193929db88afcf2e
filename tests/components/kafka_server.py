"""A real Apache Kafka broker: a cluster of one node, on free loopback ports."""

from __future__ import annotations

import shutil
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.components.kafka_installation import install, wait_started
from tests.components.kafka_properties import HOST, Ports, choose_ports, server_properties, write_properties
from tests.components.server import Server
from tests.components.supervised import ComponentError, Supervised
from tests.components.waiting import wait_until

_ATTEMPTS = 5
_ANSWER_SECONDS = 2.0
# ApiVersions, version 0, without a client id: a broker answers this request without a login.
_WHO_ARE_YOU = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class RunningBroker(NamedTuple):
    """The folder and the ports of a broker that another process has started."""

    folder: Path
    ports: Ports


class KafkaServer(Server):
    """One broker in one folder, which `stop` removes. Not thread-safe.

    After the first start, the broker keeps its ports and data through `kill` and a second `start`.

    Args:
        directory: An empty or missing folder. Default: a fresh temporary folder.
        properties: Server settings that override the defaults (fast groups, no automatic topics, one copy).
        users: Passwords by name. With users, clients log in by SASL/PLAIN, `admin` may do everything, and other users
            need an ACL.
        arguments: Arguments for Java, such as `-Xmx512m`.
        seconds: The longest duration of a start, without the download before the first start.
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
            raise TypeError(f"arguments must be a sequence of strings, not the string {arguments!r}")
        self._process = Supervised(self.name, directory)
        self._ports: Ports | None = None
        self._properties = dict(properties or {})
        self._users = dict(users or {})
        self._arguments = tuple(arguments)
        self._seconds = seconds

    @classmethod
    def of_another_process(cls, running: RunningBroker) -> Self:
        """Return the addresses of a broker that another process has started, and that this process cannot end."""
        server = cls(running.folder)
        server._ports = running.ports
        return server

    def __repr__(self) -> str:
        return f"<KafkaServer {self.url if self._ports else 'not started'}, {self._process!r}>"

    @property
    def url(self) -> str:
        """The address for clients (`bootstrap.servers`); it stays the same from the first start to `stop`."""
        return f"{HOST}:{self._known_ports().clients}"

    @property
    def admin_url(self) -> str:
        """The address at which every client may do everything without a login; without `users` it is `url`."""
        return f"{HOST}:{self._known_ports().inside}"

    def config(self, user: str | None = None) -> dict[str, Any]:
        """Return the client settings for this broker, including the password of `user`, a name of `users`."""
        config: dict[str, Any] = {"bootstrap.servers": self.url}
        if user is not None:
            config |= {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": user,
                "sasl.password": self._users[user],
            }
        return config

    def running(self) -> RunningBroker:
        """Return the argument of `of_another_process`. Known after `start`."""
        return RunningBroker(self.folder, self._known_ports())

    def prepare(self) -> None:
        """Fetch the broker's jars. The first call may block for minutes. Raises `MissingComponent` without them."""
        install()

    def start(self) -> None:
        """Start the broker, and block until its log reports the start. Idempotent; ends a `pause`.

        The first group of a new broker takes one to three seconds more, because the broker creates its topic for
        groups.
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
                    raise ComponentError(f"{taken}: end the process that listens there, then start again") from error
            except BaseException:
                self._give_up(first)
                raise
        self._process.write_state({"component": self.name, "pid": self.pid, "url": self.url})

    def stop(self) -> None:
        """End the broker and remove its folder. Idempotent; blocks until done."""
        if self.alive:
            self._process.signal(signal.SIGKILL)  # the folder is removed, so a clean shutdown is not needed
        self._process.stop()
        self._ports = None

    def _known_ports(self) -> Ports:
        if self._ports is None:
            raise ComponentError("the Kafka broker has no address yet: call start()")
        return self._ports

    def _launch(self, ports: Ports) -> None:
        """Start a broker on these ports and the present data, and block until its log reports the start."""
        installation = install()
        folder = self._process.folder
        folder.mkdir(parents=True, exist_ok=True)
        data, properties, log = folder / "data", folder / "server.properties", folder / "log"
        wanted = server_properties(data, ports, self._users, self._properties)
        command = installation.command(properties, temporary=folder / "run", arguments=self._arguments)
        if self._process.occupied():
            raise ComponentError(f"a broker runs in {folder} already: stop it, or use another directory")
        if not data.exists():
            draft = folder / "data.new"
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(installation.formatted, draft)
            draft.rename(data)  # atomic, because half a copy would look like the data of another cluster
        write_properties(properties, wanted)
        begin = log.stat().st_size if log.exists() else 0
        if self._process.launch(command) is None:
            raise ComponentError(f"another process has just started a broker in {folder}: use another directory")
        try:
            wait_started(self._process, begin, self._seconds)
        except TimeoutError as error:
            raise ComponentError(f"{error}; end of its log: {self._process.last_words()}") from error

    def _give_up(self, first: bool) -> None:
        """Clean up after a failed start: remove the files of a first start, and keep the data of a later one."""
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
