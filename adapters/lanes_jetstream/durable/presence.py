"""Detects a second process on a durable before the second process receives a message.

The server does not record an owner of a consumer. A process without room has no open pull request, so the server shows
no sign of the process. Each process therefore answers requests on a subject of its durable:

- A process that starts calls ``ask``. An answer means that another process consumes the durable.
- If no process answers, the process announces itself. If two processes announce themselves, the process whose
  announcement reached the server first refuses the other process.

A process does not answer while its event loop is blocked, or after the loss of its machine. Without the permission to
publish on the subject, ``ask`` finds no process, and ``DurableWatch`` and ``Takeover`` detect the second process later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import nats.errors
from nats.aio.msg import Msg

from lanes_jetstream.wire.connection import Connection, NotPermitted
from lanes_jetstream.wire.subscription import UnboundedSubscription

log = logging.getLogger("lanes.jetstream")

_ASK_TIMEOUT: Final = 1.0
"""Seconds to wait for an answer. A process whose event loop is not blocked answers within a round trip."""


class Presence:
    """The presence of this process on one durable. Needs asyncio.

    Args:
        connection: The open connection.
        tokens: The part ``<stream>.<consumer>`` of the consumer's subjects.
        refuse: Function that the object calls when another process has announced itself earlier.
    """

    def __init__(self, connection: Connection, tokens: str, refuse: Callable[[], None]) -> None:
        self._connection = connection
        self._refuse = refuse
        self._subscription = UnboundedSubscription(connection.client)
        # Subscribing to an inbox needs no further permission. All processes of one application have the same inbox
        # prefix.
        self._subject = f"{connection.client.new_inbox().rpartition('.')[0]}.lanes.{tokens}"
        self._name = uuid4().hex
        self._permitted = True
        self._first = False
        self._refused: set[str] = set()

    async def ask(self) -> bool | None:
        """Return whether another process of ``lanes`` consumes the durable; None = that process does not answer."""
        try:
            answer = await self._connection.request(self._subject, f"ask {self._name}".encode(), _ASK_TIMEOUT)
        except TimeoutError:
            return None
        except NotPermitted:
            self._permitted = False
            return False
        except (nats.errors.Error, OSError):
            # The error is mostly ``NoRespondersError``, because no process subscribes to the subject.
            return False
        # If a stream captures every subject, the stream answers too.
        return bytes(answer.data).startswith(b"here ")

    async def announce(self) -> None:
        """Begin to answer other processes, and detect a process that started at the same time."""
        await self._subscription.open(self._subject, self._receive)
        if self._permitted:
            await self._publish(self._subject, f"start {self._name}")

    async def close(self) -> None:
        """Stop answering. Idempotent."""
        await self._subscription.close()

    async def _receive(self, message: Msg) -> None:
        kind, _, rest = bytes(message.data).decode(errors="replace").partition(" ")
        if kind == "ask" and message.reply:
            await self._publish(message.reply, f"here {self._name}")
        elif kind == "start" and rest == self._name:
            self._first = True
        elif kind == "start" and self._first:
            # The server has processed this process's announcement first. If a process receives another announcement
            # before its own, the process stays silent.
            self._refused.add(rest)
            await self._publish(self._subject, f"refuse {rest} {self._name}")
        elif kind == "refuse":
            whom, _, by = rest.partition(" ")
            # In a cluster two processes may each see their own announcement first.
            if whom == self._name and not (by in self._refused and self._name < by):
                self._refuse()

    async def _publish(self, subject: str, text: str) -> None:
        try:
            await self._connection.client.publish(subject, text.encode())
        except (nats.errors.Error, OSError) as error:
            log.debug("%r: nothing sent (%s)", self, type(error).__name__)
