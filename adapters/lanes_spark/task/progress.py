"""Sends reports of a running task to the driver, in one datagram about once a second."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from lanes.history.writer import key_hash
from lanes.observe.status import Status

EVERY: Final = 1.0
"""Seconds between two reports."""

Address = tuple[str, int, str]
"""Host, port, and the secret that a report must contain."""

Tell = Callable[[Mapping[str, object]], None]
"""Function that receives a report of a task. The function must not block."""


@contextmanager
def sender(address: Address | None, batch: int, task: int, attempt: int) -> Iterator[Tell | None]:
    """Yield a function that sends reports of an attempt; None = the driver receives no reports or is unreachable.

    A failure drops the report.
    """
    if address is None:
        yield None
        return
    host, port, secret = address
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError:
        # This machine cannot resolve the driver's name.
        yield None
        return
    with socket.socket(family, kind) as found:
        found.setblocking(False)

        def send(said: Mapping[str, object]) -> None:
            text = json.dumps({**said, "secret": secret, "batch": batch, "task": task, "attempt": attempt})
            try:
                found.sendto(text.encode(), where)
            except OSError:
                # Drop a failed report, because the next report may arrive.
                return

        yield send


@contextmanager
def telling(
    tell: Tell | None, delivered: Callable[[], int], finished: Callable[[], int], status: Callable[[], Status]
) -> Iterator[None]:
    """Send a report about once a second during the block, and a last report unless the block raises an error."""
    if tell is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def say(ended: bool) -> None:
        now = status()
        oldest = None if ended or now.oldest is None else asdict(now.oldest)
        if oldest is not None and oldest["key"] is not None:
            oldest["key"] = key_hash(oldest["key"])
        counts = {"delivered": delivered(), "finished": finished(), "dead_lettered": now.dead_lettered}
        tell({**counts, "oldest": oldest, "ended": ended})

    def again() -> None:
        nonlocal timer
        say(False)
        timer = loop.call_later(EVERY, again)

    timer = loop.call_later(EVERY, again)
    try:
        yield
        say(True)
    finally:
        timer.cancel()
