"""The durable consumer behind a source: created when it is missing, checked when it exists, modified for a takeover.

Configurations are kept as the JSON that the server sent. The client's own types drop the fields they do not know, and
writing them back would erase those fields on the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio

from lanes.errors import ConfigError, SourceError
from lanes_jetstream.wire.connection import (
    API_TIMEOUT,
    CONSUMER_NOT_FOUND,
    STREAM_NOT_FOUND,
    ApiError,
    Connection,
    NoAnswer,
)
from lanes_jetstream.wire.stream import StreamState, read_stream

log = logging.getLogger("lanes.jetstream")

LEAST_ACK_WAIT: Final = 1.0
"""Seconds: with less, keeping messages alive would be most of the traffic."""

_SECOND: Final = 1_000_000_000


MANAGED: Final = "lanes-managed"
"""Metadata of a consumer that ``lanes`` made and may therefore modify."""

ORIGINAL_ACK_WAIT: Final = "lanes-original-ack-wait"
"""Metadata that holds the real ack_wait (nanoseconds) while it is shrunk; a start that finds it restores it."""

ORIGINAL_BACKOFF: Final = "lanes-original-backoff"
"""The same for a BackOff: a JSON list of nanoseconds."""

SHRUNK_ACK_WAIT_NS: Final = 1_000_000

SHRINK_SECONDS: Final = 0.4
"""How long ack_wait stays shrunk. The server looks at its timers again 0.1 s after the change."""

_POLL_INTERVAL: Final = 0.05
"""Seconds between two looks at whether an update is in force."""

KEEPS_CREATED: Final = (2, 12)
"""The first nats-server whose consumers have the same creation time after a restart."""


def ack_waits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds after which a delivery is unacknowledged for too long: the shortest and the longest.

    A BackOff, one wait a delivery, replaces ack_wait.
    """
    waits = [int(wait) for wait in config.get("backoff") or [config.get("ack_wait", 0)]]
    return min(waits) / _SECOND, max(waits) / _SECOND


def misfits(config: Mapping[str, Any], *, filter_subject: str | None, may_modify: bool) -> list[str]:
    """What has to be changed. ``may_modify``: the consumer's timers may be changed for a takeover."""
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
    if config.get("backoff") and not may_modify:
        wrong.append(
            'backoff is set: lanes retries inside the lane; remove it, or permit takeover="modify", which takes it off '
            "for a moment at each takeover"
        )
    if config.get("priority_groups"):
        wrong.append("priority_groups are set: they share one consumer among processes; use a durable without")
    shortest, _ = ack_waits(config)
    if shortest < LEAST_ACK_WAIT:
        what = "backoff begins with" if config.get("backoff") else "ack_wait is"
        wrong.append(f"{what} {shortest:g} s; set it to {LEAST_ACK_WAIT:g} s or more, minutes are good")
    if filter_subject is not None and config.get("filter_subject") != filter_subject:
        found = config.get("filter_subject") or config.get("filter_subjects") or "everything"
        wrong.append(f"it filters {found!r}, not {filter_subject!r}: use another durable")
    return wrong


def filtered(config: Mapping[str, Any]) -> bool:
    """Whether it delivers a part of the stream alone."""
    return bool(config.get("filter_subject") or config.get("filter_subjects"))


@dataclass(frozen=True)
class ConsumerState:
    """What a consumer had delivered and not seen acknowledged.

    ``deliveries``: how many there were, repeated ones included. ``settled_above_floor``: whether something above the
    lowest unacknowledged message may be acknowledged. ``left``: what it has not delivered yet.
    """

    count: int
    waiting_pulls: int
    highest: int
    """The highest stream sequence that was ever delivered."""
    deliveries: int
    settled_above_floor: bool
    left: int
    paused: bool


@dataclass(frozen=True)
class ConsumerSnapshot:
    """A consumer at one moment, and the stream a moment before."""

    stream: StreamState
    config: Mapping[str, Any]
    pending: ConsumerState


