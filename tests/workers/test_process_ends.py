"""Processes of handlers end alone: by a crash, a timeout, a cancellation, or with the process of the consumer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lanes import Consumer
from lanes.process import EXIT_AT_ONCE, EXIT_DRAINED, EXIT_FAILED
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.conftest import Spawn
from tests.fakes import process_handlers as handlers
from tests.fakes.processes import PATIENCE, alive, broker_of, eventually, in_processes, notes, pids
from tests.fakes.support import started

pytestmark = [pytest.mark.process, pytest.mark.timeout(4 * PATIENCE)]


def ended(folder: Path) -> list[int]:
    """Positions whose handlers have returned."""
    return [int(line.split()[1]) for line in notes(folder) if line.startswith("end ")]


def starts(folder: Path) -> list[tuple[int, int]]:
    """Position and attempt of each start of a handler."""
    return [(int(line.split()[2]), int(line.split()[3])) for line in notes(folder) if line.startswith("start ")]


def let(folder: Path, *positions: int) -> None:
    for position in positions:
        (folder / f"go{position}").touch()


# --- in the process of the test


@pytest.mark.anyio
async def test_a_process_that_is_killed_fails_its_message_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = broker_of(tmp_path, "a", "b")
    source = MemorySource(broker)
    async with started(Consumer(source, handlers.wait, settings=in_processes(2, attempts=2))) as run:
        await eventually(lambda: len(starts(tmp_path)) == 2)
        killed = {line.split()[2]: int(line.split()[1]) for line in notes(tmp_path)}["0"]
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: len(starts(tmp_path)) == 3)
        assert starts(tmp_path)[2] == (0, 2)
        let(tmp_path, 0, 1)
        await eventually(lambda: broker.unfinished == 0)
        # The other process has handled its message undisturbed, at its first attempt.
        assert sorted(starts(tmp_path)) == [(0, 1), (0, 2), (1, 1)]
        # A process that is killed while it has no message fails no message.
        idle = [pid for pid in pids(tmp_path) if alive(pid)]
        for pid in idle:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not any(map(alive, idle)))
        broker.publish(str(tmp_path), key="free")
        await eventually(lambda: broker.unfinished == 0)
        assert starts(tmp_path)[3] == (2, 1)
        assert await run.stop() is None
    assert not any(map(alive, pids(tmp_path)))
    assert f"(pid {killed}) was killed by SIGKILL; the next process starts" in caplog.text


@pytest.mark.anyio
async def test_a_handler_that_never_returns_is_killed_and_fails_alone(tmp_path: Path) -> None:
    broker = broker_of(tmp_path, "forever", "a")
    source = MemorySource(broker)
    broker_letters = MemoryDeadLetters(broker)
    settings = in_processes(2, attempts=1, timeout=1.0)
    let(tmp_path, 1)
    async with started(Consumer(source, handlers.wait, settings=settings, dead_letters=broker_letters)) as run:
        await eventually(lambda: broker.unfinished == 0)
        assert [(one.position, one.error_type) for one in broker.dead_letters if one.position == 0] == [
            (0, "TimeoutError")
        ]
        assert await run.stop() is None
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.anyio
async def test_an_answer_after_the_timeout_is_no_answer_to_the_next_message(tmp_path: Path) -> None:
    broker = broker_of(tmp_path, "a", "b")
    source = MemorySource(broker)
    letters = MemoryDeadLetters(broker)
    settings = in_processes(1, attempts=1, timeout=1.0)
    async with started(Consumer(source, handlers.late, settings=settings, dead_letters=letters)) as run:
        await eventually(lambda: broker.dead_letters)
        let(tmp_path, 0)
        await eventually(lambda: broker.unfinished == 0)
        assert sorted((one.position, one.error_type) for one in broker.dead_letters) == [
            (0, "TimeoutError"),
            (1, "ValueError"),
        ]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_drain_lets_the_handlers_end(tmp_path: Path) -> None:
    broker = broker_of(tmp_path, "a", "b", "c")
    source = MemorySource(broker)
    async with started(Consumer(source, handlers.wait, settings=in_processes(2))) as run:
        await eventually(lambda: len(starts(tmp_path)) == 2)
        run.consumer.stop()
        let(tmp_path, 0, 1, 2)
        assert await run.end() is None
    assert sorted(broker.acked()) == [0, 1]
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 1])
async def test_a_stop_at_once_kills_the_handlers(
    tmp_path: Path, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    broker = broker_of(tmp_path, "forever", "ever")
    source = MemorySource(broker)
    handler: Any = handlers.wait if batch is None else handlers.batch
    async with started(Consumer(source, handler, settings=in_processes(2, batch=batch))) as run:
        await eventually(lambda: len(starts(tmp_path)) == 2)
        run.consumer.stop()
        run.consumer.stop(at_once=True)
        assert await run.end() is None
    assert (broker.acked(), broker.unfinished) == ([], 2)
    assert not any(map(alive, pids(tmp_path)))
    assert "abandoned" not in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 1])
async def test_a_revoked_partition_kills_its_handlers_and_no_others(tmp_path: Path, batch: int | None) -> None:
    broker = broker_of(tmp_path, partitions=2)
    broker.publish(str(tmp_path), key="forever", partition=0)
    source = MemorySource(broker)
    handler: Any = handlers.wait if batch is None else handlers.batch
    async with started(Consumer(source, handler, settings=in_processes(2, batch=batch))) as run:
        await eventually(lambda: len(starts(tmp_path)) == 1)
        source.revoke(0, timeout=0.0)
        await eventually(lambda: source.called("release"))
        await eventually(lambda: not alive(pids(tmp_path)[0]))
        broker.publish(str(tmp_path), key="free", partition=1)
        await eventually(lambda: broker.acked(1) == [0])
        assert broker.acked(0) == []
        assert run.consumer.status().zombies == 0
        # The interrupted attempt does not count.
        assert await run.stop() is None
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.anyio
async def test_a_stop_during_the_start_leaves_no_process(tmp_path: Path) -> None:
    broker = broker_of(tmp_path, "a")
    source = MemorySource(broker)
    async with started(Consumer(source, handlers.wait, settings=in_processes(2))) as run:
        await eventually(lambda: children() != [])
        run.consumer.stop(at_once=True)
        assert await run.end() is None
    assert children() == []
    assert broker.unfinished == 1


def children() -> list[int]:
    """Handlers' processes of this process that run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if alive(pid) and b"lanes.workers.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


