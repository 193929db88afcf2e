"""The handler of the demo: an approval, then a write of the effect. All workers and the serial loop use the handler."""

from __future__ import annotations

import json
from typing import Protocol

from demo.faults import POISON, Faults
from lanes.core.types import Message


class Declined(Exception):
    """The approval of this attempt failed."""


class Approvals(Protocol):
    """A service that approves steps and stores their effects, such as ``Client``."""

    async def approve(self, case: str, step: int) -> None:
        """Wait for the approval of a step."""

    async def apply(self, case: str, step: int, epoch: int) -> object:
        """Store the effect of a step. A repeated call is harmless."""


class Approve:
    """A handler that waits for the approval of an event, and stores the effect of the event.

    ``faults`` decides which approvals fail.
    """

    def __init__(self, client: Approvals, faults: Faults) -> None:
        self._client = client
        self._faults = faults

    async def __call__(self, message: Message) -> None:
        """Handle a message of ``lanes``."""
        await self.handle(message.value, message.attempt, message.epoch)

    async def handle(self, payload: bytes, attempt: int, epoch: int) -> None:
        """Handle one event. Raises ``Declined`` if the approval fails. A repeated call is harmless."""
        event = json.loads(payload)
        case, step = event["case"], event["step"]
        await self._client.approve(case, step)
        failures = self._faults.failures(case, step)
        if attempt <= failures:
            raise Declined("this event is never approved" if failures == POISON else f"attempt {attempt} was declined")
        await self._client.apply(case, step, epoch)
