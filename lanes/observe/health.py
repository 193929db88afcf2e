"""Whether a consumer gets on with its work, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lanes.core.engine import Engine
from lanes.core.lane import ARCHIVING, BLOCKED, PARKING
from lanes.core.types import Message, Partition
from lanes.history.recorder import key_hash
from lanes.observe.unsettled import Failing

__all__ = ["Health", "examine"]


@dataclass(frozen=True, kw_only=True)
class Health:
    """``ok``, or the ``reasons`` why not, one line each; keys are in them as their hash, payloads not at all."""

    reasons: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether there is nothing to report."""
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok


def examine(
    engine: Engine,
    now: float,
    *,
    unhealthy_after: float,
    stuck: Sequence[Message],
    unknown: Mapping[Partition, float],
    unsettled: Mapping[Partition, Failing],
) -> Health:
    """The health at ``now``. O(in flight).

    ``stuck``: what runs in threads that ignored their timeout. ``unknown``: since when the store of attempts has been
    asked for what it has of a partition, of which nothing starts until it has answered. ``unsettled``: the partitions
    whose settlements fail.
    """
    reasons = []
    oldest = engine.oldest()
    if oldest is not None and now - oldest.received > unhealthy_after:
        reasons.append(f"the oldest unfinished message is too old: {_named(oldest, now)}")
    late = [partition for partition, since in unknown.items() if now - since > unhealthy_after]
    if late:
        first = min(late, key=lambda partition: unknown[partition])
        told = f"{first.id}, for {now - unknown[first]:.1f} s"
        reasons.append(f"{len(late)} partitions wait for the store of their attempts, the first: {told}")
    for partition, failing in unsettled.items():
        if now - failing.since > unhealthy_after or partition in engine.committer.ahead:
            lasts = f"{now - failing.since:.1f} s"
            reasons.append(f"what has finished of {partition.id} is not settled for {lasts}: {failing.error}")
    for state, what in ((BLOCKED, "blocked"), (PARKING, "parking"), (ARCHIVING, "parking")):
        heads = [lane.head for lane in engine.lanes() if lane.head.state == state]
        if heads:
            reasons.append(f"{len(heads)} lanes {what}, the first: {_named(min(heads, key=_received), now)}")
    if stuck and len(stuck) >= engine.concurrency:
        reasons.append(f"all {len(stuck)} threads are stuck, the first: {_named(stuck[0], now)}")
    for partition in engine.committer.ahead:
        held = partition.ledger.oldest()
        at = "" if held is None else f", held by {_named(held, now)}"
        reasons.append(f"{partition.id} has reached max_ahead={engine.policy.max_ahead}{at}")
    return Health(reasons=tuple(reasons))


def _named(message: Message, now: float) -> str:
    return (
        f"{message.partition.id} position {message.position}, key {key_hash(message.key)}, attempt {message.attempt}, "
        f"{now - message.received:.1f} s old"
    )


def _received(message: Message) -> float:
    return message.received
