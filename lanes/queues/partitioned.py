"""A logical queue over several physical queues: their names, and the routes of messages.

A physical queue is a topic, a subject or the rows of a table with one name. Routes are plain data: ``lanes`` sends no
message, and any producer can use them. docs/reference/routing.md specifies names and hash for other languages.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lanes.arguments import check_text, check_whole, kind_of, names_unknown_options, shown_value
from lanes.core.queue_hash import queue_partition
from lanes.core.types import PartitionKey, key_bytes
from lanes.errors import ConfigError

MOST_PARTITIONS: Final = 32_767
"""Maximum number of partitions of a queue."""

_INFIX: Final = "__p"
"""Between the names of a queue and the number of a partition above 0."""

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,4}")

_NOT_IN_NAMES: Final = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode categories that a name cannot have: control characters, surrogates, and separators of lines and paragraphs.
Names are labels and parts of log lines."""

_NAMES_SHOWN: Final = 8
"""Number of physical names that ``repr`` shows."""


class Route(NamedTuple):
    """The destination of one message.

    Attributes:
        name: Name of the physical queue.
        partition: Number of the physical queue in its logical queue, counted from 0.
        key: Key of the message as bytes, by which consumers order it. ``None`` = the message has no key.
    """

    name: str
    partition: int
    key: bytes | None


@names_unknown_options("PartitionedQueue")
@dataclass(frozen=True, slots=True, repr=False)
class PartitionedQueue:
    """One logical queue over a number of physical queues; an immutable value.

    Partition 0 has the name of the logical queue, and partition 1, 2 … the names ``NAME__p1``, ``NAME__p2`` …. With one
    partition, the queue is a plain queue. A producer that does not know the partitions writes to partition 0.

    Producers and consumers must use the same number of partitions. With another number, some keys have other
    partitions, and messages of such a key may overtake each other.

    Args:
        name: Name of the logical queue, not empty.
        partitions: Number of physical queues, 1 … 32767.

    Attributes:
        name: Name of the logical queue.
        partitions: Number of physical queues.
        names: Names of the physical queues, in the order of their partitions.

    Raises:
        ConfigError: The name is not a ``str``, is empty or contains a control character, or the number of partitions is
            out of its range.
    """

    name: str
    partitions: int = 1
    names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        check_whole("partitions", self.partitions, 1)
        if self.partitions > MOST_PARTITIONS:
            raise ConfigError(
                f"partitions={shown_value(self.partitions)}: queue {shown_value(self.name)} can have at most "
                f"{MOST_PARTITIONS} partitions; try 2 before 4"
            )
        object.__setattr__(self, "names", _default_names(self.name, self.partitions))

    def __repr__(self) -> str:
        if self.names == _default_names(self.name, self.partitions):
            return f"PartitionedQueue({self.name!r}, partitions={self.partitions})"
        more = ", …" if self.partitions > _NAMES_SHOWN else ""
        names = ", ".join(map(repr, self.names[:_NAMES_SHOWN]))
        return f"PartitionedQueue.of({self.name!r}, physical_names=[{names}{more}])"

    @classmethod
    def of(cls, logical: str, physical_names: Iterable[str]) -> PartitionedQueue:
        """Make a queue over physical queues with explicit names.

        Args:
            logical: Name of the logical queue, not empty. No route leads to this name unless a physical queue also has
                this name.
            physical_names: Names of the physical queues in the order of their partitions, 1 … 32767 different names.

        Returns:
            The queue.

        Raises:
            ConfigError: A name is not a ``str``, is empty, contains a control character or occurs twice, or the number
                of names is out of its range.
        """
        _check_name("logical", logical)
        if isinstance(physical_names, str) or not isinstance(physical_names, Iterable):
            raise ConfigError(
                f"physical_names={shown_value(physical_names)}: must be a list of names, such as "
                'physical_names=["orders-a", "orders-b"]'
            )
        names = tuple(physical_names)
        if not names:
            raise ConfigError(
                f"physical_names=[]: queue {shown_value(logical)} needs a physical queue; name at least one"
            )
        partitions: dict[str, int] = {}
        for number, name in enumerate(names):
            _check_name(f"physical_names[{number}]", name)
            if (first := partitions.setdefault(name, number)) != number:
                raise ConfigError(
                    f"physical_names[{number}]={shown_value(name)}: is also physical_names[{first}]; give each "
                    "partition a name of its own"
                )
        queue = cls(logical, len(names))
        object.__setattr__(queue, "names", names)
        return queue

    def route_by_key(self, key: PartitionKey) -> Route:
        """Return the route of a message with a key. All messages of a key have the same route.

        Args:
            key: The key: bytes, a ``str`` (its UTF-8) or an ``int`` in 0 … 2¹²⁸−1 (16 bytes, little-endian).

        Returns:
            The route, with the key as bytes.

        Raises:
            TypeError: The key has another type.
            ValueError: An ``int`` is out of its range, or a ``str`` cannot be encoded as UTF-8.
        """
        if not isinstance(key, bytes | str | int) or isinstance(key, bool):
            raise TypeError(
                f"route_by_key: the key is {kind_of(key)}, and must be bytes, str or int; use route_by_index(i) for a "
                "message without a key"
            )
        data = key_bytes(key)
        partition = queue_partition(data, self.partitions)
        return Route(self.names[partition], partition, data)

    def route_by_index(self, i: int) -> Route:
        """Return the route of a message without a key. Index 0 selects partition 0, and index 1 selects partition 1.

        Args:
            i: Number of the message, 0 or more, such as a counter of the producer. The partition is this number modulo
                the number of partitions.

        Returns:
            The route, with the key ``None``.

        Raises:
            TypeError: The index is not an ``int``.
            ValueError: The index is negative.
        """
        if not isinstance(i, int) or isinstance(i, bool):
            raise TypeError(f"route_by_index: the index is {kind_of(i)}, and must be an int, 0 or more")
        if i < 0:
            raise ValueError(f"route_by_index: the index {shown_value(i)} is negative; count the messages from 0")
        partition = i % self.partitions
        return Route(self.names[partition], partition, None)


def is_partition_name(queue: str, name: str) -> bool:
    """Whether ``name`` is the default name of a partition of ``queue`` above partition 0, such as ``orders__p1``.

    A queue of the user may also have such a name. The answer therefore affects only texts for the operator.
    """
    return name.startswith(queue + _INFIX) and _NUMBER.fullmatch(name, len(queue) + len(_INFIX)) is not None


def _check_name(argument: str, name: str) -> None:
    check_text(argument, name)
    refused = next((each for each in name if unicodedata.category(each) in _NOT_IN_NAMES), None)
    if refused is not None:
        raise ConfigError(
            f"{argument}={shown_value(name)}: contains U+{ord(refused):04X}, but a name is one line of text; "
            "remove this character"
        )


def _default_names(name: str, partitions: int) -> tuple[str, ...]:
    return (name, *(f"{name}{_INFIX}{number}" for number in range(1, partitions)))
