"""Handles one message at a time among all processes of a cohort, in the order of the stream. Other processes wait.

Needs a server: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/serial.py
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import nats

import lanes
from lanes_jetstream import Cohort, CohortStream, JetStreamSource

ORIGIN, STREAM, ENTRIES = "EXAMPLE_LEDGER", "EXAMPLE_SERIAL", 300
LEDGER = "ledger.txt"


def member(name: str) -> None:
    """The program of one member. Start two members: if one member dies, the other member continues."""

    def append(message: lanes.Message) -> None:
        time.sleep(0.002)
        # No other handler writes, in this process or in another, because the only partition has one owner.
        with open(LEDGER, "a") as ledger:
            ledger.write(f"{message.value.decode()} {name}\n")

    # Your stream stays as it is: lanes creates a second stream that sources it, as one partition.
    create = CohortStream(subject="ledger.*", tokens=(1,), origin=ORIGIN)
    cohort = Cohort("bookkeeping", member=name, partitions=1, create=create, lease=3)
    source = JetStreamSource(os.environ["NATS_URL"], stream=STREAM, cohort=cohort, key=None)
    # A skipped message would leave a hole in the order, so order="serial" refuses poison="skip".
    lanes.main(source, append, settings=lanes.Settings(order="serial", poison="exit"))


def start(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, name])


def entries() -> list[str]:
    if not os.path.exists(LEDGER):
        return []
    with open(LEDGER) as ledger:
        return ledger.read().splitlines()


def wait_for(count: int) -> None:
    until = time.monotonic() + 30
    while len(entries()) < count:
        assert time.monotonic() < until, "the members do not progress: read their output"
        time.sleep(0.02)


def main() -> None:
    """Start two members and stop the working member in the middle; the other member continues."""
    members = {name: start(name) for name in ("a", "b")}
    try:
        wait_for(ENTRIES // 3)
        members[entries()[0].split()[1]].terminate()  # SIGTERM: drain, hand over, leave
        wait_for(ENTRIES)
    finally:
        for process in members.values():
            process.terminate()
        for process in members.values():
            process.wait()
    written = [line.split() for line in entries()]
    assert [int(number) for number, _ in written] == list(range(ENTRIES)), "each entry once, in order"
    owners = [name for _, name in written]
    assert owners == sorted(owners, key=owners.index), "one after the other"
    print(
        f"{ENTRIES} entries in order, each once: "
        + ", then ".join(f"{owners.count(n)} by {n}" for n in dict.fromkeys(owners))
    )


async def example() -> None:
    client = await nats.connect(os.environ["NATS_URL"])
    stream = client.jetstream()
    await stream.add_stream(name=ORIGIN, subjects=["ledger.*"])
    for number in range(ENTRIES):
        await stream.publish(f"ledger.account{number % 7}", str(number).encode())
    try:
        await asyncio.to_thread(main)
    finally:
        await stream.delete_stream(STREAM)
        await stream.delete_stream(ORIGIN)
        await stream.delete_key_value(f"lanes_{STREAM}_lanes")
        await client.close()
        os.remove(LEDGER)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        member(sys.argv[1])
    else:
        asyncio.run(example())
