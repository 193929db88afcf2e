"""The packages need no module that only POSIX systems have, except Spark and handlers in processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.process

ROOT: Final = Path(__file__).resolve().parents[2]

BLOCKED: Final = ("fcntl", "grp", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty")
"""Modules that Windows does not have."""

_BEFORE = f"""
import asyncio, concurrent.futures, multiprocessing, os, signal, ssl, subprocess, sys, tempfile, threading

for name in {BLOCKED!r}:
    sys.modules[name] = None
for module, names in {{
    os: ("fork", "forkpty", "getuid", "geteuid", "killpg", "pread", "pwrite", "register_at_fork", "sched_getaffinity",
         "setsid", "sysconf"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "getitimer", "pthread_sigmask", "setitimer"),
}}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""

_IMPORT = """
import importlib, pkgutil

for package in ("lanes", "memsource", "lanes_jetstream", "lanes_kafka", "lanes_postgres"):
    root = importlib.import_module(package)
    for each in pkgutil.walk_packages(root.__path__, f"{package}."):
        # The module of a process for handlers runs only there, and `__main__` runs the commands.
        if each.name != "lanes.workers.child" and not each.name.endswith("__main__"):
            importlib.import_module(each.name)
print("imported")
"""

_RUN = """
import anyio, pathlib
import lanes
from memsource import MemoryBroker, MemorySource, check, read, simulate

folder = pathlib.Path(tempfile.mkdtemp())
broker = MemoryBroker()
for number in range(20):
    broker.publish(str(number), key=f"key-{number % 3}")
source = MemorySource(broker)
source.finish()
handled = []


def handler(message):
    handled.append(message.position)


async def main():
    consumer = lanes.Consumer(source, handler, history=lanes.History(folder))
    assert await lanes.serve(consumer) == 0


anyio.run(main)
assert sorted(handled) == list(range(20))
for verdict in check(read([folder])):
    assert not verdict.violations, verdict


@simulate(runs=3)
async def test(world):
    world.workers(2, slow)
    world.produce("orders", 10, keys=3)
    await world.settled()


async def slow(message):
    await anyio.sleep(0.1)


test()
print("handled")
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_without_the_modules_of_posix() -> None:
    assert run(_BEFORE + _IMPORT) == "imported\n"


def test_a_consumer_and_a_simulation_run_without_the_modules_of_posix() -> None:
    assert run(_BEFORE + _RUN).endswith("handled\n")


def test_the_blocked_modules_are_blocked() -> None:
    for name in BLOCKED:
        assert run(f"{_BEFORE}\ntry:\n    import {name}\nexcept ImportError:\n    print('none')") == "none\n"
