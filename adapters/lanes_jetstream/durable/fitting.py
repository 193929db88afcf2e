"""Whether a consumer fits: what of its configuration lanes could not keep an order with, each with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LEAST_ACK_WAIT: Final = 1.0
"""Seconds: with less, keeping messages alive would be most of the traffic."""

_SECOND: Final = 1_000_000_000


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
