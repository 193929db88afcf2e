"""Fixtures of every test: the async backends and the real servers."""

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

# Set before the import of Hypothesis, so that its files stay in the project's cache folder.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))

from hypothesis import Phase, settings

from tests.components import ComponentError, KafkaServer, MissingComponent, NatsServer, PostgresServer, wait_until

# No deadline, because a busy machine may be slow. No explain phase, which traces every line: on Python 3.11, an alarm
# during that tracing made the interpreter hang.
settings.register_profile("lanes", deadline=None, phases=[phase for phase in Phase if phase is not Phase.explain])
settings.load_profile("lanes")

# `make test &` in a script ignores SIGINT, and `nohup` ignores SIGHUP, also in child processes. Tests that send these
# signals would wait without end.
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
"""Idents of threads that an earlier test left open and failed for."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail the test that leaves a Kafka source open, so that no later count of threads fails."""
    yield
    for thread in threading.enumerate():
        if thread.name == "lanes-kafka" and thread.ident not in _LEFT:
            thread.join(20)
            if thread.is_alive() and thread.ident is not None:
                _LEFT.add(thread.ident)
                frame = sys._current_frames().get(thread.ident)
                place = "".join(traceback.format_stack(frame)) if frame is not None else "no Python frame"
                pytest.fail(
                    f"the test left a Kafka source open; close it. Its thread is at\
{place}",
                    pytrace=False,
                )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="Run the tests without a broker or a child process.")


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
        raise RuntimeError(f"a test of `make test-fast` starts a process ({arguments[:1]}): mark the test `process`")


def _refuse_start(process: BaseProcess) -> None:
    raise RuntimeError(f"a test of `make test-fast` starts a process ({process.name}): mark the test `process`")


def is_fast(item: pytest.Item) -> bool:
    """Whether a test needs no broker and no child process, and takes at most a second."""
    return not (_BROKERS | {"spawn"}) & set(getattr(item, "fixturenames", ())) and not any(
        item.get_closest_marker(mark) for mark in _NOT_FAST
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--fast`, select the fast tests. Start the tests with the longest timeouts first, so that no worker idles at
    the end."""
    if config.getoption("--fast"):
        left_out = [item for item in items if not is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_fast(item)]
    items.sort(key=_allowance, reverse=True)


def _allowance(item: pytest.Item) -> float:
    """The timeout of a test in seconds, from its own mark; 0 without a mark."""
    marked = item.get_closest_marker("timeout")
    return float(marked.args[0]) if marked is not None and marked.args else 0.0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch Kafka's jars before the first test, if a test needs the jars, because a download exceeds the timeout of a
    test."""
    if session.config.getoption("--fast") and session.items:
        # From here on, a new process fails the test. A process that multiprocessing spawns raises no audit event, so
        # `start` is replaced too.
        sys.addaudithook(_refuse_processes)
        BaseProcess.start = _refuse_start  # type: ignore[assignment, method-assign]
    # The collected tests and their imports stay until the end, so the garbage collector skips them.
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
    """The backends of async tests (`@pytest.mark.anyio`). Tests that need asyncio, such as those of NATS, use
    `@pytest.mark.parametrize("anyio_backend", ["asyncio"])`."""
    backend: str = request.param
    return backend


def start_or_skip(server: _Server) -> _Server:
    """Start a server. If its programs are missing, skip the test, or fail the test if `CI` is set."""
    try:
        server.start()
    except MissingComponent as missing:
        skip_or_fail(missing)
    return server


def stopped_by(stopping: contextlib.ExitStack, server: _Server) -> _Server:
    """Register the server's `stop` before its start, so that a failed start is cleaned up too."""
    stopping.callback(server.stop)
    return server


def skip_or_fail(missing: MissingComponent) -> NoReturn:
    """Skip the test because a component is missing, or fail the test if `CI` is set."""
    if os.environ.get("CI"):
        pytest.fail(str(missing))
    pytest.skip(str(missing))


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """The shared server of the test session. A test needs unique names of streams and subjects, and must not stop the
    server."""
    server = NatsServer()
    try:
        yield start_or_skip(server)
    finally:
        server.stop()


@pytest.fixture
def fresh_nats() -> Iterator[NatsFactory]:
    """A factory of started private servers, which the test may kill, pause and restart: `fresh_nats(config=…)`.

    The factory has the arguments of `NatsServer`. All servers stop after the test.
    """
    with contextlib.ExitStack() as stopping:
        yield lambda **arguments: start_or_skip(stopped_by(stopping, NatsServer(**arguments)))


@pytest.fixture(scope="session")
def kafka_prepared(pytestconfig: pytest.Config) -> None:
    """Skip the test if Java, Maven or the jars of Kafka are missing, or fail the test if `CI` is set."""
    failure = pytestconfig.stash.get(_KAFKA_FAILURE, None)
    if isinstance(failure, MissingComponent):
        skip_or_fail(failure)
    if failure is not None:
        raise failure


@pytest.fixture(scope="session")
def kafka(kafka_prepared: None) -> Iterator[KafkaServer]:
    """The shared Kafka broker of the test session. A test needs unique names of topics and groups, and must not stop
    the broker.

    The broker has had a group already, so the next group forms at once.
    """
    with KafkaServer() as server:
        warm_groups(server)
        yield server


@pytest.fixture
def fresh_kafka(kafka_prepared: None) -> Iterator[KafkaFactory]:
    """A factory of started private brokers, which the test may kill, pause and restart: `fresh_kafka(properties=…)`.

    The factory has the arguments of `KafkaServer`; with `warm=True`, the broker has had a group. All brokers stop after
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
    """The shared PostgreSQL server of the test session. A test needs unique names of databases, and must not stop the
    server."""
    server = PostgresServer()
    try:
        yield start_or_skip(server)
    finally:
        server.stop()


@pytest.fixture
def fresh_postgres() -> Iterator[PostgresFactory]:
    """A factory of started private servers, which the test may kill, pause and restart: `fresh_postgres(settings=…)`.

    The factory has the arguments of `PostgresServer`. All servers stop after the test.
    """
    with contextlib.ExitStack() as stopping:
        yield lambda **arguments: start_or_skip(stopped_by(stopping, PostgresServer(**arguments)))


def warm_groups(server: KafkaServer) -> None:
    """Ask for the offset of a group, so that a new broker creates its topic for groups. Blocks for one to three
    seconds."""
    consumer = Consumer({"bootstrap.servers": server.admin_url, "group.id": "warm-up"})

    def answered() -> bool:
        try:
            consumer.committed([TopicPartition("no-topic", 0)], timeout=30.0)
        except KafkaException as error:
            if error.args[0].code() not in (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS):
                raise
            return False  # the topic for groups exists, but has no leader yet, or is not read yet
        return True

    try:
        wait_until(answered, f"{server!r} to have a group", seconds=30.0)
    finally:
        consumer.close()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and its child processes, for one test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """A factory of Python processes of this project; processes that still run after the test are killed."""
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
