"""The durable consumer behind a source: made when it is missing, checked when it is there, modified for takeover.

Configurations are kept as the JSON the server sent: a client's own types drop the fields they do not know, and
writing them back would erase those on the server.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final

import anyio

from lanes.errors import ConfigError, SourceError
from lanes_jetstream.connection import API_TIMEOUT, ApiError, Connection, NoAnswer

log = logging.getLogger("lanes.jetstream")

MANAGED: Final = "lanes-managed"
"""Metadata of a consumer that ``lanes`` made and may therefore modify."""

ORIGINAL_ACK_WAIT: Final = "lanes-original-ack-wait"
"""Metadata that holds the real ack_wait (nanoseconds) while it is shrunk; a start that finds it restores it."""

LEAST_ACK_WAIT: Final = 1.0
"""Seconds: with less, keeping messages alive would be most of the traffic."""

SHRUNK_ACK_WAIT_NS: Final = 1_000_000

SHRINK_SECONDS: Final = 0.4
"""How long ack_wait stays shrunk. The server looks at its timers again 0.1 s after the change."""

_LOOK: Final = 0.05
"""Seconds between two looks at whether an update is in force."""

_CONSUMER_NOT_FOUND: Final = 10014
_STREAM_NOT_FOUND: Final = 10059


@dataclass(frozen=True)
class Pending:
    """What a consumer had delivered and not seen acknowledged."""

    count: int
    waiting_pulls: int
    highest: int
    """The highest stream sequence that was ever delivered."""


class Durable:
    """One durable pull consumer. Every method raises ``NoAnswer`` when the server does not answer in time."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        name: str,
        *,
        filter_subject: str | None,
        ack_wait: float,
        max_ack_pending: int,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._name = name
        self._wanted: dict[str, Any] = {
            "durable_name": name,
            "name": name,
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait * 1e9),
            "deliver_policy": "all",
            "replay_policy": "instant",
            "max_deliver": -1,
            "max_ack_pending": max_ack_pending,
            "metadata": {MANAGED: "1"},
        }
        if filter_subject is not None:
            self._wanted["filter_subject"] = filter_subject
        self._filter_subject = filter_subject
        self.config: dict[str, Any] = {}
        self.incarnation = ""

    def __str__(self) -> str:
        return f"{self._stream}/{self._name}"

    @property
    def ack_wait(self) -> float:
        """Seconds; the original one while it is shrunk."""
        original = self._metadata.get(ORIGINAL_ACK_WAIT)
        # Absent where nothing is acknowledged; such a consumer is refused.
        return int(original if original is not None else self.config.get("ack_wait", 0)) / 1e9

    @property
    def max_ack_pending(self) -> int | None:
        """What the server allows to be unacknowledged; None = any number."""
        bound = int(self.config.get("max_ack_pending", -1))
        return bound if bound > 0 else None

    @property
    def managed(self) -> bool:
        """Whether ``lanes`` made it."""
        return MANAGED in self._metadata

    @property
    def _metadata(self) -> dict[str, str]:
        return self.config.get("metadata") or {}

    async def ensure(self) -> None:
        """Find or make the consumer, and check it. Raises ``ConfigError`` naming what does not fit, and the remedy."""
        self.incarnation, _ = await self._stream_state()
        try:
            await self.refresh()
        except ApiError as error:
            if error.err_code != _CONSUMER_NOT_FOUND:
                raise SourceError(f"consumer {self}: {error}") from None
            await self._create()
        self._check()

    async def refresh(self) -> Pending:
        """Read configuration and state anew."""
        info = await self._connection.api(f"CONSUMER.INFO.{self._stream}.{self._name}")
        self.config = dict(info["config"])
        return Pending(
            int(info.get("num_ack_pending", 0)),
            int(info.get("num_waiting", 0)),
            int((info.get("delivered") or {}).get("stream_seq", 0)),
        )

    async def check_stream(self, highest: int) -> None:
        """Raise ``SourceError`` when the stream is not the one this source started on, or has lost its end.

        ``highest``: the highest sequence seen. Sequences that are used again would pass for settled ones.
        """
        created, last = await self._stream_state()
        if created != self.incarnation:
            raise SourceError(
                f"stream {self._stream!r} was deleted and made anew: its sequences mean other messages now; "
                "start again when that was intended"
            )
        if last < highest:
            raise SourceError(
                f"stream {self._stream!r} ends at sequence {last} and was read up to {highest}: the server has lost "
                "messages, and new ones take their sequences; check what is missing, then start again"
            )

    async def restore(self) -> None:
        """Give a shrunk consumer its own ack_wait back, also one that an earlier process left so. Idempotent."""
        if ORIGINAL_ACK_WAIT not in self._metadata:
            return
        metadata = {k: v for k, v in self._metadata.items() if k != ORIGINAL_ACK_WAIT}
        await self._update(int(self._metadata[ORIGINAL_ACK_WAIT]), metadata)

    async def requeue_pending(self) -> None:
        """Make the server queue everything unacknowledged for redelivery, before anything new.

        Shrinks ack_wait for a moment. The original goes into the metadata by the same update, so that a process
        that dies between the two leaves a consumer that the next start repairs. Finishes the restore even when
        it is cancelled.
        """
        original = str(self.config["ack_wait"])
        try:
            # Shielded: a cancelled one would not know whether there is something to restore.
            with anyio.CancelScope(shield=True):
                await self._update(SHRUNK_ACK_WAIT_NS, {**self._metadata, ORIGINAL_ACK_WAIT: original})
            await asyncio.sleep(SHRINK_SECONDS)
        finally:
            # Shielded: a cancelled takeover must not leave the shrunk ack_wait behind. Bounded by the API's timeout.
            with anyio.CancelScope(shield=True):
                await self.restore()

    async def _update(self, ack_wait: int, metadata: dict[str, str]) -> None:
        """Change ack_wait (nanoseconds) and metadata together, and see that it is so."""
        config = {**self.config, "ack_wait": ack_wait, "metadata": metadata}
        await self._connection.api(
            f"CONSUMER.CREATE.{self._stream}.{self._name}",
            {"stream_name": self._stream, "config": config, "action": "update"},
        )
        # Not from the answer: a server that has just restarted answers with the configuration before the update.
        deadline = asyncio.get_running_loop().time() + API_TIMEOUT
        while True:
            await self.refresh()
            if self.config["ack_wait"] == ack_wait:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise NoAnswer(f"consumer {self}: the server accepted a new ack_wait and does not show it")
            await asyncio.sleep(_LOOK)

    async def _create(self) -> None:
        request = {"stream_name": self._stream, "config": self._wanted, "action": "create"}
        try:
            answer = await self._connection.api(f"CONSUMER.CREATE.{self._stream}.{self._name}", request)
        except ApiError as error:
            raise ConfigError(
                f"consumer {self} cannot be created: {error}; correct the setting it names, or create the consumer "
                "yourself"
            ) from None
        self.config = dict(answer["config"])
        log.info("%s: created a durable pull consumer", self)

    async def _stream_state(self) -> tuple[str, int]:
        try:
            info = await self._connection.api(f"STREAM.INFO.{self._stream}")
        except ApiError as error:
            if error.err_code == _STREAM_NOT_FOUND:
                raise ConfigError(
                    f"stream {self._stream!r} does not exist at {self._connection.servers}: create it, or correct "
                    "stream=…"
                ) from None
            raise SourceError(f"stream {self._stream!r}: {error}") from None
        return str(info["created"]), int(info["state"]["last_seq"])

    def _check(self) -> None:
        config = self.config
        wrong: list[str] = []
        if config.get("deliver_subject"):
            wrong.append("it is a push consumer; lanes pulls: use another durable")
        if config.get("ack_policy") != "explicit":
            wrong.append(f"ack_policy is {config.get('ack_policy')!r}; set it to 'explicit'")
        if config.get("max_deliver", -1) != -1:
            wrong.append(
                f"max_deliver is {config['max_deliver']}: the server would drop messages from their key's order; set "
                "it to -1, lanes bounds the attempts itself"
            )
        if config.get("backoff"):
            wrong.append("backoff is set: lanes retries inside the lane; remove it")
        if config.get("priority_groups"):
            wrong.append("priority_groups are set: they share one consumer among processes; use a durable without")
        if self.ack_wait < LEAST_ACK_WAIT:
            wrong.append(f"ack_wait is {self.ack_wait:g} s; set it to {LEAST_ACK_WAIT:g} s or more, minutes are good")
        if self._filter_subject is not None and config.get("filter_subject") != self._filter_subject:
            found = config.get("filter_subject") or config.get("filter_subjects") or "everything"
            wrong.append(f"it filters {found!r}, not {self._filter_subject!r}: use another durable")
        if wrong:
            raise ConfigError(f"consumer {self} does not fit: " + "; ".join(wrong))
