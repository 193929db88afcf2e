"""Counts of the hand-offs on an asyncio event loop: the steps of its tasks and the calls from other threads."""

from __future__ import annotations

import asyncio
import asyncio.events
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from lanes.core.types import Partition, Settlement
from lanes.runtime.settle import Settler
from tests.fakes.support import until

MESSAGES = 10

STEPS = {"to a worker": "TaskWorkers._work", "to a commit": "Settler._commit"}
"""Parts of the names of tasks, whose steps are counted."""


class HandOffs(Counter[str]):
    """Counts each callback that the loop runs while ``counting`` is set. ``settled`` counts the settlements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counting = False
        run = asyncio.events.Handle._run

        def counted(handle: Any) -> None:
            if self.counting:
                self[self._name_of(handle._callback)] += 1
            run(handle)

        monkeypatch.setattr(asyncio.events.Handle, "_run", counted)
        self.settled = 0
        send = Settler._try_to_send

        async def sent(settler: Settler, settlements: list[Settlement]) -> Sequence[Partition]:
            failed = await send(settler, settlements)
            self.settled += not failed
            return failed

        monkeypatch.setattr(Settler, "_try_to_send", sent)

    @staticmethod
    def _name_of(callback: Any) -> str:
        task = getattr(callback, "__self__", None)
        if isinstance(task, asyncio.Task):
            return next((name for name, part in STEPS.items() if part in task.get_name()), "to another task")
        return str(getattr(callback, "__qualname__", callback))

    async def of(self, publish: Callable[[int], Awaitable[object]], handled: list[int]) -> dict[str, float]:
        """Publish each message after the previous message is settled, and return the counts of a message.

        Args:
            publish: Publishes a message.
            handled: The handled messages.
        """
        for number in range(MESSAGES + 1):
            # The first message ends what the start of the consumer has begun.
            self.counting = number > 0
            before, settled = len(handled), self.settled
            await publish(number)
            await until(lambda: len(handled) > before and self.settled > settled)  # noqa: B023
        return {name: count / MESSAGES for name, count in self.items()}
