"""A process that holds an advisory lock: ``python -m tests.postgres.lock_holder URL NAME LEASE``.

Prints a line ``works T`` every 10 ms while its lock certainly holds, as a handler starts, and ``lost T REASON`` at its
end. T is the time of ``lanes.clock.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import sys

import anyio

from lanes.clock import monotonic
from lanes_postgres import AdvisoryLocks


async def hold(url: str, name: str, lease: float) -> None:
    locks = AdvisoryLocks(url, lease=lease)
    await locks.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(locks.run)
        held = await locks.try_acquire(name, lambda: None)
        assert held is not None
        while not held.lost:
            # The deadline is read after the clock: a freeze between the two makes the time look earlier, never later.
            now = monotonic()
            if now < held.deadline:
                print("works", now, flush=True)
            await anyio.sleep(0.01)
        print("lost", monotonic(), held.lost, flush=True)
        tasks.cancel_scope.cancel()
    await locks.aclose()


if __name__ == "__main__":
    anyio.run(hold, sys.argv[1], sys.argv[2], float(sys.argv[3]))
