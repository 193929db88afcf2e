"""The consumer writes unreadable messages to the dead letters, and a replay handles them with the corrected handler.

Needs a broker and the extra `cli`: KAFKA_URL=127.0.0.1:9092 python examples/kafka/dead_letters_and_replay.py
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_kafka import KafkaDeadLetters, KafkaSource

BROKERS: dict[str, Any] = {"bootstrap.servers": os.environ["KAFKA_URL"]}
TOPIC, DEAD, PRICES = "example-prices", "example-prices-dead", 100


async def book(message: lanes.Message) -> None:
    """The handler as deployed. One price in ten has a comma, so every retry of its message fails."""
    try:
        float(message.value)
    except ValueError as error:
        raise lanes.Term("no price") from error


async def book_mended(message: lanes.Message) -> None:
    """The handler after the fix."""
    float(message.value.replace(b",", b"."))


async def consume() -> None:
    source = KafkaSource({**BROKERS, "group.id": "prices", "auto.offset.reset": "earliest"}, topics=TOPIC)
    # The topic of the dead letters exists, with a retention that leaves time to inspect them.
    async with lanes.Consumer(source, book, dead_letters=KafkaDeadLetters(BROKERS, DEAD)) as consumer:
        while consumer.status().settled < PRICES:  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.05)
        status = consumer.status()
    print(f"{status.settled} settled, {status.dead_lettered} of them dead-lettered")


def dead_letters(command: str, *arguments: str) -> str:
    """Run a command, such as: lanes dead-letters replay --all --handler module:function --topic … --server …"""
    where = ["--topic", DEAD, "--server", BROKERS["bootstrap.servers"]]
    lanes_command = str(Path(sys.executable).with_name("lanes"))
    done = subprocess.run(
        [lanes_command, "dead-letters", command, *arguments, *where],
        cwd=Path(__file__).parent,  # where the module of the handler is found
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def publish() -> None:
    """Publish the prices."""
    producer = Producer({**BROKERS, "enable.idempotence": True})
    for number in range(PRICES):
        producer.produce(TOPIC, value=f"{number},50" if number % 10 == 0 else f"{number}.50", key=f"item-{number % 7}")
    producer.flush()


def main() -> None:
    publish()
    asyncio.run(consume())
    print(dead_letters("list"))
    print(dead_letters("replay", "--all", "--handler", f"{Path(__file__).stem}:book_mended"))
    assert dead_letters("list") == "", "a dead letter is left over"


if __name__ == "__main__":
    admin = AdminClient(BROKERS)
    for created in admin.create_topics([NewTopic(TOPIC, 4, 1), NewTopic(DEAD, 1, 1)]).values():
        created.result()
    try:
        main()
    finally:
        for deleted in admin.delete_topics([TOPIC, DEAD]).values():
            deleted.result()
