"""Fixtures of every test: the async backends and the real servers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
from _pytest.runner import runtestprotocol
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

# Set before the import of Hypothesis, so that its files stay in the project's cache folder.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))

from tests import effort
from tests.components import ComponentError, KafkaServer, MissingComponent, NatsServer, PostgresServer, wait_until
from tests.components.kafka_server import RunningBroker
from tests.components.on_demand import OnDemand, ask

effort.register()

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
_KAFKA_ON_DEMAND = pytest.StashKey[OnDemand]()
_KAFKA_ADDRESS = "kafka_on_demand"

_BROKERS = frozenset(
    {"fresh_kafka", "fresh_nats", "fresh_postgres", "kafka", "kafka_prepared", "nats_server", "postgres"}
)
"""Fixtures that start a server."""

_NOT_FAST = ("campaign", "long", "process", "slow")
"""Marks of tests that ``--fast`` leaves out."""

_KAFKA_ALLOWANCE = 15.0
"""The weight of a test on Kafka, beside the timeouts of long tests; such a timeout is ten times the test's duration."""

_SHARED = ("postgres", "spark")
"""Fixtures whose server or session one process of xdist starts, because it runs all tests with this fixture."""

_QUICK = 0.1
"""Seconds below which ``--durations`` need not name a set-up or a teardown."""

_LEFT: set[int] = set()
"""Idents of threads that an earlier test left open and failed for."""


