"""Processes of the demo: their output is kept, and they end with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo import DemoError
from demo.child import EXIT_ORPHANED, peak_rss_mb
from demo.supervise import Child
from tests.components import wait_until
from tests.conftest import Spawn, first_line, is_gone

_WAIT = "from demo.child import end_with_parent; import threading; end_with_parent(); "
_FOR_EVER = "threading.Event().wait()"

asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_ends_with_its_parent() -> None:
    with subprocess.Popen(python(_WAIT + _FOR_EVER), stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == EXIT_ORPHANED


_FREEZES = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from demo.supervise import Child

async def main(child):
    await child.start()
    assert await child.exchange("", 60.0) == "ready\\n"
    child.freeze()
    os.waitpid(child.pid, os.WUNTRACED)
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Child([sys.executable, "-c", sys.argv[1]], Path("/dev/null"))))
"""

# The processes of a new session get no SIGHUP.
_ALONE = """
import asyncio
start = asyncio.create_subprocess_exec
asyncio.create_subprocess_exec = lambda *words, process_group, **more: start(*words, start_new_session=True, **more)
"""
_UNASKED = "from demo import child; child.killed_with_parent = lambda: None; "
_linux = pytest.mark.skipif(sys.platform != "linux", reason="the system cannot be asked to kill it")


@pytest.mark.parametrize(
    ("parent", "child"),
    [pytest.param(_ALONE + _FREEZES, _WAIT, marks=_linux), (_FREEZES, _UNASKED + _WAIT)],
    ids=["killed", "hung up"],
)
def test_a_frozen_child_ends_with_its_parent(spawn: Spawn, parent: str, child: str) -> None:
    starter = spawn("-c", parent, child + "print('ready', flush=True); " + _FOR_EVER)
    pid = int(first_line(starter))
    assert not is_gone(pid)
    starter.kill()
    wait_until(lambda: is_gone(pid), "the frozen process to end")


def test_the_peak_memory_is_that_of_this_process_alone() -> None:
    code = "from demo.child import peak_rss_mb; print(peak_rss_mb())"
    small = float(subprocess.run(python(code), capture_output=True, text=True, check=True).stdout)
    large = float(
        subprocess.run(python(f"x = bytearray(100 << 20); {code}"), capture_output=True, text=True, check=True).stdout
    )
    assert 1 < small < 100 < large
    assert peak_rss_mb() > 1


@pytest.mark.anyio
@asyncio_only
async def test_the_output_of_a_child_is_kept(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('first', file=sys.stderr); sys.exit('the last words')"
    child = Child(python(code), tmp_path / "log")
    await child.start()
    assert await child.wait() == 1
    assert await child.output() == "out\n"
    assert child.last_words == "the last words"
    assert (tmp_path / "log").read_text() == "first\nthe last words\n"
    await child.end()


@pytest.mark.anyio
@asyncio_only
async def test_a_killed_child_is_reported_as_killed(tmp_path: Path) -> None:
    child = Child(python("import threading; " + _FOR_EVER), tmp_path / "log")
    assert (child.pid, child.status) == (0, None)
    await child.start()
    assert await child.wait(0.01) is None
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    assert child.killed
    child.kill()
    await child.end()


@pytest.mark.anyio
@asyncio_only
async def test_a_missing_program_is_one_clear_line(tmp_path: Path) -> None:
    child = Child([str(tmp_path / "nothing")], tmp_path / "log")
    with pytest.raises(DemoError, match=r"nothing' cannot be started \(No such file or directory\)"):
        await child.start()
    assert await child.wait() is None
    assert await child.output() == ""
    await child.end()
