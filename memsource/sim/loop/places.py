"""The location of running code for errors about tasks: file, line and function."""

from __future__ import annotations

import asyncio
import math
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import anyio

import lanes
from memsource.sim.loop.tasks import SimTask

_MACHINERY: Final = tuple(
    str(Path(folder)) + os.sep
    for folder in (sysconfig.get_path("stdlib"), Path(anyio.__file__).parent, Path(__file__).parent)
)
"""Folders of the standard library, anyio and this loop, which contain no code of the user."""
_LIBRARY: Final = tuple(str(folder) + os.sep for folder in (Path(lanes.__file__).parent, Path(__file__).parents[2]))
_REAL: Final = ("lanes_kafka.", "lanes_jetstream.", "lanes.process", "lanes.workers.loop_watch")
"""Modules that run only in a consumer outside of the workers of a world."""
_STEP: Final = "_run_once"
"""Name of the loop's method that takes all steps."""
_PACKAGES: Final = ("site-packages", "dist-packages")
"""Folders below the standard library that contain other packages."""
_NAMED: Final = 10
"""The most tasks that one error names."""


def place_of_frame(frame: FrameType | None) -> str:
    """Return ``file:line in function`` of the innermost caller outside of the standard library, anyio and this package.

    Without such a caller, return the place of the innermost caller outside of this package.
    """
    innermost = None
    # Frames outside of the loop only started the loop.
    while frame is not None and frame.f_code.co_name != _STEP:
        if not _machinery(frame):
            return _place(frame)
        if innermost is None and not frame.f_code.co_filename.startswith(_MACHINERY[-1]):
            innermost = frame
        frame = frame.f_back
    return "nowhere" if innermost is None else _place(innermost)


def runs_a_real_consumer(frame: FrameType | None, tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Return whether a frame, its callers on the loop or a suspended task belong to a consumer outside of the workers.

    A client may connect in a separate task, whose own frames do not show the adapter.
    """
    frames = [frame for task in tasks for frame in _frames(task)]
    while frame is not None and frame.f_code.co_name != _STEP:
        frames.append(frame)
        frame = frame.f_back
    return any(str(one.f_globals.get("__name__")).startswith(_REAL) for one in frames)


def place_of_task(task: asyncio.Task[Any]) -> str:
    """Return ``file:line in function`` of the line where a suspended task waits."""
    frames = _frames(task)
    if not frames:
        return "its end"
    own = [frame for frame in frames if not _machinery(frame)]
    return _place((own or frames)[-1])


def _frames(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a suspended task, the outermost first."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        # The chain of awaited objects has coroutines, generators and asynchronous generators, and ends at a future.
        for kind, below in (("cr", "await"), ("gi", "yieldfrom"), ("ag", "await")):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                frames.append(frame)
                awaited = getattr(awaited, f"{kind}_{below}")
                break
        else:
            break
    return frames


def title(task: asyncio.Task[Any]) -> str:
    """Return the number, name and group of a task for an error message."""
    return f"task {task.title if isinstance(task, SimTask) else repr(task.get_name())}"


def handlers(tasks: Iterable[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Return the tasks that run the user's code."""
    return [task for task in tasks if any(not _machinery(frame) and not _library(frame) for frame in _frames(task))]


def waits(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """Return a line for each of the first ten tasks by number: its title, and the place where the task waits."""
    ordered = sorted(tasks, key=_numbered)
    lines = [f"  {title(task)} waits at {place_of_task(task)}" for task in ordered[:_NAMED]]
    return lines if len(ordered) <= _NAMED else [*lines, f"  … and {len(ordered) - _NAMED} more"]


def _numbered(task: asyncio.Task[Any]) -> tuple[float, str]:
    return (task.number if isinstance(task, SimTask) else math.inf), task.get_name()


def _machinery(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return file.startswith("<frozen")
    found = file.startswith(_MACHINERY)
    if found and file.startswith(_MACHINERY[0]) and any(name in file for name in _PACKAGES):
        return file.startswith(_MACHINERY[1:])
    return found


def _library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARY)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
