"""What every test may ask for: an async backend, and real servers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

# Before Hypothesis looks: everything it keeps stays in the project's own cache folder.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))

from hypothesis import Phase, settings

from tests.components import ComponentError, KafkaServer, MissingComponent, NatsServer, PostgresServer, wait_until

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
KafkaFactory = Callable[..., KafkaServer]
PostgresFactory = Callable[..., PostgresServer]
Spawn = Callable[..., "subprocess.Popen[str]"]

_Server = TypeVar("_Server", NatsServer, KafkaServer, PostgresServer)

_KAFKA_FAILURE = pytest.StashKey[ComponentError]()


_BROKERS = frozenset(
    {"fresh_kafka", "fresh_nats", "fresh_postgres", "kafka", "kafka_prepared", "nats_server", "postgres"}
)
"""Fixtures that start a server."""

_NOT_FAST = ("campaign", "long", "process", "slow")
"""Marks of tests that ``--fast`` leaves out."""

_LEFT: set[int] = set()
"""Idents of threads that an earlier test has failed for."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """A source that a test leaves open is its own fault, not that of whoever counts threads later."""
    yield
    for thread in threading.enumerate():
        if thread.name == "lanes-kafka" and thread.ident not in _LEFT:
            thread.join(20)
            if thread.is_alive() and thread.ident is not None:
                _LEFT.add(thread.ident)
                frame = sys._current_frames().get(thread.ident)
                place = "".join(traceback.format_stack(frame)) if frame is not None else "no Python frame"
                pytest.fail(f"a source over Kafka was left open, and its thread is at\n{place}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="Run the tests without a broker or a child process.")


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
        raise RuntimeError(f"a test of `make test-fast` starts a process ({arguments[:1]}): mark it `process`")


def _refuse_start(process: BaseProcess) -> None:
    raise RuntimeError(f"a test of `make test-fast` starts a process ({process.name}): mark it `process`")


def is_fast(item: pytest.Item) -> bool:
    """Whether a test needs no broker, no child process and no time."""
    return not (_BROKERS | {"spawn"}) & set(getattr(item, "fixturenames", ())) and not any(
        item.get_closest_marker(mark) for mark in _NOT_FAST
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker idles at the end."""
    if config.getoption("--fast"):
        left_out = [item for item in items if not is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_fast(item)]
    items.sort(key=_allowance, reverse=True)


def _allowance(item: pytest.Item) -> float:
    """Seconds that a test is allowed, by a mark of its own."""
    marked = item.get_closest_marker("timeout")
    return float(marked.args[0]) if marked is not None and marked.args else 0.0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch Kafka's jars before the first test, when any of them will need them: a test has no time for that."""
    if session.config.getoption("--fast") and session.items:
        # From here on the marks are held to be true. A process that multiprocessing spawns raises no audit event.
        sys.addaudithook(_refuse_processes)
        BaseProcess.start = _refuse_start  # type: ignore[assignment, method-assign]
    # Thousands of tests and all they import stay to the end: whoever collects garbage need not go through them again.
    gc.collect()
    gc.freeze()
    wanted = any("kafka_prepared" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    try:
        with capture.global_and_fixture_disabled():
            KafkaServer().prepare()
    except ComponentError as failure:
        session.config.stash[_KAFKA_FAILURE] = failure


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Async tests (`@pytest.mark.anyio`) run on both. What is asyncio only, such as NATS, says
    `@pytest.mark.parametrize("anyio_backend", ["asyncio"])`."""
    backend: str = request.param
    return backend


def start_or_skip(server: _Server) -> _Server:
    """Start it. Without its programs a test is skipped, but never where `CI` is set: nothing hides there."""
    try:
        server.start()
    except MissingComponent as missing:
        skip_or_fail(missing)
    return server


def stopped_by(stopping: contextlib.ExitStack, server: _Server) -> _Server:
    """Have it stopped with the others, however far its start comes."""
    stopping.callback(server.stop)
    return server


def skip_or_fail(missing: MissingComponent) -> NoReturn:
    """Skip the test for what is missing, or fail it where `CI` is set."""
    if os.environ.get("CI"):
        pytest.fail(str(missing))
    pytest.skip(str(missing))


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
    with contextlib.ExitStack() as stopping:
        yield lambda **arguments: start_or_skip(stopped_by(stopping, NatsServer(**arguments)))


@pytest.fixture(scope="session")
def kafka_prepared(pytestconfig: pytest.Config) -> None:
    """Kafka can be started, or the test is skipped (fails where `CI` is set) for want of Java, Maven or the jars."""
    failure = pytestconfig.stash.get(_KAFKA_FAILURE, None)
    if isinstance(failure, MissingComponent):
        skip_or_fail(failure)
    if failure is not None:
        raise failure


@pytest.fixture(scope="session")
def kafka(kafka_prepared: None) -> Iterator[KafkaServer]:
    """The one Kafka broker of the test session. Shared: name topics and groups uniquely, and never stop it.

    It has had a group already, so the next one forms at once.
    """
    with KafkaServer() as server:
        warm_groups(server)
        yield server


@pytest.fixture
def fresh_kafka(kafka_prepared: None) -> Iterator[KafkaFactory]:
    """Makes private brokers, started, to be killed, paused and restarted: `fresh_kafka(properties=…)`.

    Takes the arguments of `KafkaServer`, and `warm=True` for one that has had a group. All of them are stopped after
    the test.
    """
    with contextlib.ExitStack() as stopping:

        def make(*, warm: bool = False, **arguments: Any) -> KafkaServer:
            server = stopped_by(stopping, KafkaServer(**arguments))
            server.start()
            if warm:
                warm_groups(server)
            return server

        yield make


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The one PostgreSQL server of the test session. Shared: name databases uniquely, and never stop it."""
    server = PostgresServer()
    try:
        yield start_or_skip(server)
    finally:
        server.stop()


@pytest.fixture
def fresh_postgres() -> Iterator[PostgresFactory]:
    """Makes private servers, started, to be killed, paused and restarted: `fresh_postgres(settings=…)`.

    Takes the arguments of `PostgresServer`. All of them are stopped after the test.
    """
    with contextlib.ExitStack() as stopping:
        yield lambda **arguments: start_or_skip(stopped_by(stopping, PostgresServer(**arguments)))


def warm_groups(server: KafkaServer) -> None:
    """Ask for a group's offset: a new broker makes its topic for groups now. Blocks, one to three seconds."""
    consumer = Consumer({"bootstrap.servers": server.admin_url, "group.id": "warm-up"})

    def answered() -> bool:
        try:
            consumer.committed([TopicPartition("no-topic", 0)], timeout=30.0)
        except KafkaException as error:
            if error.args[0].code() not in (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS):
                raise
            return False  # it has made its topic for groups, and does not lead it yet or has not read it
        return True

    try:
        wait_until(answered, f"{server!r} to have a group", seconds=30.0)
    finally:
        consumer.close()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own, for this process and those it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a Python process of this project; those still there after the test are killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
