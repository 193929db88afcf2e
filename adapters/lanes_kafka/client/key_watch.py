"""Warns once for each topic if producers choose partitions by two different hash functions."""

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
    """Counts the keys of each topic until the warning about this topic. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._censuses: dict[str, Census] = {}
        self._warned: set[str] = set()

    def observe(self, events: Sequence[Delivered], known: Mapping[str, Topic]) -> None:
        """Count the sampled keys of these events. Takes O(runs + sampled records) time.

        Args:
            events: Delivered messages.
            known: Topics by name.
        """
        for event in events:
            topic, number = event.partition.id
            census = self._censuses.get(topic)
            if census is None:
                if topic in self._warned or topic not in known:
                    continue
                census = self._censuses[topic] = Census(max(1, known[topic].partitions))
            census.observe(number, event.run, _key)

    def report(self, known: Mapping[str, Topic]) -> None:
        """Log each warning once. If a topic has more partitions than before, count its keys from zero."""
        for topic, census in list(self._censuses.items()):
            report = census.report(topic)
            if report is not None:
                log.warning("%s: %s", self._name, report)
                self._warned.add(topic)
                del self._censuses[topic]
            elif topic in known and known[topic].partitions > census.partitions:
                census.resize(known[topic].partitions)


def _key(message: Message) -> bytes | None:
    """Return the key of the record, which may differ from the key of the lane."""
    raw = message.raw
    assert isinstance(raw, Raw)
    key = raw.key()
    # A subclass of the client may return keys of another type.
    return key if isinstance(key, bytes) else None
