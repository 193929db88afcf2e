"""Requests to a group's coordinator, sent by a separate process.

The client library aborts its process if the connection to the broker breaks during a request (librdkafka, issue 4605).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from demo.child import killed_with_parent
from demo.errors import NoAnswer
from demo.membership import Member, Snapshot
from demo.supervise import Child
from lanes.clock import monotonic

COMMAND: Final = (sys.executable, "-m", "demo.brokers.coordinator")

_WITHIN: Final = 5.0
"""Most seconds for an answer of the coordinator."""

_MARGIN: Final = 10.0
"""Seconds beyond ``_WITHIN`` after which the asking process counts as stuck. The seconds include the start of the
process.
"""

_SILENT: Final = '{"error": "the asking process has ended, or is stuck"}'

_GROUP: Final = "group"
_DELETE: Final = "delete"


class Coordinator:
    """The coordinator of one group. Runs on asyncio only, and sends one request at a time.

    The next request replaces a process that has ended, did not answer or answered with an error. ``command`` starts the
    process.
    """

    def __init__(self, server: str, group: str, command: Sequence[str] = COMMAND) -> None:
        self._server = server
        self._group = group
        self._command = command
        self._child: Child | None = None
        self._asking = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int:
        """Id of the requesting process; 0 before the first request."""
        return self._child.pid if self._child is not None else 0

    async def group(self) -> Snapshot:
        """Return the group's state at the coordinator. Raises ``NoAnswer``."""
        said = await self._ask(_GROUP)
        members = {
            name: Member(number, frozenset((topic, partition) for topic, partition in places))
            for name, (number, places) in said["members"].items()
        }
        return Snapshot(said["asked"], said["answered"], said["state"], members)

    async def delete(self) -> None:
        """Ask the coordinator to delete the group, and ignore a refusal. Raises ``NoAnswer`` if the request fails."""
        await self._ask(_DELETE)

    async def close(self) -> None:
        """End the process after its current request. Idempotent."""
        async with self._asking:
            self._closed = True
            if self._child is not None:
                await self._child.end()

    async def _ask(self, question: str) -> dict[str, Any]:
        async with self._asking:
            child = await self._started()
            try:
                line = await child.exchange(question, _WITHIN + _MARGIN)
            except BaseException:
                # A late answer would be taken for the answer of the next question.
                child.kill()
                raise
            answer: dict[str, Any] = json.loads(line or _SILENT)
            if "error" in answer:
                # A client that has lost its coordinator may never find the coordinator again.
                child.kill()
                raise NoAnswer(
                    f"{self._server} does not report the state of the group ({answer['error']}): check the broker"
                )
        return answer

    async def _started(self) -> Child:
        if self._closed:
            raise NoAnswer(f"group {self._group!r}: not asked for its state, because the run has ended")
        child = self._child
        if child is None or child.killed or child.status is not None:
            if child is not None:
                await child.end()
            child = self._child = Child(self._command, Path(os.devnull))
            await child.start()
            # Every user can read the arguments of a process, so the settings go to its stdin.
            child.say(json.dumps([self._server, self._group]))
        return child


def main() -> int:
    """Answer each request on stdin by one line of JSON on stdout. Return 0 at the end of stdin."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    killed_with_parent()
    server, group = json.loads(sys.stdin.readline())
    admin = AdminClient({"bootstrap.servers": server, "log_level": 0, "reconnect.backoff.max.ms": 500})
    for line in sys.stdin:
        try:
            answer = _describe(admin, group) if line.strip() == _GROUP else _delete(admin, group)
        except KafkaException as failure:
            error = failure.args[0]
            answer = {"error": f"{error.name()}: {error.str()}"}
        print(json.dumps(answer), flush=True)
    return 0


def _describe(admin: Any, group: str) -> dict[str, Any]:
    asked = monotonic()
    found = admin.describe_consumer_groups([group], request_timeout=_WITHIN)[group].result()
    members = {
        one.client_id: (one.member_id, [(each.topic, each.partition) for each in one.assignment.topic_partitions])
        for one in found.members
    }
    return {"asked": asked, "answered": monotonic(), "state": found.state.name, "members": members}


def _delete(admin: Any, group: str) -> dict[str, Any]:
    # An error is ignored: a group without commits does not exist, and the broker removes an unused group later.
    admin.delete_consumer_groups([group], request_timeout=_WITHIN)[group].exception()
    return {}


if __name__ == "__main__":
    sys.exit(main())
