"""Judges the reports of sources about missing deliveries and deleted messages, by the data of the simulated server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from lanes_jetstream.wire.pull_requests import PullRequests
from tests.simulated.jetstream.server.stream import MessageStream

_GAP: Final = re.compile(r"delivery (\d+) missing")

OnGap = Callable[[PullRequests, str], None]
"""Receives the pull requests that a gap interrupts, and the text of the interruption."""

_interrupt: Final[Callable[..., None]] = PullRequests.interrupt


@contextmanager
def reported(on_gap: OnGap) -> Iterator[None]:
    """Call ``on_gap`` for each missing delivery that a source reports."""

    def interrupt(pulls: PullRequests, kind: Any, text: str) -> None:
        if kind == "gap":
            on_gap(pulls, text)
        _interrupt(pulls, kind, text)

    with patch.object(PullRequests, "interrupt", interrupt):
        yield


def unreal_gap(pulls: PullRequests, text: str, stream: MessageStream) -> str:
    """Describe a false report of a missing delivery.

    Args:
        pulls: The pull requests.
        text: Text of the interruption.
        stream: The stream of the consumer.

    Returns:
        The description; empty = the delivery is missing, or the connection may have lost it.
    """
    found, client = _GAP.match(text), pulls._client
    consumer = stream.consumers.get(pulls._next_subject.rpartition(".")[2])
    if found is None or consumer is None:
        return ""
    if not client.is_connected or client.stats["reconnects"] != pulls.reconnects:
        return ""
    number = int(found[1])
    if number > consumer.data.deliveries:
        return f"reports {text}, and the server has made {consumer.data.deliveries} deliveries"
    ours = f"{pulls.inbox}."
    if consumer.sent.get(number, "").startswith(ours):
        return f"reports {text}, which the server has sent to {pulls.inbox}"
    first = min((each for each, reply in consumer.sent.items() if reply.startswith(ours)), default=number)
    if number < first and number in consumer.sent:
        return f"reports {text}, which the server has sent before its first delivery {first} to {pulls.inbox}"
    return ""
