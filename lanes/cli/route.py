"""``lanes route``: the physical queues of a partitioned queue for keys."""

from __future__ import annotations

import typer
from rich.table import Table

from lanes.cli.kit import EXIT_USAGE, print_table, stop
from lanes.cli.queue_names import PhysicalNames, queue_of
from lanes.cli.ring import read_key


def route(
    queue: str = typer.Argument(help="Name of the logical queue.", metavar="QUEUE", show_default=False),
    keys: list[str] = typer.Argument(
        help="Keys; put `--` before a key that starts with a dash.", metavar="KEY", show_default=False
    ),
    partitions: int | None = typer.Option(
        None, help="Number of partitions of the queue.", metavar="NUMBER", show_default=False
    ),
    names: PhysicalNames = [],  # noqa: B006 (typer copies it)
    as_int: bool = typer.Option(False, "--int", help="Read the keys as decimal numbers, 0 … 2**128-1."),
) -> None:
    """Show the partition and physical queue of keys.

    The command asks no broker. The command computes the names like `lanes.PartitionedQueue(QUEUE, partitions=NUMBER)`,
    or takes them from --partition, like `PartitionedQueue.of`. A producer in another language must compute the same
    routes.
    """
    routed = queue_of(queue, partitions, "--partitions", names)
    table = Table()
    for heading in ("key", "physical queue"):
        table.add_column(heading, overflow="fold")
    table.add_column(f"partition of {routed.partitions}", justify="right", no_wrap=True)
    for text in keys:
        try:
            key = read_key(text, as_int=as_int)
            found = routed.route_by_key(key)
        except ValueError as error:
            stop(str(error), EXIT_USAGE)
        # Names and keys are untrusted text. Escaped text can neither steer the terminal nor reorder a row.
        table.add_row(ascii(key if as_int else text), ascii(found.name)[1:-1], str(found.partition))
    print_table(table)
