"""Handlers that fail, and the committed metadata of a group."""

from __future__ import annotations

from collections import Counter

from confluent_kafka import Consumer, TopicPartition

from lanes.core.types import Message
from tests.kafka.members import Story, Work
from tests.kafka.workload import QUIET, Topic


class FailingWork(Work):
    """Handlers of the keys in ``bad`` raise ``error``; ``refused`` counts them by position."""

    def __init__(self, story: Story, *bad: bytes, error: Exception | None = None) -> None:
        super().__init__(story)
        self.bad = set(bad)
        self.error = error or ValueError("no such customer")
        self.refused: Counter[int] = Counter()

    async def run(self, member: str, message: Message) -> None:
        if message.key in self.bad:
            self.story.note("start", member, message.partition.id.number, message.position)
            self.refused[message.position] += 1
            raise self.error
        await super().run(member, message)


def commit(topic: Topic, group: str, offset: int, texts: list[str]) -> None:
    """Commit the same offset of each partition with the given metadata, as another client may do. Blocks."""
    _ask(topic, group, [TopicPartition(topic.name, number, offset, text) for number, text in enumerate(texts)])


def metadata(topic: Topic, group: str) -> list[str | None]:
    """The metadata of the committed offsets, by partition. Blocks."""
    places = [TopicPartition(topic.name, number) for number in range(topic.partitions)]
    return [each.metadata for each in _ask(topic, group, places)]


def _ask(topic: Topic, group: str, places: list[TopicPartition]) -> list[TopicPartition]:
    outsider = Consumer({**QUIET, "bootstrap.servers": topic.url, "group.id": group})
    try:
        if places[0].offset >= 0:
            outsider.commit(offsets=places, asynchronous=False)
        found: list[TopicPartition] = outsider.committed(places, timeout=20)
        return found
    finally:
        outsider.close()
