"""What every test may ask for: an async backend, and real servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before Hypothesis looks: everything it keeps stays in the project's own cache folder.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))

from hypothesis import Phase, settings

from tests.components import MissingComponent, NatsServer

# A busy machine is slow, not wrong.
# Explaining a failure traces every line; on Python 3.11 the interpreter was seen to hang where an alarm met that.
settings.register_profile("lanes", deadline=None, phases=[phase for phase in Phase if phase is not Phase.explain])
settings.load_profile("lanes")

# `make test &` in a script ignores SIGINT and `nohup` SIGHUP, for everything that is started from here: the tests
# that send them would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

NatsFactory = Callable[..., NatsServer]


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Async tests (`@pytest.mark.anyio`) run on both. What is asyncio only, such as NATS, says
    `@pytest.mark.parametrize("anyio_backend", ["asyncio"])`."""
    backend: str = request.param
    return backend


def start_or_skip(server: NatsServer) -> NatsServer:
    """Start it. Without the program a test is skipped, but never where `CI` is set: nothing hides there."""
    try:
        server.start()
    except MissingComponent as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    return server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """The one server of the test session. Shared: name streams and subjects uniquely, and never stop it."""
    server = NatsServer()
    try:
        yield start_or_skip(server)
    finally:
        server.stop()


@pytest.fixture
def fresh_nats() -> Iterator[NatsFactory]:
    """Makes private servers, started, to be killed, paused and restarted: `fresh_nats(config=…)`.

    Takes the arguments of `NatsServer`. All of them are stopped after the test.
    """
    servers: list[NatsServer] = []

    def make(**arguments: Any) -> NatsServer:
        server = NatsServer(**arguments)
        servers.append(server)
        return start_or_skip(server)

    try:
        yield make
    finally:
        for server in servers:
            server.stop()
