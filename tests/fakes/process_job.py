"""A consumer as a process, whose handlers run in processes: ``python -m tests.fakes.process_job CASE FOLDER BACKEND``.

The case ``wait`` has three messages for ``process_handlers.wait``. The case ``forever`` has one message whose handler
never ends, and one finished message. At its end, the process writes the number of unfinished messages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

import lanes
from memsource.memory.source import MemorySource
from tests.fakes.process_handlers import wait
from tests.fakes.processes import broker_of, in_processes


async def main(case: str, folder: Path) -> int:
    """Serve until a signal."""
    keys = ("a", "b", "c") if case == "wait" else ("forever", "free")
    broker = broker_of(folder, *keys)
    consumer = lanes.Consumer(MemorySource(broker), wait, settings=in_processes(2))
    status = await lanes.serve(consumer)
    print(f"unfinished {broker.unfinished}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(anyio.run(main, sys.argv[1], Path(sys.argv[2]), backend=sys.argv[3]))
