"""Whether the keys that are read were put where they lie by one kind of producers; said once where not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from confluent_kafka import Message as Raw

from lanes.core.types import Message
from lanes.source import Delivered
from lanes_kafka.client.topics import Topic
from lanes_kafka.partitioners import Census

log = logging.getLogger("lanes.kafka")


class KeyWatch:
    """A census of each topic that is read, until it has said that there are two kinds of producers.

    Not thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._censuses: dict[str, Census] = {}
        self._told: set[str] = set()

    def look(self, events: Sequence[Delivered], known: Mapping[str, Topic]) -> None:
        """Take note of what was read; ``known``: the topics. Takes time with the runs, and with the sample alone."""
        for event in events:
            topic, number = event.partition.id
            census = self._censuses.get(topic)
            if census is None:
                if topic in self._told or topic not in known:
                    continue
                census = self._censuses[topic] = Census(max(1, known[topic].partitions))
            census.look(number, event.run, _key)

    def tell(self, known: Mapping[str, Topic]) -> None:
        """Say what was found since, once a topic; begin anew with one that has more partitions now."""
        for topic, census in list(self._censuses.items()):
            report = census.report(topic)
            if report is not None:
                log.warning("%s: %s", self._name, report)
                self._told.add(topic)
                del self._censuses[topic]
            elif topic in known and known[topic].partitions > census.partitions:
                census.resize(known[topic].partitions)


def _key(message: Message) -> bytes | None:
    """The record's own key, whatever the consumer's is."""
    raw = message.raw
    assert isinstance(raw, Raw)
    key = raw.key()
    # A client of the user's may have made something else of it.
    return key if isinstance(key, bytes) else None
