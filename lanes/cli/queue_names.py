"""The options that name a partitioned queue: its number of partitions, or the names of its physical queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lanes.cli.kit import EXIT_USAGE, Misuse, queue_fault, stop
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue

PhysicalNames = Annotated[
    list[str],
    typer.Option(
        "--partition",
        help="Physical queue of PartitionedQueue.of, in order; repeatable.",
        metavar="NAME",
        show_default=False,
    ),
]
"""The option that names the partitions of ``PartitionedQueue.of``."""


def queue_of(
    name: str, partitions: int | None, option: str, physical_names: Sequence[str] = (), *, part: bool = False
) -> PartitionedQueue:
    """Make the queue of a command. An invalid number or name ends the process.

    Args:
        name: Name of the logical queue.
        partitions: Number of partitions; None = the number of the physical names.
        option: Name of the option that has the number of partitions.
        physical_names: Names of the physical queues; empty = the default names.
        part: Whether the names may outnumber the partitions, because they belong to a larger number.

    Returns:
        The queue.

    Raises:
        Misuse: The number and the names are both missing, or the number of names differs from the number.
    """
    if partitions is None and not physical_names:
        raise Misuse(f"needs {option} NUMBER, or --partition NAME for each partition")
    try:
        if not physical_names:
            return PartitionedQueue(name, 0 if partitions is None else partitions)
        queue = PartitionedQueue.of(name, physical_names)
        if partitions is None or partitions == queue.partitions:
            return queue
        if partitions > queue.partitions or not part:
            raise Misuse(
                f"names {queue.partitions} partition(s) by --partition, but has {option} {partitions}; name each "
                "partition once, in order"
            )
        return PartitionedQueue.of(name, physical_names[:partitions])
    except ConfigError as error:
        stop(queue_fault(error, option), EXIT_USAGE)
