"""Settings: frozen, keyword-only, validated when they are made."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, get_args

from lanes.core.policy import Keyless, Order, Poison
from lanes.errors import ConfigError

__all__ = [
    "RELEASE_WITHIN",
    "SETTLE_WITHIN",
    "Keyless",
    "Order",
    "Poison",
    "Retry",
    "Settings",
    "SyncHandlers",
    "check_aware",
    "check_one_of",
    "check_positive",
    "check_seconds",
    "check_whole",
]

DEFAULT_MAX_IN_FLIGHT: Final = 2_000

SyncHandlers = Literal["threads", "inline"]

LANES_LIMIT: Final = 1 << 32
COMMIT_COUNT_LIMIT: Final = 5_000
"""Finished messages of a partition that wait for the next commit at most."""

SETTLE_WITHIN: Final = 5.0
"""Seconds that what has finished gets to be settled when a partition is drained; more where ``drain_timeout`` is not
used up."""

RELEASE_WITHIN: Final = 10.0
"""Seconds that a source gets to hand a drained partition back; more where its lease holds for longer."""


@dataclass(frozen=True, kw_only=True)
class Retry:
    """What happens when a handler raises: exponential backoff with full jitter, then the poison policy.

    ``attempts``: how often a message is handled at most, 1 or more (1 = never retried).
    ``backoff``: seconds before the second attempt at most; it doubles with every attempt. 0 or more.
    ``max_backoff``: seconds a backoff never exceeds, not below ``backoff``.
    """

    attempts: int = 5
    backoff: float = 0.2
    max_backoff: float = 30.0

    def __post_init__(self) -> None:
        check_whole("Retry.attempts", self.attempts, 1)
        check_seconds("Retry.backoff", self.backoff, 0.0)
        check_seconds("Retry.max_backoff", self.max_backoff, 0.0)
        if self.max_backoff < self.backoff:
            raise ConfigError(
                f"Retry.max_backoff={self.max_backoff} is below Retry.backoff={self.backoff}: "
                "raise max_backoff or lower backoff"
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a consumer runs.

    ``concurrency``: handlers running at once, 1 or more.
    ``max_in_flight``: messages delivered and not yet settled, a hard bound, not below ``concurrency``. None =
    2,000, or what the broker's consumer allows where that is less.
    ``max_in_flight_bytes``: their bytes, 1 or more; one received batch may overshoot it.
    ``max_ahead``: messages admitted above the position the broker confirmed, per partition, 1 or more; only where the
    source commits positions. What a crash repeats at most.
    ``order``: ``"key"`` = in order within a key; ``"partition"`` = within a partition, as a plain loop does;
    ``"serial"`` = one message at a time, of one partition; ``"none"`` = no order is claimed.
    ``keyless``: messages without a key are in no order (``"any"``), or all in ``"one_lane"`` of their partition.
    ``lanes``: fold keys onto so many lanes a partition, 1 or more; keys that share one wait for each other. None =
    every key has its own.
    ``batch``: the handler gets a list of up to so many messages, 1 or more; None = it gets one message. ``linger``:
    seconds a batch waits for more at most; 0 or more.
    ``timeout``: seconds a handler may take, more than 0; then it is cancelled and the attempt has failed. One in a
    thread cannot be cancelled: its lane and its thread stay taken, and it is reported. None = no limit.
    ``sync_handlers``: where a plain function runs: in ``"threads"`` of its own, as many as ``concurrency``, or
    ``"inline"`` on the event loop, which then waits for it.
    ``retry``: see ``Retry``.
    ``poison``: what happens to a message whose attempts are used up: ``"skip"`` writes it to the dead letters
    and goes on, ``"block"`` stops its key until ``Consumer.unblock`` or ``park``, ``"block_and_dlq"`` writes it to the
    dead letters and stops its key, ``"exit"`` stops in order with ``HandlerHalted``. None = ``"skip"`` where dead
    letters are configured, else ``"exit"``.
    ``commit_interval``: seconds a finished message waits for its commit at most, 0 or more; fewer when 5,000 wait, or
    a quarter of ``max_ahead``.
    ``unhealthy_after``: seconds after which an unfinished message makes the consumer unhealthy, more than 0.
    ``drain_timeout``: seconds that running handlers get to end when a partition is given up or the consumer
    stops; 0 or more. ``grace``: seconds they get to react to their cancellation after that; 0 or more. What they have
    finished is settled behind that, and the partition handed back: see ``longest_drain``.
    """

    concurrency: int = 100
    max_in_flight: int | None = None
    max_in_flight_bytes: int = 64 * 1024 * 1024
    max_ahead: int = 10_000
    order: Order = "key"
    keyless: Keyless = "any"
    lanes: int | None = None
    batch: int | None = None
    linger: float = 0.0
    timeout: float | None = None
    sync_handlers: SyncHandlers = "threads"
    retry: Retry = field(default_factory=Retry)
    poison: Poison | None = None
    commit_interval: float = 1.0
    unhealthy_after: float = 300.0
    drain_timeout: float = 30.0
    grace: float = 2.0

    def __post_init__(self) -> None:
        check_whole("concurrency", self.concurrency, 1)
        check_whole("max_in_flight_bytes", self.max_in_flight_bytes, 1)
        check_seconds("drain_timeout", self.drain_timeout, 0.0)
        check_seconds("grace", self.grace, 0.0)
        if not isinstance(self.retry, Retry):
            raise ConfigError(f"retry={self.retry!r} is not a lanes.Retry: write retry=lanes.Retry(attempts=…)")
        check_whole("max_ahead", self.max_ahead, 1)
        check_seconds("linger", self.linger, 0.0)
        check_seconds("commit_interval", self.commit_interval, 0.0)
        check_positive("unhealthy_after", self.unhealthy_after)
        check_one_of("order", self.order, get_args(Order))
        check_one_of("keyless", self.keyless, get_args(Keyless))
        check_one_of("sync_handlers", self.sync_handlers, get_args(SyncHandlers))
        check_one_of("poison", self.poison, (*get_args(Poison), None))
        if self.timeout is not None:
            check_positive("timeout", self.timeout)
        if self.max_in_flight is not None:
            self._check_max_in_flight(self.max_in_flight)
        self._check_lanes()
        self._check_batch()
        if self.order == "serial" and self.poison in ("skip", "block_and_dlq"):
            raise ConfigError(
                f'order="serial" with poison="{self.poison}": serial order has no message to skip; use '
                'poison="exit" or "block", or order="partition"'
            )

    def _check_max_in_flight(self, max_in_flight: int) -> None:
        check_whole("max_in_flight", max_in_flight, 1)
        if max_in_flight < self.concurrency:
            raise ConfigError(
                f"max_in_flight={max_in_flight} is below concurrency={self.concurrency}: a handler needs a "
                "message in flight; raise max_in_flight or lower concurrency"
            )

    def _check_lanes(self) -> None:
        if self.lanes is None:
            return
        check_whole("lanes", self.lanes, 1)
        if self.lanes > LANES_LIMIT:
            raise ConfigError(f"lanes={self.lanes}: must be at most {LANES_LIMIT}; leave it out for a lane a key")
        if self.order != "key":
            raise ConfigError(
                f'lanes={self.lanes} with order="{self.order}": only order="key" has lanes by key; leave lanes out, '
                "or the order"
            )

    def _check_batch(self) -> None:
        if self.batch is None:
            if self.linger:
                raise ConfigError(f"linger={self.linger:g} without batch: set batch=…, or leave linger out")
            return
        check_whole("batch", self.batch, 1)
        if self.max_in_flight is not None:
            self._check_batch_against(self.max_in_flight)

    def _check_batch_against(self, max_in_flight: int) -> None:
        if self.batch is not None and self.batch > max_in_flight:
            raise ConfigError(
                f"batch={self.batch} is above max_in_flight={max_in_flight}: it could never be full; raise "
                "max_in_flight or lower batch"
            )

    @property
    def commit_count(self) -> int:
        """Finished messages of a partition after which a commit does not wait for ``commit_interval``."""
        return max(1, min(COMMIT_COUNT_LIMIT, self.max_ahead // 4))

    def poison_policy(self, *, has_dead_letters: bool) -> Poison:
        """The policy in force.

        Raises ``ConfigError`` for ``"skip"`` and ``"block_and_dlq"`` without dead letters: nothing may be lost.
        """
        if self.poison in ("skip", "block_and_dlq") and not has_dead_letters:
            raise ConfigError(
                f'poison="{self.poison}" needs dead letters, or the message is lost: pass dead_letters=… or use '
                'poison="exit"'
            )
        if self.poison is None and self.order == "serial":
            return "exit"
        return self.poison or ("skip" if has_dead_letters else "exit")

    @property
    def longest_drain(self) -> float:
        """Seconds after which a partition that is drained is handed over, at most, where it has no lease.

        Its handlers get ``drain_timeout`` to end, and ``grace`` to react to their cancellation; then what has finished
        gets 5 s to be settled, or what is left of ``drain_timeout``, and the source 10 s to hand it back.
        """
        return self.drain_timeout + self.grace + SETTLE_WITHIN + RELEASE_WITHIN

    def check_drain(self, allowed: float | None) -> None:
        """Raises ``ConfigError`` when a drain may take longer than the ``allowed`` seconds (None = any time)."""
        if allowed is not None and self.longest_drain > allowed:
            raise ConfigError(
                f"drain_timeout={self.drain_timeout:g} and grace={self.grace:g}, with {SETTLE_WITHIN:g} s to settle "
                f"what has finished and {RELEASE_WITHIN:g} s to hand the partition back, are more than the "
                f"{allowed:g} s that the broker gives a drain: lower them, or raise the broker's limit"
            )

    def check_partitions(self, name: str, partitions: int | None) -> None:
        """Raises ``ConfigError`` for ``"serial"`` order of a source that has several (None = any number)."""
        if self.order == "serial" and partitions is not None and partitions > 1:
            raise ConfigError(
                f'{name}: order="serial" handles one partition, and there are {partitions}: use order="partition", or '
                "a topic with one partition"
            )

    def check_order(self, name: str, *, ordered: bool) -> None:
        """Raises ``ConfigError`` for any order but ``"none"`` of a source that several processes take from at once."""
        if not ordered and self.order != "none":
            raise ConfigError(
                f"{name}: order={self.order!r} cannot be kept where several processes take from one consumer: set "
                'order="none", or let one process have it alone (shared=False)'
            )

    def in_flight_bound(self, allowed: int | None) -> int:
        """``max_in_flight`` in force where the broker allows ``allowed`` unsettled messages (None = any number).

        Raises ``ConfigError`` when it was set above that, and for a ``batch`` above the bound.
        """
        if self.max_in_flight is not None:
            if allowed is not None and self.max_in_flight > allowed:
                raise ConfigError(
                    f"max_in_flight={self.max_in_flight} is above what the broker's consumer allows to be "
                    f"unsettled ({allowed}): lower max_in_flight, or raise the consumer's limit (max_ack_pending)"
                )
            return self.max_in_flight
        bound = max(DEFAULT_MAX_IN_FLIGHT, self.concurrency)
        if allowed is not None and allowed < self.concurrency:
            raise ConfigError(
                f"concurrency={self.concurrency} is above what the broker's consumer allows to be unsettled "
                f"({allowed}): lower concurrency, or raise the consumer's limit (max_ack_pending)"
            )
        bound = bound if allowed is None else min(bound, allowed)
        self._check_batch_against(bound)
        return bound


def check_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    """Raises ``ConfigError`` for what is none of the ``known`` values."""
    if value not in known:
        names = [f'"{one}"' if isinstance(one, str) else str(one) for one in known]
        raise ConfigError(f"{name}={value!r} is unknown: use {', '.join(names[:-1])} or {names[-1]}")


def check_positive(name: str, value: object) -> None:
    """Raises ``ConfigError`` for what is no finite number of seconds above 0."""
    check_seconds(name, value, 0.0)
    if not value:
        raise ConfigError(f"{name}={value!r}: must be more than 0 seconds")


def check_whole(name: str, value: object, least: int) -> None:
    """Raises ``ConfigError`` for what is no whole number of ``least`` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more")


def check_aware(name: str, value: datetime) -> None:
    """Raises ``ConfigError`` for a time without a zone, which would be another one on another machine."""
    if value.utcoffset() is None:
        raise ConfigError(f"{name}={value.isoformat()} has no time zone: write datetime(…, tzinfo=UTC)")


def check_seconds(name: str, value: object, least: float) -> None:
    """Raises ``ConfigError`` for what is no finite number of seconds, ``least`` or more."""
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An int may be beyond any float.
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not least <= number < math.inf:
        raise ConfigError(f"{name}={value!r}: must be a finite number of seconds, {least:g} or more")
