"""``lanes.main`` as a process: signals, exit statuses, and one line for each error."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import lanes
from lanes.process import EXIT_AT_ONCE, EXIT_DRAINED, EXIT_FAILED, EXIT_HALTED, GRACE, SignalCounter
from lanes.source import SourceTraits
from memsource import MemoryBroker, MemorySource
from tests.conftest import Spawn

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 30.0

Job = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(params=["asyncio", "trio"])
def job(request: pytest.FixtureRequest, spawn: Spawn) -> Job:
    """Start tests/fakes/job.py with a case; kill it at the end of the test."""
    return lambda case: spawn("-W", "error", "-m", "tests.fakes.job", case, request.param)


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def complains(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().strip()


def rest(process: subprocess.Popen[str], text: str = "") -> tuple[str, str]:
    """Write the last input, and return the rest of both outputs, after the end of the process.

    After a ``readline``, ``communicate`` loses the lines that were read ahead.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(text)
    process.stdin.close()
    # The fixture would flush a closed input, which is an error.
    process.stdin = None
    found = process.stdout.read(), process.stderr.read()
    process.wait(TIMEOUT)
    return found


def is_of_the_watch(line: str) -> bool:
    """Whether a line names a handler that blocks the event loop; such a line is printed after a second."""
    return "holding the event loop" in line


def answers(process: subprocess.Popen[str], within: float) -> bool:
    assert process.stderr is not None
    return bool(select.select([process.stderr], [], [], within)[0])


