"""Consumers whose handlers run in processes, and the notes of these handlers; see ``tests.fakes.process_handlers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from lanes import Retry, Settings
from memsource.memory.broker import MemoryBroker

PATIENCE = 60.0
"""Seconds after which a fact that is not there is a failure. A process may take long to start on a loaded machine."""


def notes(folder: Path) -> list[str]:
    """Return the whole lines that the handlers have written."""
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition, with a pause between two checks, because processes need the CPU."""
    with anyio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 (another process makes the fact true)
            await anyio.sleep(0.01)


def pids(folder: Path) -> list[int]:
    """Return the processes of the started handlers, in the order of the starts."""
    return [int(line.split()[1]) for line in notes(folder) if line.startswith("start ")]


def alive(pid: int) -> bool:
    """Whether a process runs. An ended process that its parent has not reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def in_processes(count: int = 1, *, attempts: int = 1, **settings: Any) -> Settings:
    """Return settings for handlers in processes, without backoff."""
    fixed: dict[str, Any] = {"sync_handlers": "processes", "commit_interval": 0.0, "on_cancel": "stop"}
    return Settings(**{**fixed, "processes": count, "retry": Retry(attempts=attempts, backoff=0), **settings})


def broker_of(folder: Path, *keys: str | None, partitions: int = 1) -> MemoryBroker:
    """Return a broker with a message for each key."""
    broker = MemoryBroker(partitions)
    for key in keys:
        broker.publish(str(folder), key=key)
    return broker
