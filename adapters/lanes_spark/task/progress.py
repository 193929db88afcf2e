"""What a task tells of itself while it runs: a datagram about once a second, nothing for a message."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from lanes.history.writer import key_hash
from lanes.observe.status import Status

__all__ = ["Address", "Tell", "sender", "telling"]

EVERY: Final = 1.0
"""Seconds."""

Address = tuple[str, int, str]
"""Host, port, and what a report must say to be heard."""

Tell = Callable[[Mapping[str, object]], None]
"""Takes what a task says; it must not block."""


@contextmanager
def sender(address: Address | None, batch: int, task: int, attempt: int) -> Iterator[Tell | None]:
    """Sends what an attempt of a task of that batch says; None where nobody hears it. Whatever fails, fails unheard."""
    if address is None:
        yield None
        return
    host, port, secret = address
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError:
        # The driver's name means nothing here.
        yield None
        return
    with socket.socket(family, kind) as found:
        found.setblocking(False)

        def send(said: Mapping[str, object]) -> None:
            text = json.dumps({**said, "secret": secret, "batch": batch, "task": task, "attempt": attempt})
            try:
                found.sendto(text.encode(), where)
            except OSError:
                # Full, refused, no way there: the next one may come through.
                return

        yield send


@contextmanager
def telling(
    tell: Tell | None, delivered: Callable[[], int], finished: Callable[[], int], status: Callable[[], Status]
) -> Iterator[None]:
    """Tell about once a second, on the event loop that runs, and once at the end."""
    if tell is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def say(ended: bool) -> None:
        now = status()
        oldest = now.oldest
        told = None
        if oldest is not None:
            told = {
                "partition": oldest.partition,
                "position": oldest.position,
                "attempt": oldest.attempt,
                "age": oldest.age,
                "key": None if oldest.key is None else key_hash(oldest.key),
            }
        counts = {"delivered": delivered(), "finished": finished(), "dead_lettered": now.dead_lettered}
        tell({**counts, "oldest": None if ended else told, "ended": ended})

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
