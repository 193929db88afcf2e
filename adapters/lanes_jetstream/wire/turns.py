"""Divides the room of a source among the pull requests of several consumers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

from lanes.core.types import Room
from lanes_jetstream.wire.pull_requests import PullRequests

log = logging.getLogger("lanes.jetstream")

EXPIRES: Final = 5.0
"""Seconds until an unfilled request ends. A busy partition can then use the room."""

BRIEF: Final = 0.02
"""Seconds until an unfilled request ends if the room has fewer messages than the member has partitions."""

AGAIN: Final = 1.0
"""Seconds between two requests of an idle partition if the room has fewer messages than the member has partitions."""

_IDLE_SHARE: Final = 4
"""An idle partition requests a quarter of an even share, so that busy partitions have room."""


class Turns:
    """Distributes the room among the consumers of a member.

    Args:
        name: Name of the source, for the log.
        partitions: Number of partitions of the whole cohort.
    """

    def __init__(self, name: str, partitions: int) -> None:
        self._name = name
        self._partitions = partitions
        self._most = 0
        self._warned = False

    async def pull(self, pulls: Sequence[PullRequests], busy: Collection[PullRequests], room: Room, now: float) -> None:
        """Request messages, so that all open requests together stay within ``room``.

        In a cohort of several partitions, the call reserves about a quarter of the room, and gives each partition an
        equal share of at least one message. Partitions of other members also have a share, because these partitions may
        move to this member. The ``busy`` partitions share the remaining room evenly.

        If the room is too small for all partitions, a request expires after ``BRIEF`` seconds. The partitions then take
        turns, with a request for an idle partition every ``AGAIN`` seconds. A message of an idle partition may
        therefore wait for ``AGAIN`` seconds, plus ``BRIEF`` seconds each time that idle partitions fill the room.

        The call warns once if each ``room`` since the start was too small for one message of each consumer.

        Args:
            pulls: Pull requests of the consumers that may deliver now.
            busy: The pull requests of ``pulls`` whose consumers have delivered a message within the last second.
            room: Maximum number and bytes of the requested messages.
            now: Time in seconds of the monotonic clock.
        """
        self._most = max(self._most, room.messages)
        if self._most < len(pulls) and not self._warned:
            self._warned = True
            log.warning(
                "%s: one delivery brings at most %d messages, fewer than the %d partitions of this member, so "
                "messages of an idle partition wait for a second or more. Raise max_in_flight, and "
                "max_in_flight_per_partition if it is set",
                self._name,
                self._most,
                len(pulls),
            )
        left = room.messages - sum(each.reserved for each in pulls)
        without = sum(not each.reserved for each in pulls)
        size = max(1, room.bytes // max(1, len(pulls)))
        turns = sorted(pulls, key=lambda each: (each.reserved > 0, each.asked_at))
        if left < without:
            share = max(1, left // (2 * max(1, len(busy))))
            for each in turns:
                if left > 0 and (each in busy or (not each.reserved and now - each.asked_at >= AGAIN)):
                    part = min(share, each.reserved + left) if each in busy else 1
                    left -= await _pull(each, room._replace(messages=part, bytes=size), BRIEF, now)
            return
        small = room.messages
        if self._partitions > 1:
            small = max(1, min(room.messages // (_IDLE_SHARE * self._partitions), left // max(1, without)))
        elsewhere = min(small * (self._partitions - len(pulls)), room.messages // 4)
        large = max(small, (room.messages - elsewhere - small * (len(pulls) - len(busy))) // max(1, len(busy)))
        aside = elsewhere + sum(max(0, small - each.reserved) for each in pulls)
        for each in turns:
            taken = each.reserved
            own = max(0, small - taken)
            share = (
                min(large, taken + max(min(own, left), left - aside + own))
                if each in busy
                else min(small, taken + left)
            )
            if share > 0:
                asked = await _pull(each, room._replace(messages=share, bytes=size), EXPIRES, now)
                left -= asked
                aside -= min(own, asked)


async def _pull(pulls: PullRequests, room: Room, expires: float, now: float) -> int:
    """Request the free part of the room. Returns the number of requested messages."""
    taken = pulls.reserved
    pulls.expires = expires
    await pulls.pull(room)
    asked = pulls.reserved - taken
    if asked:
        pulls.asked_at = now
    return asked
