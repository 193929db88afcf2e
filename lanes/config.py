"""Settings: frozen, keyword-only, validated when they are made."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Final, Literal

from lanes.errors import ConfigError

DEFAULT_MAX_IN_FLIGHT: Final = 2_000

Poison = Literal["skip", "exit"]


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
        _whole("Retry.attempts", self.attempts, 1)
        _seconds("Retry.backoff", self.backoff, 0.0)
        _seconds("Retry.max_backoff", self.max_backoff, 0.0)
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
    ``retry``: see ``Retry``.
    ``poison``: what happens to a message whose attempts are used up: ``"skip"`` writes it to the dead letters
    and goes on, ``"exit"`` stops in order with ``HandlerHalted``. None = ``"skip"`` where dead letters are
    configured, else ``"exit"``.
    ``drain_timeout``: seconds that running handlers get to end when a partition is given up or the consumer
    stops; 0 or more. ``grace``: seconds they get to react to their cancellation after that; 0 or more.
    """

    concurrency: int = 100
    max_in_flight: int | None = None
    max_in_flight_bytes: int = 64 * 1024 * 1024
    retry: Retry = field(default_factory=Retry)
    poison: Poison | None = None
    drain_timeout: float = 30.0
    grace: float = 2.0

    def __post_init__(self) -> None:
        _whole("concurrency", self.concurrency, 1)
        _whole("max_in_flight_bytes", self.max_in_flight_bytes, 1)
        _seconds("drain_timeout", self.drain_timeout, 0.0)
        _seconds("grace", self.grace, 0.0)
        if not isinstance(self.retry, Retry):
            raise ConfigError(f"retry={self.retry!r} is not a lanes.Retry: write retry=lanes.Retry(attempts=…)")
        if self.poison not in (None, "skip", "exit"):
            raise ConfigError(f'poison={self.poison!r} is unknown: use "skip", "exit" or None')
        if self.max_in_flight is None:
            return
        _whole("max_in_flight", self.max_in_flight, 1)
        if self.max_in_flight < self.concurrency:
            raise ConfigError(
                f"max_in_flight={self.max_in_flight} is below concurrency={self.concurrency}: a handler needs a "
                "message in flight; raise max_in_flight or lower concurrency"
            )

    def poison_policy(self, *, has_dead_letters: bool) -> Poison:
        """The policy in force. Raises ``ConfigError`` for ``"skip"`` without dead letters: nothing may be lost."""
        if self.poison == "skip" and not has_dead_letters:
            raise ConfigError(
                'poison="skip" needs dead letters, or the skipped message is lost: pass dead_letters=… or use '
                'poison="exit"'
            )
        return self.poison or ("skip" if has_dead_letters else "exit")

    def in_flight_bound(self, allowed: int | None) -> int:
        """``max_in_flight`` in force where the broker allows ``allowed`` unsettled messages (None = any number).

        Raises ``ConfigError`` when it was set above that.
        """
        if self.max_in_flight is not None:
            if allowed is not None and self.max_in_flight > allowed:
                raise ConfigError(
                    f"max_in_flight={self.max_in_flight} is above what the broker's consumer allows to be "
                    f"unsettled ({allowed}): lower max_in_flight, or raise the consumer's limit (max_ack_pending)"
                )
            return self.max_in_flight
        bound = max(DEFAULT_MAX_IN_FLIGHT, self.concurrency)
        if allowed is None or allowed >= bound:
            return bound
        if allowed < self.concurrency:
            raise ConfigError(
                f"concurrency={self.concurrency} is above what the broker's consumer allows to be unsettled "
                f"({allowed}): lower concurrency, or raise the consumer's limit (max_ack_pending)"
            )
        return allowed


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more")


def _seconds(name: str, value: object, least: float) -> None:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An int may be beyond any float.
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not least <= number < math.inf:
        raise ConfigError(f"{name}={value!r}: must be a finite number of seconds, {least:g} or more")