def insist(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal until the process answers, because signals within a second of the first count as the first."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        if answers(process, 0.05):
            line = complains(process)
            if not is_of_the_watch(line):
                return line
        assert time.monotonic() < deadline, "the process ignores the signals"
        process.send_signal(number)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_first_signal_drains(job: Job, number: signal.Signals) -> None:
    process = job("line")
    assert says(process) == "running"
    process.send_signal(number)
    assert complains(process) == (
        f"lanes: {number.name}: draining, for which running handlers get up to 30 s; a second signal stops at once"
    )
    assert process.poll() is None
    # The running handler may end, and no further handler starts.
    out, err = rest(process, "go on\n")
    assert (process.returncode, out, err) == (EXIT_DRAINED, "ended 0\nbye\n", "")


@pytest.mark.process
def test_a_first_signal_takes_effect_after_the_handler_that_holds_the_event_loop(job: Job) -> None:
    """All 48 messages may run at once, so their handlers could hold the event loop one after the other."""
    process = job("doze")
    assert says(process) == "running"
    process.send_signal(signal.SIGINT)
    assert complains(process).startswith("lanes: SIGINT: draining")
    assert says(process) == "ended 0"
    out, err = rest(process)
    # No other handler has begun.
    assert (process.returncode, out) == (EXIT_DRAINED, "bye\n")
    assert "doze" in err and "has been holding the event loop for 1." in err


@pytest.mark.process
def test_the_program_keeps_signal_handlers_of_its_own(spawn: Spawn) -> None:
    """A program and its handler may add other signals to the event loop, before and after ``serve`` begins."""
    process = spawn("-W", "error", "-m", "tests.fakes.job", "signals", "asyncio")
    assert says(process) == "running"
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
        process.send_signal(number)
        assert says(process) == number.name
    process.send_signal(signal.SIGTERM)
    assert complains(process).startswith("lanes: SIGTERM: draining")
    process.send_signal(signal.SIGUSR1)
    assert says(process) == "SIGUSR1"
    assert insist(process, signal.SIGTERM) == "lanes: SIGTERM: stopping at once"
    out, err = rest(process)
    assert (process.returncode, out, err) == (EXIT_AT_ONCE, "bye\n", "")


def test_serve_is_refused_on_another_thread() -> None:
    refused: list[BaseException] = []

    def call() -> None:
        try:
            anyio.run(lanes.serve, lanes.Consumer(MemorySource(MemoryBroker()), print))
        except BaseException as error:
            refused.append(error)

    thread = threading.Thread(target=call, name="other")
    thread.start()
    thread.join()
    assert isinstance(refused[0], lanes.ConfigError)
    assert str(refused[0]).startswith("lanes.serve was called on the thread 'other'")


def test_main_is_refused_on_another_thread_by_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    def call() -> None:
        with pytest.raises(SystemExit):
            lanes.main(MemorySource(MemoryBroker()), print)

    thread = threading.Thread(target=call, name="other")
    thread.start()
    thread.join()
    assert capsys.readouterr().err.startswith("lanes: ConfigError: lanes.main was called on the thread 'other'")


@pytest.mark.process
def test_a_doubled_signal_drains(job: Job) -> None:
    """A supervisor such as ``timeout`` signals the child and then its group."""
    process = job("line")
    assert says(process) == "running"
    process.send_signal(signal.SIGTERM)
    assert complains(process).startswith("lanes: SIGTERM: draining")
    # The process is the only reader of these signals, and has time for each of them.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        assert not answers(process, 0.1), complains(process)
    out, err = rest(process, "go on\n")
    assert (process.returncode, out, err) == (EXIT_DRAINED, "ended 0\nbye\n", "")


class NeverOpen(MemorySource):
    """A source whose broker does not answer."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker())
        self.opening = anyio.Event()
        self.closed = False

    async def open(self) -> SourceTraits:
        self.opening.set()
        await anyio.sleep_forever()
        raise AssertionError

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_start_whose_source_is_not_open(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    source = NeverOpen()

    async def ask() -> None:
        await source.opening.wait()
        os.kill(os.getpid(), number)

    with anyio.fail_after(TIMEOUT):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            assert await lanes.serve(lanes.Consumer(source, print)) == EXIT_DRAINED
    assert source.closed
    said = f"lanes: {number.name}: stopping, because the source is not open yet; a second signal stops at once\n"
    assert capfd.readouterr().err == said


def test_signals_within_a_second_of_the_first_are_one_request() -> None:
    signals = SignalCounter()
    assert [signals.received(at) for at in (-5.0, -4.5, -4.01)] == [1, 0, 0]
    # Repeated Ctrl+C takes effect a second after the first.
    assert [signals.received(at) for at in (-4.0, -3.9, 7.0)] == [2, 0, 3]


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "last_words"),
    [
        pytest.param("ever", "bye\n", id="a handler that reacts"),
        pytest.param("ignore", "", id="one that swallows its cancellation"),
        pytest.param("line", "", id="one that waits in a thread"),
        pytest.param("thread", None, id="one whose thread outlives it"),
        pytest.param("hold", "", id="one that holds the event loop"),
        pytest.param("hold in C", "", id="one that holds the event loop in C"),
    ],
)
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(job: Job, case: str, last_words: str | None, second: signal.Signals) -> None:
    process = job(case)
    assert says(process) == "running"
    process.send_signal(signal.SIGTERM)
    while is_of_the_watch(line := complains(process)):
        pass
    assert line.startswith("lanes: SIGTERM: draining")
    assert insist(process, second) == f"lanes: {second.name}: stopping at once"
    # Standard input stays open, so the thread of "line" never ends.
    answered = time.monotonic()
    assert process.wait(timeout=TIMEOUT) == EXIT_AT_ONCE
    # The handlers would hold the process for a minute.
    assert time.monotonic() - answered < GRACE + 10
    out, err = rest(process)
    # The process is killed only if a handler ignores its cancellation. The threads of trio delay no interpreter.
    assert [line for line in err.splitlines() if not is_of_the_watch(line)] == []
    assert out in (["", "bye\n"] if last_words is None else [last_words])


GOES_ON = re.compile(
    r"ignores its cancellation and still runs for 1 message\(s\), so the process ends without it.*memory/\d: 0"
)


@pytest.mark.process
def test_a_drain_ends_the_process_beside_a_handler_that_ignores_its_cancellation(job: Job) -> None:
    process = job("hasty")
    assert says(process) == "running"
    process.send_signal(signal.SIGTERM)
    out, err = rest(process)
    assert (process.returncode, out) == (EXIT_DRAINED, "")
    assert len(GOES_ON.findall(err)) == 1, err


@pytest.mark.process
def test_a_failure_ends_the_process_beside_a_handler_that_ignores_its_cancellation(job: Job) -> None:
    process = job("fail beside")
    assert says(process) == "running"
    out, err = rest(process)
    assert (process.returncode, out) == (EXIT_FAILED, "")
    assert GOES_ON.search(err), err
    assert err.rstrip().endswith("MemoryError: no memory")


@pytest.mark.process
def test_the_status_of_a_handler_that_leaves_counts_beside_one_that_ignores_its_cancellation(job: Job) -> None:
    process = job("leave beside")
    assert says(process) == "running"
    out, err = rest(process)
    assert (process.returncode, out) == (7, "")
    assert GOES_ON.search(err), err


@pytest.mark.process
def test_the_end_of_a_finite_source_prints_nothing(job: Job) -> None:
    process = job("finite")
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out, err) == (EXIT_DRAINED, "ended 0\nended 1\nbye\n", "")


@pytest.mark.process
def test_lanes_main_reports_events(job: Job) -> None:
    process = job("events")
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out, err) == (EXIT_DRAINED, "assigned\nended 0\nended 1\nrevoked\nbye\n", "")


@pytest.mark.process
def test_a_halt_has_its_own_exit_status(job: Job) -> None:
    process = job("poison")
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == EXIT_HALTED
    *before, last = err.splitlines()
    assert last.startswith("lanes: HandlerHalted: memory: the handler failed 1 time(s) at memory/0 position 0")
    # Term is a decision of the handler, so its traceback tells nothing.
    assert before == ["memory: the run ends after Term (never) at memory/0 position 0"]


@pytest.mark.process
def test_a_halt_prints_its_error_once_and_the_traceback_of_the_handler(job: Job) -> None:
    process = job("failing")
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == EXIT_HALTED
    *before, last = err.splitlines()
    assert last.startswith("lanes: HandlerHalted: memory: the handler failed 1 time(s) at memory/0 position 0 with Key")
    assert before[0] == "memory: the run ends after KeyError at memory/0 position 0"
    assert before[1] == "Traceback (most recent call last):"
    assert before[-1] == "KeyError: 'sku'"
    assert err.count("Traceback") == err.count("The poison policy") == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            "bound",
            "lanes: ConfigError: max_in_flight=500 is above the 200 unsettled messages that the broker's consumer",
        ),
        ("open refused", "lanes: ConfigError: ack_policy is 'none'; set it to 'explicit'"),
        ("poison policy", 'lanes: ConfigError: poison="skip" needs dead letters'),
        ("no server", "lanes: SourceError: no server reached"),
        ("gone", "lanes: SourceError: the connection is closed"),
        ("not settled", "lanes: SourceError: the connection is closed"),
    ],
)
def test_a_process_that_fails_prints_one_line(job: Job, case: str, line: str) -> None:
    process = job(case)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == EXIT_FAILED
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


@pytest.mark.process
def test_a_handler_may_exit_with_its_own_status(job: Job) -> None:
    process = job("leave")
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 7


EARLY = """
import gc, os, signal, sys
import lanes
from memsource import MemoryBroker, MemorySource

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

if sys.argv[1] == "before the loop":
    gc.collect = interrupt
elif sys.argv[1] == "in the loop":
    make = lanes.Consumer.__init__
    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        interrupt()
    lanes.Consumer.__init__ = made

async def handler(message):
    raise KeyboardInterrupt("of the handler")

broker = MemoryBroker()
broker.publish(b"v", key=b"k")
lanes.main(MemorySource(broker), handler, backend=sys.argv[2])
"""


@pytest.mark.process
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("when", ["before the loop", "in the loop"])
def test_a_signal_before_the_run_ends_the_process_without_a_traceback(when: str, backend: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EARLY, when, backend], capture_output=True, text=True, timeout=TIMEOUT
    )
    said = "lanes: SIGINT: stopping, because the source is not open yet\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_DRAINED, "", said)


@pytest.mark.process
def test_a_keyboard_interrupt_of_a_handler_keeps_its_traceback() -> None:
    command = [sys.executable, "-c", EARLY, "never", "asyncio"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode != EXIT_DRAINED and "KeyboardInterrupt: of the handler" in ended.stderr
