"""Creates or checks the durable consumer of a source, and changes its timers for takeovers.

The module keeps a configuration as the JSON that the server sent. The client's own types drop unknown fields. An update
with these types would therefore erase the fields on the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio

from lanes.clock import monotonic
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import API_TIMEOUT, Connection, NoAnswer
from lanes_jetstream.wire.keys import KeyFunction, check_no_partition_number, check_varies
from lanes_jetstream.wire.stream import StreamState, read_stream
from lanes_jetstream.wire.subjects import matches

log = logging.getLogger("lanes.jetstream")

LEAST_ACK_WAIT: Final = 1.0
"""The shortest permitted ack_wait in seconds. With a shorter ack_wait, the source would send mostly in-progress
acknowledgements.
"""

_SECOND: Final = 1_000_000_000

_NAMED_SUBJECTS: Final = 10
"""Maximum number of subjects of a stream that an error names."""

MANAGED: Final = "lanes-managed"
"""Metadata key of a consumer that ``lanes`` created and may therefore modify."""

ORIGINAL_ACK_WAIT: Final = "lanes-original-ack-wait"
"""Metadata key of the original ack_wait in nanoseconds, while ack_wait is shrunk. The next start restores this
value."""

ORIGINAL_BACKOFF: Final = "lanes-original-backoff"
"""Metadata key of the original BackOff, a JSON list of nanoseconds, while ack_wait is shrunk."""

SHRUNK_ACK_WAIT_NS: Final = 1_000_000

SHRINK_SECONDS: Final = 0.4
"""Seconds that ack_wait remains shrunk. The server checks the timers of the consumer 0.1 s after the change."""

_POLL_INTERVAL: Final = 0.05
"""Seconds between two checks whether the server has applied an update."""

KEEPS_CREATED: Final = (2, 12)
"""The first nats-server whose consumers keep their creation time across a restart."""


def ack_waits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the shortest and the longest time in seconds after which the server redelivers.

    A BackOff replaces ack_wait with one time for each delivery.
    """
    waits = [int(wait) for wait in config.get("backoff") or [config.get("ack_wait", 0)]]
    return min(waits) / _SECOND, max(waits) / _SECOND


def filtered(config: Mapping[str, Any]) -> bool:
    """Return whether the consumer has a subject filter."""
    return bool(config.get("filter_subject") or config.get("filter_subjects"))


def _filters(config: Mapping[str, Any]) -> list[str]:
    """Return the patterns of the subjects that the consumer receives."""
    return list(config.get("filter_subjects") or [config.get("filter_subject") or ">"])


@dataclass(frozen=True)
class ConsumerState:
    """Progress of a consumer on the server.

    Attributes:
        unacknowledged: Number of delivered and unacknowledged messages. waiting_pulls: Number of open pull requests
            from all processes.
        highest: Highest delivered stream sequence.
        deliveries: Number of deliveries, including redeliveries.
        settled_above_floor: Whether acknowledged messages may exist above the lowest unacknowledged message.
        undelivered: Number of messages that the server has never delivered.
        paused: Whether an operator paused the consumer.
    """

    unacknowledged: int
    waiting_pulls: int
    highest: int
    deliveries: int
    settled_above_floor: bool
    undelivered: int
    paused: bool


@dataclass(frozen=True)
class ConsumerSnapshot:
    """The configuration and state of a consumer, and the state of its stream, which the object reads first."""

    stream: StreamState
    config: Mapping[str, Any]
    state: ConsumerState

    @property
    def in_takeover(self) -> bool:
        """Whether a process has shrunk the ack_wait of the consumer for a takeover."""
        return ORIGINAL_ACK_WAIT in (self.config.get("metadata") or {})


