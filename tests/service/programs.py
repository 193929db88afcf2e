"""Consumers for the tests of this folder, as the module ``app`` of a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.conftest import is_gone

ROOT: Final = Path(__file__).resolve().parents[2]
TIMEOUT: Final = 60.0

APP: Final = """
import os, pathlib, sys, threading, warnings
import anyio
import lanes
from memsource import MemoryBroker, MemorySource

pathlib.Path(f"started-{os.getpid()}").touch()


async def handle(message):
    await anyio.sleep(0)


async def ignore(message):
    pathlib.Path(f"handling-{os.getpid()}").touch()
    while True:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            pass


def make(handler=handle, finish=False, **settings):
    broker = MemoryBroker()
    broker.publish("an order", key="ann")
    source = MemorySource(broker)
    if finish:
        source.finish()
    return lanes.Consumer(source, handler, settings=lanes.Settings(**settings))


async def make_later():
    await anyio.sleep(0)
    return make()


def finite():
    return make(finish=True)


def stubborn():
    return make(ignore)


async def block(message):
    pathlib.Path(f"handling-{os.getpid()}").touch()
    threading.Event().wait()


def blocking():
    return make(block, drain_timeout=0.1, grace=0.1)


def broken():
    raise RuntimeError("no configuration")


def wanting(argument):
    return make()


def shown():
    pathlib.Path("seen").write_text(os.environ["COLOUR"] + os.environ["SHAPE"])
    return make()


def other():
    return 5


def leaving():
    sys.exit("no configuration")


def halting():
    def fail(message):
        raise ValueError("a bad order")

    return make(fail, finish=True, poison="exit", retry=lanes.Retry(attempts=1))


class Failing:
    def __del__(self):
        raise ValueError("no end")


def fail():
    raise ValueError("no thread")


def noisy():
    import logging

    warnings.warn("an old name, für später")
    logging.getLogger("shop").error("%d orders", "many")
    Failing()
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    return make()


consumer = make()
number = 5
"""


class Running:
    """A process of ``lanes run`` in a folder with ``app.py``."""

    def __init__(self, folder: Path, *arguments: str, program: Sequence[str], variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.output = folder / "output"
        paths = f"{ROOT}{os.pathsep}{ROOT / 'adapters'}"
        environment = {**os.environ, "PYTHONPATH": paths, "COLOUR": "blue", **variables}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, "run", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def text(self) -> str:
        return self.output.read_text()

    def pids(self) -> set[int]:
        """The processes that have imported the module, ended ones too."""
        return {int(path.name.partition("-")[2]) for path in self.folder.glob("started-*")}

    def handled(self) -> set[int]:
        """The numbers that the handlers have written, one a line, to the files ``handled-…``."""
        lines = [line for path in self.folder.glob("handled-*") for line in path.read_text().split("\n")[:-1]]
        return {int(line) for line in lines}

    def alive(self) -> set[int]:
        return {pid for pid in self.pids() if not is_gone(pid)}

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.text()}"
            time.sleep(0.02)

    def until_line(self, text: str, count: int = 1) -> None:
        self.until(lambda: self.text().count(text) >= count, text)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the supervisor, wait for its end, and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)


@contextmanager
def running(
    folder: Path, *arguments: str, program: Sequence[str] = ("-m", "lanes"), variables: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start ``lanes run`` with these arguments. At the end no process may be left."""
    app = folder / "app.py"
    if not app.exists():
        app.write_text(APP)
    one = Running(folder, *arguments, program=program, variables=variables or {})
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        for pid in one.alive() if sys.exc_info()[0] else ():
            os.kill(pid, signal.SIGKILL)
    one.until(lambda: not one.alive(), "the end of all workers")


def get(address: str, path: str) -> tuple[int, Any]:
    """The status and the JSON or the text of a route; 0 = no connection."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            status, body = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read().decode()
    except OSError:
        return 0, None
    return status, json.loads(body) if body.startswith("{") else body
