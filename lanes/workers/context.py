"""What the parts of a run need of the run around them, all of them; who needs more says so beside itself."""

from __future__ import annotations

from typing import Protocol

from lanes.core.types import Partition


class Shell(Protocol):
    """The run of a consumer, as its parts see it. Nothing blocks."""

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake whoever has something to do now.

        ``taking``: how many ready lanes the caller will take itself, without being woken.
        """

    def overdue(self, partition: Partition) -> bool:
        """Whether the lease on a partition has run out: then it is lost from this call on. Idempotent."""

    def stop_because(self, error: BaseException) -> None:
        """Stop in order; ``error`` is raised when everything has been drained. The first one wins."""
