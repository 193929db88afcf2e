"""The commands ``lanes queue …``: the runbook of another number of partitions, and the state of a queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from lanes.cli.kit import EXIT_UNUSABLE, EXIT_USAGE, Misuse, command_group, stop, waiting_line
from lanes.dead_letter import printable
from lanes.errors import ConfigError, SourceError
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import QueueFacts, names_beyond, stranded_in
from lanes.queues.widths import Runbook, grow_steps, refused_removals, shrink_steps
from lanes_kafka.cli.config_file import given_settings
from lanes_kafka.cli.queue_survey import Cluster, Survey

_ARRIVALS: Final = 1.0
"""Seconds between the two readings that show whether a producer still writes."""

T = TypeVar("T")

queue = command_group("Change the partitions of a queue, or show them.")

Queue = Annotated[str, typer.Argument(help="Name of the logical queue.", metavar="QUEUE", show_default=False)]
From = Annotated[
    int, typer.Option("--from", help="Present number of partitions.", metavar="NUMBER", show_default=False)
]
To = Annotated[int, typer.Option("--to", help="New number of partitions.", metavar="NUMBER", show_default=False)]
Groups = Annotated[
    list[str],
    typer.Option("--group", help="Group of the workers; repeatable.", metavar="NAME", show_default=False),
]
Server = Annotated[str, typer.Option(help="Kafka brokers, separated by commas.", metavar="HOST:PORT")]
Config = Annotated[Path | None, typer.Option(help="Read the client's settings from a file.", metavar="FILE")]
Settings = Annotated[
    list[str],
    typer.Option("-X", help="Override a setting of the file; never a password.", metavar="NAME=VALUE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@queue.command()
def grow(
    name: Queue,
    before: From,
    after: To,
    groups: Groups = [],  # noqa: B006 (typer copies it)
    server: Server = "",
    config: Config = None,
    settings: Settings = [],  # noqa: B006
    apply: Annotated[bool, typer.Option("--apply", help="Create the missing topics.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the runbook of a larger number of partitions.

    Exit status: 0 = no fault was found, 3 = a fault was found. Each step shows whether the broker has seen it. Without
    --group, all groups that read the queue count. With --apply, the missing topics get the partitions, replicas and
    settings of the first topic.
    """
    old, new = _queues(name, before, after)
    if new.partitions <= old.partitions:
        raise Misuse(f"has --from {before} --to {after}, and needs a larger number; see `lanes queue shrink`")

    def act(cluster: Cluster) -> tuple[Runbook, list[str]]:
        done: list[str] = []
        found = cluster.survey(new.names, groups)
        runbook = grow_steps(old, new, found.facts, groups or found.groups)
        if apply and runbook.create:
            cluster.create(runbook.create, old.names[0])
            done = [f"created topic {each!r} with {size} partition(s)" for each, size in runbook.create.items()]
            found = cluster.survey(new.names, groups)
            runbook = grow_steps(old, new, found.facts, groups or found.groups)
        return runbook, done

    runbook, done = _asked(name, given_settings(config, settings, server=server), server, act)
    _conclude(runbook, done, runbook.faults, as_json=as_json)


