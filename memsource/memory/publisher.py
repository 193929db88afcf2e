"""A publisher in memory, whose confirmed outputs a test reads."""

from __future__ import annotations

from collections.abc import Sequence

from lanes.outputs.publisher import Output, Report
from memsource.memory.scripted import Call, Scripted


class MemoryPublisher(Scripted):
    """A publisher that keeps its outputs in memory, without deduplication.

    Attributes:
        calls: All calls of the publisher's methods.
        outputs: The visible outputs in the order of their writes. A repeated send is a second output.
        refused: Errors of the outputs to a target. The publisher does not write these outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Output] = []
        self.refused: dict[str, Exception] = {}

    def __repr__(self) -> str:
        return f"<MemoryPublisher: {len(self.outputs)} outputs>"

    async def open(self) -> None:
        """Do nothing; see ``lanes.outputs.publisher.Publisher.open``."""
        async with self._meet(Call("open")):
            pass

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        """Write outputs; see ``lanes.outputs.publisher.Publisher.publish``.

        Args:
            outputs: The outputs.
            report: Called once for each output.
        """
        async with self._meet(Call("publish", outputs=tuple(outputs))):
            written = [output for output in outputs if output.target not in self.refused]
            self.outputs += written
        for output in outputs:
            report(output, self.refused.get(output.target))

    def published(self, target: str) -> list[Output]:
        """Return the visible outputs to a target, in the order of their writes.

        Args:
            target: Topic or subject.

        Returns:
            A new list.
        """
        return [output for output in self.outputs if output.target == target]

    async def aclose(self) -> None:
        """Do nothing; see ``lanes.outputs.publisher.Publisher.aclose``."""
        async with self._meet(Call("aclose")):
            pass
