"""The consumer writes unreadable messages to the dead letters, and a replay handles them with the corrected handler.

Needs a server and the extra `cli`: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/dead_letters_and_replay.py
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import nats

import lanes
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, subject_token

STREAM, DEAD, SUBJECT, PRICES = "EXAMPLE_PRICES", "EXAMPLE_PRICES_DEAD", "example-dead.prices", 100


async def book(message: lanes.Message) -> None:
    """The handler as deployed. One price in ten has a comma, so every retry of its message fails."""
    try:
        float(message.value)
    except ValueError as error:
        raise lanes.Term("no price") from error


async def book_mended(message: lanes.Message) -> None:
    """The handler after the fix."""
    float(message.value.replace(b",", b"."))


async def consume(url: str) -> None:
    source = JetStreamSource(url, stream=STREAM, durable="prices", key=subject_token(1))
    # The stream of the dead letters exists, with limits that leave time to inspect them.
    async with lanes.Consumer(source, book, dead_letters=JetStreamDeadLetters(url, SUBJECT)) as consumer:
        while consumer.status().settled < PRICES:  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.02)
        status = consumer.status()
    print(f"{status.settled} settled, {status.dead_lettered} of them dead-lettered")


def dead_letters(url: str, command: str, *arguments: str) -> str:
    """Run a command, such as: lanes dead-letters replay --all --handler module:function --subject … --server …"""
    lanes_command = str(Path(sys.executable).with_name("lanes"))
    done = subprocess.run(
        [lanes_command, "dead-letters", command, *arguments, "--subject", SUBJECT, "--server", url],
        cwd=Path(__file__).parent,  # where the module of the handler is found
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def replay(url: str) -> None:
    print(dead_letters(url, "list"))
    print(dead_letters(url, "replay", "--all", "--handler", f"{Path(__file__).stem}:book_mended"))
    assert dead_letters(url, "list") == "", "a dead letter is left over"


async def main() -> None:
    url = os.environ["NATS_URL"]
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name=STREAM, subjects=["prices.*"])
    await stream.add_stream(name=DEAD, subjects=[SUBJECT])
    try:
        for number in range(PRICES):
            price = f"{number},50" if number % 10 == 0 else f"{number}.50"
            await stream.publish(f"prices.item{number % 7}", price.encode())
        await consume(url)
        await asyncio.to_thread(replay, url)
    finally:
        await stream.delete_stream(STREAM)
        await stream.delete_stream(DEAD)
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