@queue.command()
def shrink(
    name: Queue,
    before: From,
    after: To,
    groups: Groups = [],  # noqa: B006
    server: Server = "",
    config: Config = None,
    settings: Settings = [],  # noqa: B006
    apply: Annotated[bool, typer.Option("--apply", help="Remove the finished topics.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the runbook of a smaller number of partitions.

    Exit status: 0 = no fault was found, 3 = a fault was found, or a removal was refused. The command waits for 1 s, to
    see whether messages still arrive. With --apply, it removes the topics that all groups have finished and no
    member reads. It refuses every other removal, and names group, topic and number of messages.
    """
    old, new = _queues(name, before, after)
    if new.partitions >= old.partitions:
        raise Misuse(f"has --from {before} --to {after}, and needs a smaller number; see `lanes queue grow`")
    removed = old.names[new.partitions :]

    def read(cluster: Cluster, earlier: Survey) -> tuple[Survey, Runbook]:
        found = cluster.survey(old.names, groups)
        arrived = {each: found.ends.get(each, 0) - end for each, end in earlier.ends.items()}
        return found, shrink_steps(old, new, found.facts, groups or found.groups, arrived)

    def act(cluster: Cluster) -> tuple[Runbook, list[str], list[str]]:
        done: list[str] = []
        first = cluster.survey(old.names, groups)
        sleep(_ARRIVALS)
        found, runbook = read(cluster, first)
        refused = refused_removals(runbook, removed, found.facts) if apply else []
        if apply and not refused and runbook.remove:
            cluster.remove(runbook.remove)
            done = [f"removed topic {each!r}" for each in runbook.remove]
            _, runbook = read(cluster, found)
        return runbook, done, refused

    runbook, done, refused = _asked(name, given_settings(config, settings, server=server), server, act)
    faults = [*runbook.faults, *(f"not removed: {each}" for each in refused)]
    _conclude(runbook, done, faults, as_json=as_json)


@queue.command()
def status(
    name: Queue,
    partitions: Annotated[
        int, typer.Option(help="Number of partitions of the queue.", metavar="NUMBER", show_default=False)
    ],
    server: Server = "",
    config: Config = None,
    settings: Settings = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Show the topics of a queue, with lag and members by group.

    Exit status: 0 = all topics exist and no message is stranded, 3 = otherwise. A stranded message waits in a topic of
    a larger number that its group does not read.
    """
    shown = _queue(name, partitions, "--partitions")
    beyond = names_beyond(shown)
    found = _asked(
        name,
        given_settings(config, settings, server=server),
        server,
        lambda cluster: cluster.survey((*shown.names, *beyond)),
    )
    missing = [each for each in shown.names if not found.facts[each].size]
    stranded = {
        (each.name, group): each.messages for group in found.groups for each in stranded_in(shown, found.facts, group)
    }
    unclaimed = {
        each: found.facts[each].messages
        for each in beyond
        if found.facts[each].messages and not found.facts[each].unfinished
    }
    facts = {each: fact for each, fact in found.facts.items() if each in shown.names or fact.size}
    if as_json:
        document = {
            "queue": name,
            "partitions": partitions,
            "topics": {each: fact._asdict() for each, fact in facts.items()},
            "missing": missing,
            "stranded": [{"topic": each, "group": group, "messages": n} for (each, group), n in stranded.items()]
            + [{"topic": each, "group": None, "messages": number} for each, number in unclaimed.items()],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        _print("topic", "partitions", "messages", "group", "not finished", "members", rows=_rows(facts))
        for (each, group), number in stranded.items():
            typer.echo(f"stranded: {number} messages in {each!a}, which group {group!a} does not read")
        for each, number in unclaimed.items():
            typer.echo(f"stranded: {number} messages in {each!a}, in which no group has a position")
    raise typer.Exit(EXIT_UNUSABLE if missing or stranded or unclaimed else 0)


def _queue(name: str, partitions: int, option: str) -> PartitionedQueue:
    try:
        return PartitionedQueue(name, partitions)
    except ConfigError as error:
        fault = str(error).removeprefix("partitions=")
        stop(f"QUEUE {name!a}: must not be empty" if not name else f"{option} {fault}", EXIT_USAGE)


def _queues(name: str, before: int, after: int) -> tuple[PartitionedQueue, PartitionedQueue]:
    return _queue(name, before, "--from"), _queue(name, after, "--to")


def _asked(name: str, settings: Mapping[str, Any], server: str, ask: Callable[[Cluster], T]) -> T:
    """Call ``ask`` with a client of the broker; an error of the broker ends the process."""
    try:
        with waiting_line("the Kafka broker", server):
            return ask(Cluster(settings, name))
    except SourceError as error:
        stop(str(error))


def _conclude(runbook: Runbook, done: Sequence[str], faults: Sequence[str], *, as_json: bool) -> NoReturn:
    if as_json:
        document = {"steps": [step._asdict() for step in runbook.steps], "done": done, "faults": faults}
        typer.echo(json.dumps(document, indent=2))
    else:
        rows = [(str(number), *step) for number, step in enumerate(runbook.steps, 1)]
        _print("", "step", "progress", "found", rows=rows)
        for text in done:
            typer.echo(text)
        for text in faults:
            typer.echo(f"FAULT: {printable(text)}")
    raise typer.Exit(EXIT_UNUSABLE if faults else 0)


def _rows(facts: Mapping[str, QueueFacts]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the status: one for each topic and group."""
    for name, fact in facts.items():
        topic = (name, str(fact.size) if fact.size else "missing", str(fact.messages))
        groups = sorted({*fact.unfinished, *fact.readers})
        if not groups:
            yield (*topic, "", "", "")
        for group in groups:
            yield (*topic, group, str(fact.unfinished.get(group, 0)), str(fact.readers.get(group, 0)))


def _print(*headings: str, rows: Iterable[Sequence[str]]) -> None:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        # Names are untrusted text, which must not steer the terminal.
        table.add_row(*map(printable, row))
    Console(markup=False, emoji=False, highlight=False).print(table)