class DurableConsumer:
    """One durable pull consumer. Each request to the server raises ``NoAnswer`` if the server does not answer in time.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        name: Name of the consumer.
        filter_subject: Subject filter of a new consumer; None = all subjects.
        filter_subjects: Several subject filters, in place of ``filter_subject``.
        ack_wait: Seconds until the server redelivers a message, 1 or more, for a new consumer.
        max_ack_pending: Limit of unacknowledged messages, 1 or more, for a new consumer.
        start: Configuration fields from ``start_fields`` for a new consumer.
        modify: Whether a takeover may also change the timers of a consumer that another program created.
        hold_back: Whether a takeover must leave the timers of any consumer unchanged, even if ``lanes`` created the
            consumer.
        check: Function that raises ``ConfigError`` if the stream does not fit. The object calls it before it creates
            the consumer.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        name: str,
        *,
        filter_subject: str | None,
        filter_subjects: Sequence[str] = (),
        ack_wait: float,
        max_ack_pending: int,
        start: Mapping[str, Any],
        modify: bool,
        hold_back: bool,
        check: Callable[[StreamState], None] = lambda _: None,
    ) -> None:
        self._connection = connection
        self.stream = stream
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
        if filter_subjects:
            self._wanted["filter_subjects"] = list(filter_subjects)
        self._filter_subject = filter_subject
        self._filter_subjects = frozenset(filter_subjects)
        self._check = check
        self._modify = modify
        self._hold_back = hold_back
        self.config: dict[str, Any] = {}
        self.stream_state: StreamState
        self._created: str | None = None

    def __str__(self) -> str:
        return f"{self.stream}/{self._name}"

    @property
    def tokens(self) -> str:
        """The part ``<stream>.<consumer>`` of the consumer's subjects."""
        return f"{self.stream}.{self._name}"

    @property
    def next_subject(self) -> str:
        """The subject of pull requests."""
        return self._connection.next_subject(self.stream, self._name)

    @property
    def ack_waits(self) -> tuple[float, float]:
        """The shortest and the longest ack_wait in seconds outside a takeover."""
        return ack_waits(self._original)

    @property
    def max_ack_pending(self) -> int | None:
        """The server's limit of unacknowledged messages; None = no limit."""
        bound = int(self.config.get("max_ack_pending", -1))
        return bound if bound > 0 else None

    @property
    def modifiable(self) -> bool:
        """Whether a takeover may change the timers.

        True for ``takeover="modify"``, and for ``takeover="auto"`` if ``lanes`` created the consumer.
        """
        return self._modify or (MANAGED in self._metadata and not self._hold_back)

    def delivers(self, stream: str, subject: str) -> bool:
        """Return whether this consumer delivers the messages of a published subject of a stream.

        The result is also False for a filtered consumer of a stream that transforms subjects.
        """
        if not self.stream_state.intake.stores(stream, subject):
            return False
        if self.stream_state.intake.transforms:
            return not filtered(self.config)
        return any(matches(each, subject) for each in _filters(self.config))

    @property
    def drops_acknowledged(self) -> bool:
        """Whether the stream is a work queue, so that the server cannot redeliver acknowledged messages."""
        return self.stream_state.retention == "workqueue"

    @property
    def loses_last_acks(self) -> bool:
        """Whether a killed server can lose the last acknowledgements, because the server has the only copy."""
        return self.stream_state.loses_last_acks or int(self.config.get("num_replicas", 0)) == 1

    @property
    def _metadata(self) -> dict[str, str]:
        return self.config.get("metadata") or {}

    @property
    def _original(self) -> dict[str, Any]:
        """The configuration outside a takeover."""
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
                f"consumer {self}: its metadata {ORIGINAL_ACK_WAIT!r} or {ORIGINAL_BACKOFF!r} is unreadable; set "
                "ack_wait and backoff to the values that you want, and remove both entries"
            ) from None
        return original

    async def ensure(self, key: KeyFunction | None = None) -> None:
        """Find or create the consumer, and check it. Raises ``ConfigError`` with each fault and its remedy.

        The call creates no consumer if ``key`` does not fit its subjects.
        """
        self.stream_state = await read_stream(self._connection, self.stream)
        self._check(self.stream_state)
        try:
            await self.refresh()
        except ApiError as error:
            if error.err_code != codes.CONSUMER_NOT_FOUND:
                raise self._connection.failed(f"consumer {self}", error) from None
            await self._check_filter()
            self._check_key(key, self._wanted)
            await self._create()
        else:
            if self._wanted["deliver_policy"] != "all":
                log.info("%s: the consumer exists and continues; start=… applies to a new consumer only", self)
        wrong = self.misfits(self._original)
        if wrong:
            raise ConfigError(f"consumer {self} does not fit: {wrong}")
        self._check_key(key, self.config)

    def _check_key(self, key: KeyFunction | None, config: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if all subjects of a consumer, or all subjects of one partition, have the same key."""
        intake, filters = self.stream_state.intake, _filters(config)
        made = intake.made(filters)
        check_no_partition_number(key, made, self.stream)
        check_varies(key, intake.within(filters), f"consumer {self}", made)

    def misfits(self, config: Mapping[str, Any]) -> str:
        """Describe the faults of a configuration with their remedies; "" = no fault."""
        wrong: list[str] = []
        if config.get("deliver_subject"):
            wrong.append("it is a push consumer; use a pull consumer, on another durable")
        if config.get("ack_policy") != "explicit":
            # The server refuses an update of the policy (error 10012).
            wrong.append(
                f"ack_policy is {config.get('ack_policy')!r}, which the server cannot change; use another durable, or "
                "delete this durable, so that lanes creates it with 'explicit'. A new durable begins at start=…, by "
                "default with the first message of the stream"
            )
        if config.get("max_deliver", -1) != -1:
            wrong.append(
                f"max_deliver is {config['max_deliver']}, so the server would stop redelivering a message, and "
                "later messages of its key would overtake it; "
                "set it to -1, because lanes bounds the attempts itself"
            )
        if config.get("backoff") and not self._modify:
            wrong.append(
                'backoff is set, although lanes retries inside the lane; remove it, or pass takeover="modify", which '
                "removes it for a moment at each takeover"
            )
        if config.get("priority_groups"):
            wrong.append(
                "priority_groups are set, which share one consumer among processes; use a durable without them"
            )
        shortest, _ = ack_waits(config)
        # Without acknowledgements the server sets no ack_wait.
        if shortest < LEAST_ACK_WAIT and config.get("ack_policy") != "none":
            what = "backoff begins with" if config.get("backoff") else "ack_wait is"
            wrong.append(f"{what} {shortest:g} s; set it to {LEAST_ACK_WAIT:g} s or more, for example 30 s")
        if self._filter_subject not in (None, config.get("filter_subject")):
            found = config.get("filter_subject") or config.get("filter_subjects") or "everything"
            wrong.append(f"it filters {found!r}, not {self._filter_subject!r}; use another durable")
        if self._filter_subjects:
            found = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
            if self._filter_subjects != frozenset(found):
                wrong.append(
                    f"it filters {sorted(found)!r}, not {sorted(self._filter_subjects)!r} of its partition of the "
                    "queue; use another durable"
                )
        return "; ".join(wrong)

    async def refresh(self) -> ConsumerState:
        """Read the configuration and the state again.

        Raises ``ApiError`` for a refused request, and ``SourceError`` if another program has recreated the consumer.
        """
        self.config, state = await self._info()
        return state

    async def inspect(self, highest: int) -> ConsumerSnapshot:
        """Check the stream and read the consumer. Unlike ``refresh``, the call changes no attribute."""
        # Read the stream before the consumer. If the stream has lost a message, and the consumer has not delivered this
        # message later, then the message was never delivered.
        stream = await self.check_stream(highest)
        config, state = await self._info()
        return ConsumerSnapshot(stream, config, state)

    async def check_stream(self, highest: int) -> StreamState:
        """Read the stream. Raises ``SourceError`` if the stream was deleted or replaced, or ends below ``highest``.

        In such a stream, new messages would reuse sequences, and the source would treat these messages as settled.
        """
        try:
            state = await read_stream(self._connection, self.stream)
        except ConfigError:
            raise SourceError(self._stream_gone) from None
        if state.incarnation != self.stream_state.incarnation:
            raise SourceError(
                f"stream {self.stream!r} was deleted and created again, so its sequences mean other messages; start "
                "again if this was intended"
            )
        if state.last < highest:
            raise SourceError(
                f"stream {self.stream!r} ends at sequence {state.last} but was read up to {highest}, so the server "
                "lost messages and reuses their sequences. Check which messages are missing, then start again"
            )
        return state

    @property
    def _stream_gone(self) -> str:
        return f"stream {self.stream!r} was deleted during the run; create it again, then start again"

    @property
    def second_puller(self) -> str:
        """The error text if another client, of this or another process, pulls the consumer."""
        return (
            f"consumer {self} is pulled by another client, so no key's order can be kept; stop one of them, or let "
            "them share the stream: pass cohort=… in place of durable=… in each. (With a durable of its own, each "
            "client would handle every message)"
        )

    def failure_text(self, error: ApiError) -> str:
        """Return the error text for an API error about the consumer or its stream."""
        if error.err_code == codes.STREAM_NOT_FOUND:
            return self._stream_gone
        if error.err_code == codes.CONSUMER_NOT_FOUND:
            return (
                f"consumer {self} was deleted; prevent the deletion, or start again with a new consumer, which begins "
                "at start=…"
            )
        return f"consumer {self}: {error}"

    async def restore(self) -> None:
        """Restore the shrunk timers of a consumer, even if another process shrank them. Idempotent."""
        if ORIGINAL_ACK_WAIT in self._metadata:
            await self._update(self._original)

    async def requeue_pending(self) -> None:
        """Make the server queue all unacknowledged messages for redelivery, before any new message.

        The call briefly shrinks ack_wait, and removes a BackOff, which would replace ack_wait. The same update stores
        the original values in the metadata. If this process dies, the next start restores the consumer from these
        values. A cancelled call still restores the original values.
        """
        original = self._original
        metadata = {**(original.get("metadata") or {}), ORIGINAL_ACK_WAIT: str(original["ack_wait"])}
        if original.get("backoff"):
            metadata[ORIGINAL_BACKOFF] = json.dumps(original["backoff"])
        shrunk = {**original, "ack_wait": SHRUNK_ACK_WAIT_NS, "metadata": metadata}
        shrunk.pop("backoff", None)
        try:
            # Shield the update, because after a cancelled update the state of ack_wait would be unknown.
            with anyio.CancelScope(shield=True):
                await self._update(shrunk)
            await asyncio.sleep(SHRINK_SECONDS)
        finally:
            # Shield the restoration, because a cancelled takeover must not leave ack_wait shrunk. The API timeout
            # bounds the wait.
            with anyio.CancelScope(shield=True):
                await self.restore()

    async def reset(self) -> None:
        """Make the server redeliver all messages above the consumer's acknowledgement floor, in stream order.

        The server also redelivers acknowledged messages above the floor. Raises ``ApiError`` if the server cannot reset
        the consumer.
        """
        await self._connection.api(f"CONSUMER.RESET.{self.stream}.{self._name}", {})

    async def _info(self) -> tuple[dict[str, Any], ConsumerState]:
        info = await self._connection.api(f"CONSUMER.INFO.{self.stream}.{self._name}")
        self._created = self._created or str(info["created"])
        if self._created != str(info["created"]) and self._connection.server_version >= KEEPS_CREATED:
            raise SourceError(
                f"consumer {self} was deleted and created again during the run, so it has lost its acknowledgements; "
                "start again if this was intended"
            )
        delivered, floor = info.get("delivered") or {}, info.get("ack_floor") or {}
        count, deliveries = int(info.get("num_ack_pending", 0)), int(delivered.get("consumer_seq", 0))
        return dict(info["config"]), ConsumerState(
            unacknowledged=count,
            waiting_pulls=int(info.get("num_waiting", 0)),
            highest=int(delivered.get("stream_seq", 0)),
            deliveries=deliveries,
            # The server counts one delivery above the floor for each unacknowledged message. Other deliveries were
            # acknowledged or repeated.
            settled_above_floor=deliveries - int(floor.get("consumer_seq", 0)) > count,
            undelivered=int(info.get("num_pending", 0)),
            paused=bool(info.get("paused", False)),
        )

    async def _update(self, config: Mapping[str, Any]) -> None:
        """Change ack_wait, BackOff and metadata together, and wait until the server shows the change."""
        await self._connection.api(
            f"CONSUMER.CREATE.{self.stream}.{self._name}",
            {"stream_name": self.stream, "config": config, "action": "update"},
        )
        # Do not trust the answer, because a server that has just restarted returns the configuration before the update.
        deadline = monotonic() + API_TIMEOUT
        while True:
            await self.refresh()
            if all((self.config.get(name) or None) == (config.get(name) or None) for name in ("ack_wait", "backoff")):
                return
            if monotonic() > deadline:
                raise NoAnswer(f"consumer {self}: the server accepted a new ack_wait, but does not show it; retrying")
            await asyncio.sleep(_POLL_INTERVAL)

    async def _check_filter(self) -> None:
        """Raise ``ConfigError`` if the filter of a new consumer matches no subject of the stream, and no message."""
        wanted, intake = self._filter_subject, self.stream_state.intake
        if wanted is None or intake.may_store(wanted):
            return
        # The stream may contain messages of subjects that it no longer captures.
        info = await self._connection.api(f"STREAM.INFO.{self.stream}", {"subjects_filter": wanted})
        if info["state"].get("subjects"):
            return
        found = [*intake.subjects[:_NAMED_SUBJECTS], *(["…"] if len(intake.subjects) > _NAMED_SUBJECTS else [])]
        raise ConfigError(
            f"filter_subject={wanted!r}: matches no subject of stream {self.stream!r} ({', '.join(found) or 'none'}), "
            "so no message would arrive; correct filter_subject=…"
        )

    async def _create(self) -> None:
        request = {"stream_name": self.stream, "config": self._wanted, "action": "create"}
        try:
            answer = await self._connection.api(f"CONSUMER.CREATE.{self.stream}.{self._name}", request)
        except ApiError as error:
            if error.temporary:
                raise self._connection.failed(f"consumer {self}", error) from None
            remedy = "correct the setting, or create the consumer yourself"
            if error.err_code in codes.CONSUMER_NOT_UNIQUE:
                remedy = (
                    "a work queue allows one consumer for each subject, so use its existing consumer, or pass a "
                    "filter_subject=… that no other consumer has"
                )
            raise ConfigError(f"consumer {self} cannot be created: {error}; {remedy}") from None
        self.config = dict(answer["config"])
        log.info("%s: created a durable pull consumer", self)
