"""Computes and checks the subjects of a partitioned queue in one stream. Pure.

The subject of a message is the name of its physical queue, or a subject below that name: the queue ``orders__p1`` has
the subjects ``orders__p1`` and ``orders__p1.>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lanes.arguments import shown_value
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.subjects import is_subject, overlap

_NAMED: Final = 8
"""Maximum number of subjects that an error names."""


def subjects_of(name: str) -> tuple[str, str]:
    """Return the patterns of the subjects of a physical queue."""
    return name, f"{name}.>"


def is_of(queue: PartitionedQueue, subject: str) -> bool:
    """Return whether a subject without wildcards belongs to a physical queue."""
    return any(subject == name or subject.startswith(f"{name}.") for name in queue.names)


def check_queue(queue: object) -> None:
    """Raise ``ConfigError`` unless the argument ``queue=`` is a queue whose names are separate subjects."""
    if not isinstance(queue, PartitionedQueue):
        raise ConfigError(
            f'queue={shown_value(queue)}: must be a PartitionedQueue, such as PartitionedQueue("orders", partitions=4)'
        )
    names = set(queue.names)
    for name in queue.names:
        tokens = name.split(".")
        if not is_subject(name) or "*" in tokens or ">" in tokens or name.startswith("$"):
            raise ConfigError(
                f"queue={shown_value(queue.name)}: the physical queue {shown_value(name)} is not a valid subject; use "
                "names without blanks, wildcards, empty tokens and a leading $"
            )
        for length in range(1, len(tokens)):
            above = ".".join(tokens[:length])
            if above in names:
                raise ConfigError(
                    f"queue={shown_value(queue.name)}: the physical queue {shown_value(name)} is below "
                    f"{shown_value(above)}, so both would receive its messages; choose names that do not begin with "
                    "another name and a dot"
                )


def check_stream(queue: PartitionedQueue, stream: str, intake: Intake) -> None:
    """Check that a stream stores each physical queue, and that each of its subjects covers at most one physical queue.

    Args:
        queue: The queue.
        stream: Name of the stream.
        intake: Subjects that the stream stores.

    Raises:
        ConfigError: The stream changes subjects, a physical queue is missing, or a subject of the stream covers two
            physical queues.
    """
    check_apart(queue.name, queue.names, stream, intake)
    missing = {
        str(number): name
        for number, name in enumerate(queue.names)
        if not any(intake.may_store(each) for each in subjects_of(name))
    }
    if missing:
        wanted = [each for name in missing.values() for each in subjects_of(name)]
        raise ConfigError(
            f"stream {stream!r} does not store partition {_listed(missing)} of queue {queue.name!r}; add the subjects "
            f"{_listed(map(repr, wanted))} to the stream, or correct the number of partitions"
        )


def check_apart(queue: str, names: Sequence[str], stream: str, intake: Intake) -> None:
    """Check that each subject of a stream covers at most one physical queue, and that the stream changes no subjects.

    Args:
        queue: Name of the logical queue.
        names: Names of the physical queues.
        stream: Name of the stream.
        intake: Subjects that the stream stores.

    Raises:
        ConfigError: The stream changes subjects, or a subject of the stream covers two physical queues.
    """
    if intake.transforms:
        raise ConfigError(
            f"stream {stream!r} transforms subjects, so the subjects of queue {queue!r} may not arrive in it; "
            "remove the transforms, or use another stream for the queue"
        )
    for own in intake.patterns.get(stream, ()):
        held = [name for name in names if any(overlap(own, each) for each in subjects_of(name))]
        if len(held) > 1:
            every = [each for name in names for each in subjects_of(name)]
            raise ConfigError(
                f"stream {stream!r} stores the physical queues {held[0]!r} and {held[1]!r} of queue {queue!r} by one "
                f"subject, {own!r}, which also stores partitions without a consumer; replace this subject by "
                f"{_listed(map(repr, every))}"
            )


def _listed(texts: Iterable[str]) -> str:
    """Return the first texts of a list, separated by commas, for an error."""
    found = list(texts)
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
