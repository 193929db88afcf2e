"""The two sides that a run and its workers show each other, as Protocols."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from anyio.abc import TaskGroup

from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.types import Message, Partition
from lanes.observe.tap import Tap
from lanes.source import SourceEvent


class RunContext(Protocol):
    """The run as its components see it: shared parts and callbacks that do not block.

    ``clock``: monotonic, in seconds; threads may call it. ``name``: the source in log lines.
    """

    engine: Engine
    clock: Clock
    tap: Tap
    name: str

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake each component that has something to do.

        ``taking``: number of ready lanes that the caller takes itself, without being woken.
        """

    def start_soon(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Start a task of the run; an error that it raises stops the run in order."""

    def stop_because(self, error: BaseException) -> None:
        """Stop in order; ``error`` is raised when everything has been drained. The first one wins."""

    def enter(self, event: SourceEvent) -> None:
        """Process an event of the source that had to wait."""

    def overdue(self, partition: Partition) -> bool:
        """Whether the lease on a partition has run out; if so, the partition is lost. Idempotent."""

    def lose(self, partition: Partition, reason: str) -> None:
        """Count nothing of a partition any more, from this call on. Idempotent."""

    def floors_moved(self) -> None:
        """Look again at the partitions at ``max_ahead``: a message has finished, or a commit was confirmed."""

    def room_changed(self) -> None:
        """Ask the source again: it may deliver more or less than before."""

    def look_for_due(self) -> None:
        """Look at the deadlines again: a hold may end sooner than was known."""


class Workers(Protocol):
    """The workers of one consumer: in tasks, in threads or for batches."""

    def start(self, tasks: TaskGroup) -> None:
        """Start them; they work until the task group is cancelled."""

    def wake(self, *, taking: int = 0) -> None:
        """Wake workers for the lanes that are ready. ``taking``: number of these that the caller takes itself."""

    def cancel(self, partition: Partition) -> None:
        """Interrupt the handlers that run for a partition, where a handler can be interrupted."""

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Messages whose handlers have run for ``timeout`` seconds or longer and cannot be interrupted."""
