"""The publishing of the log, and the publisher's history."""

from __future__ import annotations

from collections.abc import Sequence

from demo.brokers.broker import Broker
from demo.config import HOOK_EVERY, DemoConfig
from demo.events import Event
from demo.places import Places
from demo.progress import Progress
from lanes.clock import monotonic
from lanes.history.recorder import Recorder


class Feed:
    """A publisher of the log in parts. The publisher runs on asyncio. One task at a time may call ``publish``."""

    def __init__(
        self, config: DemoConfig, events: Sequence[Event], broker: Broker, where: Places, progress: Progress
    ) -> None:
        self._config = config
        self._events = events
        self._broker = broker
        self._progress = progress
        self._history = Recorder(where.history, member="publisher")
        self._hooked = 0.0
        self.published = 0
        """Number of published events."""

    def open(self) -> None:
        """Start the publisher's history."""
        # A publisher has no messages in flight, so the bounds in its segment do not matter.
        self._history.open(
            source=self._broker.stream, concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=monotonic()
        )

    async def publish(self, share: float = 1.0) -> int:
        """Publish events up to the ``share`` of all events. Return the total number of published events.

        Raises the errors of ``Broker.publish``.
        """
        begin, end = self.published, round(len(self._events) * share)

        async def published(count: int) -> None:
            progress = self._progress
            progress.published = begin + count
            progress.answering = self._broker.connected
            # After the first start, the main part calls the hook itself.
            hook = None if progress.starts else self._config.on_progress
            if hook is not None and monotonic() - self._hooked >= HOOK_EVERY:
                self._hooked = monotonic()
                await hook(progress)

        if begin < end:
            await self._broker.publish(self._events[begin:end], self._history, published)
            self.published = end
        return self.published

    def close(self, reason: str) -> None:
        """End the publisher's history. ``reason`` is ``"stopped"`` or ``"failed"``."""
        self._history.close(reason, monotonic())
