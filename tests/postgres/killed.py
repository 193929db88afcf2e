"""A handler whose process is killed by -9 at each statement: ``python -m tests.postgres.killed URL SCHEMA KIND``.

KIND is ``one`` (a transaction for each message) or ``batch``. For each wait for the server, one process dies just
before the wait, and another process just after. The next process begins with the first message, as after a crash. Each
point uses its own subscription. Prints one line of JSON: the subscriptions and the number of points.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import psycopg

from lanes_postgres import Positions
from tests.postgres.tables import Effects, message, partition

MESSAGES = 3


class Doomed(psycopg.Connection[Any]):
    """Kills its process before or after its n-th wait for the server."""

    waits = 0
    at: int | None = None
    after = False

    def wait(self, *arguments: Any, **named: Any) -> Any:
        self.waits += 1
        if self.waits == self.at and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = super().wait(*arguments, **named)
        if self.waits == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def handle(url: str, effects: Effects, kind: str, name: str, *, at: int | None, after: bool, epoch: int) -> int:
    """Handle all messages as the owner of this epoch; returns the number of waits for the server."""
    positions = Positions(name, schema=effects.schema)
    owned = partition(epoch=epoch)
    # Messages of one key, with other keys between them.
    messages = [message(number, b"k" if number % 2 else b"%d" % number, owned) for number in range(1, MESSAGES + 1)]
    with Doomed.connect(url) as connection:
        connection.waits, connection.at, connection.after = 0, at, after
        if kind == "batch":
            with positions.once_all(connection, messages) as fresh:
                for each in fresh:
                    effects.add(connection, each.position, name)
        else:
            for each in messages:
                with positions.once(connection, each) as is_fresh:
                    if is_fresh:
                        effects.add(connection, each.position, name)
        return connection.waits


def main(url: str, schema: str, kind: str) -> None:
    effects = Effects(url, schema)
    points = handle(url, effects, kind, f"{kind}-whole", at=None, after=False, epoch=1)
    names = []
    for at in range(1, points + 1):
        for after in (False, True):
            name = f"{kind}-{at}-{'after' if after else 'before'}"
            names.append(name)
            child = os.fork()
            if child == 0:
                handle(url, effects, kind, name, at=at, after=after, epoch=1)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == -signal.SIGKILL, f"{name}: ended with {status}"
            handle(url, effects, kind, name, at=None, after=False, epoch=2)
    print(json.dumps({"names": names, "points": points}))


if __name__ == "__main__":
    main(*sys.argv[1:])
