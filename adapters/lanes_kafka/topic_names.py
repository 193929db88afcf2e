"""Checks of the topic names that a source receives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lanes.arguments import shown_value
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue

NO_TOPIC: Final = "no topic can have this name; use 1 to 249 letters, digits, '.', '_' and '-', and not '.' or '..'"
"""Fault and remedy of a name that the brokers refuse."""

_TOPIC: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")

_NAMED: Final = 2
"""Maximum number of topics and queues in the name of a source. The name ends with the number of all others."""


def is_topic(name: str) -> bool:
    """Return whether a topic can have this name."""
    return _TOPIC.fullmatch(name) is not None


def read_topics(
    topics: str | PartitionedQueue | Sequence[str | PartitionedQueue],
) -> tuple[tuple[str, ...], tuple[PartitionedQueue, ...], str]:
    """Check the argument ``topics=`` of a source.

    Args:
        topics: Names of topics, and partitioned queues.

    Returns:
        The names of all topics, the queues, and a short text that names both.

    Raises:
        ConfigError: A name is invalid or occurs twice, or two queues have the same name.
    """
    given: object = (topics,) if isinstance(topics, str | PartitionedQueue) else topics
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"topics={shown_value(topics)}: must be the name of a topic, a str, or a list of names")
    names: list[str] = []
    queues: list[PartitionedQueue] = []
    shown: list[str] = []
    for each in given:
        if isinstance(each, PartitionedQueue):
            queues.append(each)
            names.extend(each.names)
            shown.append(each.names[0] if each.partitions == 1 else f"{each.name} ({each.partitions} partitions)")
        else:
            names.append(each)
            shown.append(each)
    if not names:
        raise ConfigError("topics=[]: name at least one topic")
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"topics={shown_value(topics)}: must be the name of a topic, a str, or a list of names")
        if name.startswith("^"):
            raise ConfigError(
                f"topics={shown_value(name)}: patterns are not supported, because the source checks all topics at the "
                "start; name the topics"
            )
        if "://" in name:
            raise ConfigError(f"topics={shown_value(name)}: a URL is not the name of a topic; pass the names of topics")
        if "," in name:
            raise ConfigError(
                f"topics={shown_value(name)}: a name has no comma; write several topics as a list of names"
            )
        if not is_topic(name):
            raise ConfigError(f"topics={shown_value(name)}: {NO_TOPIC}")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ConfigError(
            f"topics={shown_value(topics)}: topic(s) {shown_value(twice)} are named twice; name each topic, and each "
            "partition of a queue, once"
        )
    logical = Counter(queue.name for queue in queues)
    if twice := [name for name, times in logical.items() if times > 1]:
        raise ConfigError(
            f"topics={shown_value(topics)}: several queues have the name(s) {shown_value(twice)}; give each logical "
            "queue a name of its own"
        )
    more = len(shown) - _NAMED
    return tuple(names), tuple(queues), ",".join(shown[:_NAMED]) + (f" and {more} more" if more > 0 else "")
