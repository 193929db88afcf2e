"""The commands of an operator, which the event loop of the consumer performs."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Final

from lanes.consumer import Consumer
from lanes.errors import LanesError
from lanes.history.writer import key_hash

log = logging.getLogger("lanes.web")

COMMANDS: Final = ("pause", "resume", "unblock", "dead-letter")
"""The commands. The last two are about one key."""

_DONE_WITHIN: Final = 5.0
"""Seconds after which a command without an answer of the event loop counts as unanswered."""


class Refused(Exception):
    """Error for a command that the consumer cannot perform. The text is the reason."""


class Commands:
    """The commands for one consumer.

    Args:
        consumer: The consumer.
        token: Secret of the operator.
    """

    def __init__(self, consumer: Consumer, token: str) -> None:
        self._consumer = consumer
        self._token = token

    def permits(self, authorization: str) -> bool:
        """Return whether a header ``Authorization`` contains the token."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    async def perform(self, command: str, key: str | None) -> str:
        """Perform a command on the event loop of the consumer, and return a text about its effect.

        Args:
            command: One of ``COMMANDS``.
            key: Hash of the key, for a command about a key.

        Returns:
            A line for the operator.

        Raises:
            Refused: The consumer does not run, has no such stopped key, or has not answered.
        """
        enter = self._consumer._life.enter
        if enter is None:
            raise Refused("the consumer does not run")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str | Refused] = loop.create_future()

        def answered(answer: str | Refused) -> None:
            if not done.done():
                done.set_result(answer)

        def perform() -> None:
            try:
                answer: str | Refused = self._perform(command, key)
            except Refused as refused:
                answer = refused
            except LanesError as error:
                answer = Refused(str(error))
            except Exception as error:
                # An error here would end the event loop of the consumer.
                log.exception("%s: the command %s of an operator failed", self._consumer._life.name, command)
                answer = Refused(f"{type(error).__name__}; read the log")
            loop.call_soon_threadsafe(answered, answer)

        try:
            enter(perform)
            async with asyncio.timeout(_DONE_WITHIN):
                answer = await done
        except (RuntimeError, TimeoutError):
            raise Refused(
                "the event loop of the consumer has not answered; the command may still be performed"
            ) from None
        if isinstance(answer, Refused):
            raise answer
        log.warning("%s: an operator sent %s: %s", self._consumer._life.name, command, answer)
        return answer

    def _perform(self, command: str, key: str | None) -> str:
        consumer = self._consumer
        if command == "pause":
            consumer.pause()
            return "paused"
        if command == "resume":
            consumer.resume()
            return "resumed"
        act: Callable[[bytes | None], int] = consumer.unblock if command == "unblock" else consumer.park
        run = consumer._life.open_run(command, f"{command} a key")
        keys = {lane.head.key for lane in run.engine.stopped_lanes() if key_hash(lane.head.key) == key}
        if not keys:
            raise Refused("no stopped lane has this key now")
        count = sum(act(each) for each in keys)
        return f"{count} lane(s) continue" if command == "unblock" else f"{count} message(s) become dead letters"
