"""Serves a client's last callbacks before its ``close``."""

from __future__ import annotations

from typing import Final

from confluent_kafka import Consumer, KafkaException

from lanes.clock import Clock
from lanes_kafka.client.group import Group

_LAST_CALLBACKS: Final = 2.0
"""Seconds allowed for the last callbacks. ``close`` serves any later callback."""

_QUIET_FOR: Final = 0.01
"""Seconds without a callback after which the thread expects no further callback."""


def serve_last_callbacks(client: Consumer, group: Group, clock: Clock, *, static: bool) -> None:
    """Serve the pending callbacks of a client before ``close``, which could hang in such a callback.

    While librdkafka closes a client, it may end the group before it has served a queued rebalance. The callback of this
    rebalance sends a request to the group, by default an assignment. The ended group never answers, so the callback
    waits forever with the interpreter's lock (librdkafka's issue 4884).

    The call blocks for about 2 s at most. The call ignores errors, because ``close`` raises the same errors again.

    Args:
        client: The client to close.
        group: Assignments of the client, with ``closing`` set.
        clock: Monotonic clock, in seconds.
        static: Whether the client is a static member. A static member keeps its partitions, because a release would
            leave the group.
    """
    until = clock() + _LAST_CALLBACKS
    try:
        if not static:
            client.unsubscribe()
        quiet = False
        while clock() < until and not quiet:
            if static:
                # A queued callback runs after the queued messages, and without a pause more messages would arrive
                # before it.
                client.pause(client.assignment())
            rebalances = group.rebalances
            # Drop the messages that this call returns, because the source no longer owns a partition.
            raws = client.consume(1, _QUIET_FOR)
            quiet = not raws and group.rebalances == rebalances and (static or not client.assignment())
    except KafkaException:
        # The client has failed permanently, so its callbacks send no request to the group any more.
        return
