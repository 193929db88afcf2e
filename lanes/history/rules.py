"""The rules of a run: settings and traits in the ``begin`` row of its history, for the checkers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from dataclasses import fields as fields_of

from lanes.config import Settings
from lanes.source import SourceTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Effective settings and traits; None = the history does not contain the value.

    The fields have the names and units of ``Settings``, ``Retry`` and ``SourceTraits``. In ``lanes``, ``batch``,
    ``timeout``, ``extend_interval`` and the bounds per partition, 0 stands for None. A history without the bounds per
    partition is from an earlier version of ``lanes``. ``queues_share_bounds`` is True if all partitions of a physical
    queue share the bounds per partition. This is true in every version that writes the field.
    """

    order: str | None = None
    keyless: str | None = None
    lanes: int | None = None
    batch: int | None = None
    timeout: float | None = None
    poison: str | None = None
    attempts: int | None = None
    backoff: float | None = None
    max_backoff: float | None = None
    max_ahead: int | None = None
    commit_interval: float | None = None
    drain_timeout: float | None = None
    grace: float | None = None
    settles: str | None = None
    hands_over: bool | None = None
    extend_interval: float | None = None
    exclusive: bool | None = None
    attempts_kept: bool | None = None
    concurrency_per_partition: int | None = None
    max_in_flight_per_partition: int | None = None
    queues_share_bounds: bool | None = None

    @classmethod
    def of(cls, settings: Settings, traits: SourceTraits, poison: str, *, attempts_kept: bool = False) -> Rules:
        """Make the rules of a consumer; ``attempts_kept`` = the consumer has a store of attempts."""
        return cls(
            order=settings.order,
            keyless=settings.keyless,
            lanes=settings.lanes or 0,
            batch=settings.batch or 0,
            timeout=settings.timeout or 0,
            poison=poison,
            attempts=settings.retry.attempts,
            backoff=settings.retry.backoff,
            max_backoff=settings.retry.max_backoff,
            max_ahead=settings.max_ahead,
            commit_interval=settings.commit_interval,
            drain_timeout=settings.drain_timeout,
            grace=settings.grace,
            settles=traits.settles,
            hands_over=traits.hands_over,
            extend_interval=traits.extend_interval or 0,
            exclusive=traits.exclusive,
            attempts_kept=attempts_kept,
            concurrency_per_partition=settings.concurrency_per_partition or 0,
            max_in_flight_per_partition=settings.max_in_flight_per_partition or 0,
            queues_share_bounds=True,
        )

    def fields(self) -> str:
        """Return the fields of a JSON object, each after a comma. Omit fields that are None."""
        values = ((field.name, getattr(self, field.name)) for field in fields_of(self))
        return "".join(f',"{name}":{json.dumps(value)}' for name, value in values if value is not None)