class DurableConsumer:
    """One durable pull consumer. Every method raises ``NoAnswer`` when the server does not answer in time.

    ``start``: the fields of ``start_fields``, for one that is made here. ``modify``: its timers may be changed whoever
    made it; ``hold_back``: they may not, whoever made it.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        name: str,
        *,
        filter_subject: str | None,
        ack_wait: float,
        max_ack_pending: int,
        start: Mapping[str, Any],
        modify: bool,
        hold_back: bool,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._name = name
        self._wanted: dict[str, Any] = {
            "durable_name": name,
            "name": name,
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait * 1e9),
            "replay_policy": "instant",
            "max_deliver": -1,
            "max_ack_pending": max_ack_pending,
            "metadata": {MANAGED: "1"},
            **start,
        }
        if filter_subject is not None:
            self._wanted["filter_subject"] = filter_subject
        self._filter_subject = filter_subject
        self._modify = modify
        self._hold_back = hold_back
        self.config: dict[str, Any] = {}
        self.state: StreamState
        self._created: str | None = None

    def __str__(self) -> str:
        return f"{self._stream}/{self._name}"

    @property
    def tokens(self) -> str:
        """Its stream and its name, as they stand in subjects."""
        return f"{self._stream}.{self._name}"

    @property
    def incarnation(self) -> str:
        """Which stream it was when it was found: its creation time."""
        return self.state.incarnation

    @property
    def ack_waits(self) -> tuple[float, float]:
        """The shortest and the longest, in seconds; the original ones while they are shrunk."""
        return ack_waits(self._original)

    @property
    def max_ack_pending(self) -> int | None:
        """What the server allows to be unacknowledged; None = any number."""
        bound = int(self.config.get("max_ack_pending", -1))
        return bound if bound > 0 else None

    @property
    def modifiable(self) -> bool:
        """Whether its timers may be changed: ``lanes`` made it, or the user permits it."""
        return self._modify or (MANAGED in self._metadata and not self._hold_back)

    @property
    def drops_acknowledged(self) -> bool:
        """Whether the stream drops what is acknowledged, so that it cannot come again."""
        return self.state.retention == "workqueue"

    @property
    def loses_last_acks(self) -> bool:
        """Whether a server that is killed forgets the last acknowledgements: one copy."""
        return self.state.loses_last_acks or int(self.config.get("num_replicas", 0)) == 1

    @property
    def _metadata(self) -> dict[str, str]:
        return self.config.get("metadata") or {}

    @property
    def _original(self) -> dict[str, Any]:
        """The configuration as it is when nothing is shrunk."""
        metadata = dict(self._metadata)
        ack_wait, backoff = metadata.pop(ORIGINAL_ACK_WAIT, None), metadata.pop(ORIGINAL_BACKOFF, None)
        if ack_wait is None:
            return self.config
        try:
            original = {**self.config, "ack_wait": int(ack_wait), "metadata": metadata}
            if backoff is not None:
                original["backoff"] = [int(wait) for wait in json.loads(backoff)]
        except (TypeError, ValueError):
            raise ConfigError(
                f"consumer {self}: its metadata {ORIGINAL_ACK_WAIT!r} or {ORIGINAL_BACKOFF!r} cannot be read: set "
                "ack_wait and backoff as they should be, and remove both"
            ) from None
        return original

    async def ensure(self) -> None:
        """Find or make the consumer, and check it. Raises ``ConfigError`` naming what does not fit, and the remedy."""
        self.state = await read_stream(self._connection, self._stream)
        try:
            await self.refresh()
        except ApiError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise self._connection.failed(f"consumer {self}", error) from None
            await self._create()
        else:
            if self._wanted["deliver_policy"] != "all":
                log.info("%s: start=… is for the first run; the consumer is there and goes on where it stands", self)
        wrong = self.misfits(self._original)
        if wrong:
            raise ConfigError(f"consumer {self} does not fit: {wrong}")

    def misfits(self, config: Mapping[str, Any]) -> str:
        """What of a configuration does not fit, each with the remedy; empty when it fits."""
        return "; ".join(misfits(config, filter_subject=self._filter_subject, may_modify=self._modify))

    async def refresh(self) -> ConsumerState:
        """Read configuration and state anew. Raises ``ApiError`` too."""
        self.config, pending = await self._info()
        return pending

    async def inspect(self, highest: int) -> ConsumerSnapshot:
        """Check the stream, read the consumer, change nothing here. Raises like ``check_stream`` and ``refresh``."""
        # The stream first: what it has lost by then and the consumer has not delivered later was not delivered.
        stream = await self.check_stream(highest)
        config, pending = await self._info()
        return ConsumerSnapshot(stream, config, pending)

    async def check_stream(self, highest: int) -> StreamState:
        """Raise ``SourceError`` when the stream is not the one this source started on, or has lost its end.

        ``highest``: the highest sequence seen. Sequences that are used again would pass for settled ones.
        """
        try:
            state = await read_stream(self._connection, self._stream)
        except ConfigError:
            raise SourceError(self._stream_gone) from None
        if state.incarnation != self.incarnation:
            raise SourceError(
                f"stream {self._stream!r} was deleted and made anew: its sequences mean other messages now; "
                "start again when that was intended"
            )
        if state.last < highest:
            raise SourceError(
                f"stream {self._stream!r} ends at sequence {state.last} and was read up to {highest}: the server has "
                "lost messages, and new ones take their sequences; check what is missing, then start again"
            )
        return state

    @property
    def _stream_gone(self) -> str:
        return f"stream {self._stream!r} was deleted while it was read: make it again, then start again"

    def failure_text(self, error: ApiError) -> str:
        """What to say of a consumer that the server does not have any more, or does not give out."""
        if error.err_code == STREAM_NOT_FOUND:
            return self._stream_gone
        if error.err_code == CONSUMER_NOT_FOUND:
            return f"consumer {self} was deleted; prevent that, or start again with a new one, which begins at start=…"
        return f"consumer {self}: {error}"

    async def restore(self) -> None:
        """Give a shrunk consumer its own timers back, also one that an earlier process left so. Idempotent."""
        if ORIGINAL_ACK_WAIT in self._metadata:
            await self._update(self._original)

    async def requeue_pending(self) -> None:
        """Make the server queue everything unacknowledged for redelivery, before anything new.

        Shrinks ack_wait for a moment, without a BackOff, which would replace it. The originals go into the metadata by
        the same update, so that a process that dies between the two leaves a consumer that the next start repairs.
        Finishes the restore even when it is cancelled.
        """
        original = self._original
        metadata = {**(original.get("metadata") or {}), ORIGINAL_ACK_WAIT: str(original["ack_wait"])}
        if original.get("backoff"):
            metadata[ORIGINAL_BACKOFF] = json.dumps(original["backoff"])
        shrunk = {**original, "ack_wait": SHRUNK_ACK_WAIT_NS, "metadata": metadata}
        shrunk.pop("backoff", None)
        try:
            # Shielded: a cancelled one would not know whether there is something to restore.
            with anyio.CancelScope(shield=True):
                await self._update(shrunk)
            await asyncio.sleep(SHRINK_SECONDS)
        finally:
            # Shielded: a cancelled takeover must not leave the shrunk ack_wait behind. Bounded by the API's timeout.
            with anyio.CancelScope(shield=True):
                await self.restore()

    async def reset(self) -> None:
        """Make the server begin again behind the lowest unacknowledged message, in the order of the stream.

        Whatever is acknowledged above that comes again too. Raises ``ApiError`` where the server cannot.
        """
        await self._connection.api(f"CONSUMER.RESET.{self._stream}.{self._name}", {})

    async def _info(self) -> tuple[dict[str, Any], ConsumerState]:
        info = await self._connection.api(f"CONSUMER.INFO.{self._stream}.{self._name}")
        self._created = self._created or str(info["created"])
        if self._created != str(info["created"]) and self._connection.server_version >= KEEPS_CREATED:
            raise SourceError(
                f"consumer {self} was deleted and made anew while it was read: it has forgotten what was acknowledged; "
                "start again when that was intended"
            )
        delivered, floor = info.get("delivered") or {}, info.get("ack_floor") or {}
        count, deliveries = int(info.get("num_ack_pending", 0)), int(delivered.get("consumer_seq", 0))
        return dict(info["config"]), ConsumerState(
            count=count,
            waiting_pulls=int(info.get("num_waiting", 0)),
            highest=int(delivered.get("stream_seq", 0)),
            deliveries=deliveries,
            # Each unacknowledged message is one delivery above the floor: more of them than that were acknowledged.
            settled_above_floor=deliveries - int(floor.get("consumer_seq", 0)) > count,
            left=int(info.get("num_pending", 0)),
            paused=bool(info.get("paused", False)),
        )

    async def _update(self, config: Mapping[str, Any]) -> None:
        """Change ack_wait, BackOff and metadata together, and see that it is so."""
        await self._connection.api(
            f"CONSUMER.CREATE.{self._stream}.{self._name}",
            {"stream_name": self._stream, "config": config, "action": "update"},
        )
        # Not from the answer: a server that has just restarted answers with the configuration before the update.
        deadline = asyncio.get_running_loop().time() + API_TIMEOUT
        while True:
            await self.refresh()
            if all((self.config.get(name) or None) == (config.get(name) or None) for name in ("ack_wait", "backoff")):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise NoAnswer(f"consumer {self}: the server accepted a new ack_wait and does not show it")
            await asyncio.sleep(_POLL_INTERVAL)

    async def _create(self) -> None:
        request = {"stream_name": self._stream, "config": self._wanted, "action": "create"}
        try:
            answer = await self._connection.api(f"CONSUMER.CREATE.{self._stream}.{self._name}", request)
        except ApiError as error:
            if error.temporary:
                raise self._connection.failed(f"consumer {self}", error) from None
            raise ConfigError(
                f"consumer {self} cannot be created: {error}; correct the setting it names, or create the consumer "
                "yourself"
            ) from None
        self.config = dict(answer["config"])
        log.info("%s: created a durable pull consumer", self)