# --- the process of the consumer


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


def wait_for(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def job(spawn: Spawn, case: str, folder: Path, backend: str) -> subprocess.Popen[str]:
    return spawn("-m", "tests.fakes.process_job", case, str(folder), backend)


def test_children_end_with_a_parent_that_is_killed(spawn: Spawn, tmp_path: Path, backend: str) -> None:
    """One handler holds the lock of the interpreter, and the other process has no message."""
    process = job(spawn, "forever", tmp_path, backend)
    wait_for(lambda: len(starts(tmp_path)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, pids(tmp_path))))


def test_the_first_signal_to_the_group_drains(spawn: Spawn, tmp_path: Path, backend: str) -> None:
    """A supervisor signals every process. The handlers go on, and their messages are settled."""
    process = job(spawn, "wait", tmp_path, backend)
    wait_for(lambda: len(starts(tmp_path)) == 2)
    for pid in (process.pid, *pids(tmp_path)):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert process.stderr is not None
    while "draining" not in process.stderr.readline():
        assert process.poll() is None
    let(tmp_path, 0, 1)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (EXIT_DRAINED, "unfinished 1\n"), err
    assert sorted(ended(tmp_path)) == [0, 1]
    assert not any(map(alive, pids(tmp_path)))


def test_the_second_signal_kills_the_handlers(spawn: Spawn, tmp_path: Path, backend: str) -> None:
    process = job(spawn, "forever", tmp_path, backend)
    wait_for(lambda: len(starts(tmp_path)) == 2)
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    while "draining" not in process.stderr.readline():
        assert process.poll() is None
    # Signals within a second of the first count as the first.
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    while "stopping at once" not in process.stderr.readline():
        assert process.poll() is None
    process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_AT_ONCE
    wait_for(lambda: not any(map(alive, pids(tmp_path))))


def test_a_handler_of_the_main_module_runs(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    body = (
        "import anyio, lanes, os, sys\n"
        "from memsource import MemoryBroker, MemorySource\n"
        "class Mine(Exception): pass\n"
        "def handle(message):\n"
        "    if message.attempt == 1: raise Mine('once')\n"
        "    print('handled in another process:', os.getpid() != int(message.value), flush=True)\n"
        "def main():\n"
        "    broker = MemoryBroker(); broker.publish(str(os.getpid()), key='a')\n"
        "    source = MemorySource(broker); source.finish()\n"
        "    settings = lanes.Settings(sync_handlers='processes', processes=1, retry=lanes.Retry(backoff=0))\n"
        "    lanes.main(source, handle, settings=settings)\n"
    )
    script.write_text(f"{body}if __name__ == '__main__': main()\n")
    done = run_script(script)
    assert (done.returncode, done.stdout) == (EXIT_DRAINED, "handled in another process: True\n"), done.stderr
    assert "job.Mine" not in done.stderr
    # Without the guard, the import in the process would start a second consumer.
    script.write_text(f"{body}main()\n")
    done = run_script(script)
    assert (done.returncode, done.stdout) == (EXIT_FAILED, "")
    assert "the consumer starts while a process of its handler imports the main module" in done.stderr
    assert "the handler handle cannot start in a process (RuntimeError: the import of the main module" in done.stderr


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)


def test_where_the_kernel_sends_no_signal_a_thread_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys, time\n"
        "vars(fcntl).pop('F_SETSIG', None)\n"
        "from lanes.workers.child import end_with_parent\n"
        "end_with_parent(int(sys.argv[1])); print('ready', flush=True); time.sleep(600)\n"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code, str(reading)], pass_fds=[reading], stdout=subprocess.PIPE)
    os.close(reading)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    os.close(writing)
    assert process.wait(PATIENCE) == 1
    process.stdout.close()


def test_a_process_whose_parent_has_already_ended_ends_at_once(tmp_path: Path) -> None:
    code = "import sys; from lanes.workers.child import end_with_parent as end; end(int(sys.argv[1])); print('lives')"
    reading, writing = os.pipe()
    os.close(writing)
    done = subprocess.run(
        [sys.executable, "-c", code, str(reading)], pass_fds=[reading], capture_output=True, check=False
    )
    os.close(reading)
    assert (done.stdout, done.returncode != 0) == (b"", True)
