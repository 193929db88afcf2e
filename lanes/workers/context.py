"""Two Protocols: the part of a run that its components use, and the part of the workers that a run uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Protocol

from anyio.abc import TaskGroup

from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.types import Message, Partition
from lanes.observe.tap import Tap
from lanes.source import SourceEvent
from lanes.workers.freezes import FreezeWatch
from lanes.workers.loop_watch import LoopWatch
from lanes.workers.outputs import OutputBuffer


class RunContext(Protocol):
    """Objects and callbacks that every component of a run receives. No callback blocks.

    Attributes:
        engine: The engine.
        clock: Monotonic clock in seconds. Threads may call the clock.
        tap: The observers of the run.
        loop_watch: The check for calls that block the event loop.
        freezes: The check for freezes; None = the broker does not reassign the partitions of a silent process.
        name: Name of the source in log lines.
        outputs: The buffer of the outputs of handlers; None = the consumer has no publisher.
    """

    engine: Engine
    clock: Clock
    tap: Tap
    loop_watch: LoopWatch
    freezes: FreezeWatch | None
    name: str
    outputs: OutputBuffer | None

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake each component that has work.

        ``taking``: number of ready lanes for which the caller needs no wake-up.
        """

    def after_command(self) -> None:
        """Call ``after``, in the next turn of the loop if no task of the loop makes this call."""

    def start_soon(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Start a task. If the task raises an exception, call ``stop_because`` with the exception."""

    def interrupting(self, partition: Partition) -> None:
        """Count the unfinished messages of a partition for its next drain.

        The caller then abandons one of these messages.
        """

    def stop_because(self, error: BaseException, *, message: Message | None = None) -> None:
        """Drain and stop the run. The consumer then raises the ``error`` of the first such call.

        ``message``: message whose handler raised the error, for the log.
        """

    def enter(self, event: SourceEvent) -> None:
        """Process a deferred event of the source."""

    def overdue(self, partition: Partition) -> bool:
        """If the lease of a partition has expired, report the partition as lost.

        Return whether the lease has expired. Idempotent.
        """

    def lose(self, partition: Partition, reason: str) -> None:
        """Give up a lost partition. After this call, the engine ignores results of the partition. Idempotent."""

    def floors_moved(self) -> None:
        """Check the partitions at ``max_ahead`` again, because a message has finished or a commit was confirmed."""

    def room_changed(self) -> None:
        """Call ``Source.receive`` again with the new bounds of messages and bytes."""

    def look_for_due(self) -> None:
        """Compute the next deadline again, because a hold may end sooner."""


class Workers(Protocol):
    """The workers of one consumer, in tasks, in threads or for batches."""

    def start(self, tasks: TaskGroup) -> None:
        """Start the workers, which work until the task group is cancelled."""

    def wake(self, *, taking: int = 0) -> None:
        """Wake workers for the ready lanes. ``taking``: number of ready lanes that the caller itself takes."""

    def hold(self) -> None:
        """Start no handler while the check for freezes forbids new handlers. Any thread may call this method."""

    def cancel(self, partition: Partition) -> None:
        """Cancel the cancellable handlers that run for a partition."""

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Return the messages whose handlers have run in threads for ``timeout`` seconds or longer. O(threads)."""

    def on_the_loop(self) -> list[Message]:
        """Return the messages whose handlers run on the event loop."""

    def message_in(self, frame: FrameType) -> Message | None:
        """Return the message whose handler a frame of these workers calls on the event loop.

        The result is None if the frame calls no handler. Any thread may call the method.
        """
