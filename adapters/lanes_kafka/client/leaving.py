"""The last calls of a client before it is closed."""

from __future__ import annotations

from typing import Final

from confluent_kafka import Consumer, KafkaException

from lanes.clock import Clock
from lanes_kafka.client.group import Group

__all__ = ["be_called_back"]

_WITHIN: Final = 2.0
"""Seconds that the callbacks may take; what comes after is for ``close`` to serve."""

_QUIET_FOR: Final = 0.01
"""Seconds without a callback after which none is to come."""


def be_called_back(client: Consumer, group: Group, clock: Clock, *, static: bool) -> None:
    """Have a client call back whatever it has to, so that ``close`` finds nothing to call; ``group`` is closing.

    While it closes, librdkafka may end the group before it has served a rebalance that it has queued. What the callback
    then asks of the group, an assignment by default, is answered by nobody: the call waits for ever, and the binding
    holds the interpreter's lock meanwhile (librdkafka's issue 4884). A ``static`` member keeps what it has: to give it
    back would be to leave the group, which ``close`` does not do for it. Blocks for 2 s at most; whatever goes wrong
    here ``close`` meets again.
    """
    until = clock() + _WITHIN
    try:
        if not static:
            client.unsubscribe()
        quiet = False
        while clock() < until and not quiet:
            if static:
                # A callback lies behind the messages that are there, and there would be more of them for ever.
                client.pause(client.assignment())
            rounds = group.rounds
            # What comes is nobody's any more.
            raws = client.consume(1, _QUIET_FOR)
            quiet = not raws and group.rounds == rounds and (static or not client.assignment())
    except KafkaException:
        # Of a client that has failed for good: nothing is asked of it in a callback any more.
        return