def _keep() -> None:
    """Let the garbage collector skip the objects that live now, such as tests and modules, which stay until the end.

    With pandas and Spark imported, a visit of all objects takes most of a second, and many tests collect garbage.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a process of xdist, leave out reports that tell nothing. Each report is a message to the first process, and
    most tests take less time than their messages."""
    if not hasattr(item.config, "workerinput"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if tells_something(report):
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def tells_something(report: pytest.TestReport) -> bool:
    """Whether a report is more than a quick set-up or teardown that passed without output."""
    return report.when == "call" or not report.passed or report.duration > _QUICK or bool(report.sections)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Fail the test that leaves a Kafka source open, so that no later count of threads fails."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep()
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


def is_fast(item: pytest.Item, *, on: Collection[str] = ()) -> bool:
    """Whether a test needs no broker and no child process, and takes at most a second.

    Args:
        item: The test.
        on: Fixtures of servers that the test may need.
    """
    return not ((_BROKERS | {"spawn"}) - {*on}) & set(getattr(item, "fixturenames", ())) and not any(
        item.get_closest_marker(mark) for mark in _NOT_FAST
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage, because the tests stay. Each worker first imports another part of the tests, so that in a new
    clone the workers share the compilation, which takes longer than all imports."""
    gc.disable()
    try:
        if worker := os.environ.get("PYTEST_XDIST_WORKER"):
            _import_tests(session.config.args, int(worker.removeprefix("gw")))
        return (yield)
    finally:
        gc.enable()


def _import_tests(folders: Sequence[str], worker: int) -> None:
    """Import the tests of these folders, beginning with the part of this worker."""
    root = Path(__file__).parents[1]
    paths = [path for folder in folders for path in sorted(Path(folder).resolve().rglob("test_*.py"))]
    begin = len(paths) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for path in (*paths[begin:], *paths[:begin]):
        # pytest imports the module once more, and reports its error or skips its tests.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--fast`, select the fast tests. Start the tests with the longest timeouts first, so that no worker idles at
    the end."""
    if config.getoption("--fast"):
        left_out = [item for item in items if not is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_fast(item)]
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order the tests for `--dist worksteal`, which gives each worker an equal part of them: each part begins with the
    long tests of some modules. A third of the parts, rounded up, has all tests of Kafka, which wait much while other
    workers compute. One part has all tests with a fixture of `_SHARED`, so that few workers start a server."""
    modules: dict[tuple[Path | str, bool], list[pytest.Item]] = {}
    short = deque[pytest.Item]()
    for item in sorted(items, key=_allowance, reverse=True):
        on_kafka = _on_shared_kafka(item)
        shared = next((name for name in _SHARED if name in getattr(item, "fixturenames", ())), None)
        if on_kafka or shared or _allowance(item):
            modules.setdefault((item.path if on_kafka or not shared else shared, on_kafka), []).append(item)
        else:
            short.append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for (_, on_kafka), module in sorted(modules.items(), key=lambda each: not each[0][1]):
        least = loads.index(min(loads[: -(-workers // 3)] if on_kafka else loads))
        # The tests of a file stay together, because some fixtures serve one file.
        parts[least] += sorted(module, key=lambda item: item.path)
        loads[least] += max(_allowance(module[0]), _KAFKA_ALLOWANCE * len(module) if on_kafka else 0.0)
    left = len(items)
    for number, part in enumerate(parts):
        size = left // (workers - number)
        while short and len(part) < size:
            part.append(short.popleft())
        left -= len(part)
    return [item for part in parts for item in part] + [*short]


def _on_shared_kafka(item: pytest.Item) -> bool:
    """Whether a test uses the broker of its worker, by a fixture or by the parameter of a fixture."""
    names = getattr(item, "fixturenames", ())
    if "kafka" in names or ("kafka_prepared" in names and "fresh_kafka" not in names):
        return True
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return "kafka" in (params.get("place"), params.get("job"))


def _allowance(item: pytest.Item) -> float:
    """The timeout of a test in seconds, from its own mark; 0 without a mark."""
    marked = item.get_closest_marker("timeout")
    return float(marked.args[0]) if marked is not None and marked.args else 0.0


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to set up Kafka while the processes of xdist collect the tests, if the run has all tests."""
    options = session.config.option
    has_processes = not hasattr(session.config, "workerinput") and getattr(options, "numprocesses", None)
    if has_processes and not (options.fast or options.keyword or options.file_or_dir or options.collectonly):
        threading.Thread(target=_prepare_kafka, name="kafka set-up", daemon=True).start()


def _prepare_kafka() -> None:
    # A worker meets the same fault, and reports it.
    with contextlib.suppress(ComponentError):
        KafkaServer().prepare()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch Kafka's jars before the first test, if a test needs the jars, because a download exceeds the timeout of a
    test."""
    if session.config.getoption("--fast") and session.items:
        # From here on, a new process fails the test. A process that multiprocessing spawns raises no audit event, so
        # `start` is replaced too.
        sys.addaudithook(_refuse_processes)
        BaseProcess.start = _refuse_start  # type: ignore[assignment, method-assign]
    # No test has run, so the garbage is of imports. To find it, each worker would visit more than a million objects.
    gc.freeze()
    # The tests that compute most, such as state machines and searches, make much that lives for long and few cycles.
    gc.set_threshold(50_000, 20, 50)
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
    """The backends of async tests (`@pytest.mark.anyio`). Tests that need asyncio, such as the tests of NATS, use
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
def kafka(kafka_prepared: None, pytestconfig: pytest.Config) -> Iterator[KafkaServer]:
    """The shared Kafka broker of the test session, and of all processes of xdist. A test needs names of topics and
    groups that no test of another process has, and must not stop the broker.

    The broker has had a group already, so the next group forms at once.
    """
    address = getattr(pytestconfig, "workerinput", {}).get(_KAFKA_ADDRESS)
    if address is not None:
        server = KafkaServer.of_another_process(ask(address))
        warm_groups(server)
        yield server
        return
    with shared_kafka() as server:
        warm_groups(server)
        yield server


def shared_kafka() -> KafkaServer:
    """Make the broker that many tests share."""
    # A broker that a busy machine stops for its session would be fenced by its own controller. Until its return it
    # describes a cluster without brokers, after which a client of librdkafka may never connect again (its issue 5301).
    return KafkaServer(properties={"broker.session.timeout.ms": 60_000})


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each process of xdist the address at which the first process starts one Kafka broker for all of them."""
    config: pytest.Config = node.config
    if _KAFKA_ON_DEMAND not in config.stash:
        server = shared_kafka()
        config.add_cleanup(server.stop)

        def start() -> RunningBroker:
            server.start()
            return server.running()

        config.stash[_KAFKA_ON_DEMAND] = OnDemand(start)
        config.add_cleanup(config.stash[_KAFKA_ON_DEMAND].close)
    node.workerinput[_KAFKA_ADDRESS] = config.stash[_KAFKA_ON_DEMAND].address


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
