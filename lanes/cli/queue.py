"""The commands ``lanes queue …``: runbooks for a new number of partitions, and the state of a queue.

An adapter registers its broker in the entry-point group ``lanes.queue_brokers``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from time import sleep
from typing import Annotated, Final, NamedTuple, NoReturn, Protocol, TypeVar

import typer
from rich.table import Table

from lanes.cli.brokers import Config, Server, Settings, is_nats, make_client
from lanes.cli.kit import EXIT_UNUSABLE, Misuse, command_group, print_table, stop, waiting_line
from lanes.cli.queue_names import PhysicalNames, queue_of
from lanes.dead_letter import printable
from lanes.errors import SourceError
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import QueueFacts, names_beyond, stranded_in
from lanes.queues.widths import Runbook, Survey, grow_steps, refused_removals, shrink_steps, wider_readers

_ARRIVALS: Final = 1.0
"""Seconds between the two readings that show whether a producer still writes."""

_NAMED_ONLY: Final = "only the physical queues named by --partition were read"

T = TypeVar("T")


class QueueBroker(Protocol):
    """A broker with the physical queues of a partitioned queue. All calls block.

    Each call raises ``SourceError`` if the broker does not answer or refuses, and ``ConfigError`` if the queue does not
    fit.

    Attributes:
        noun: The broker's word for a physical queue, such as ``topic``.
        what: Name of the broker in texts.
    """

    @property
    def noun(self) -> str: ...

    @property
    def what(self) -> str: ...

    def names(self) -> Iterable[str]:
        """Return all names at the broker that may be names of physical queues."""

    def survey(self, names: Sequence[str], named: Sequence[str] = ()) -> Survey:
        """Read the facts of physical queues, those of partition 0 first.

        Each physical queue lists the groups in ``named``, even a group without a position. If ``named`` is empty, the
        groups of partition 0 replace it.
        """

    def arrived(self, earlier: Survey, later: Survey) -> Mapping[str, int]:
        """Return the number of messages that arrived between two surveys, by physical queue."""

    def create(self, names: Mapping[str, int], like: str) -> list[str]:
        """Create physical queues like an existing queue. Returns a line for each created queue."""

    def remove(self, names: Sequence[str]) -> list[str]:
        """Remove physical queues. Returns a line for each removed queue."""

    def forget(self, groups: Sequence[str], partitions: int) -> list[str]:
        """Remove the stored number of partitions of each group without members, if it differs from the new number.

        Returns a line for each group.
        """

    def close(self) -> None:
        """Close the connection. Idempotent."""


queue = command_group("Change the partitions of a queue, or show them.")

Queue = Annotated[str, typer.Argument(help="Name of the logical queue.", metavar="QUEUE", show_default=False)]
From = Annotated[
    int, typer.Option("--from", help="Present number of partitions.", metavar="NUMBER", show_default=False)
]
To = Annotated[int, typer.Option("--to", help="New number of partitions.", metavar="NUMBER", show_default=False)]


def _named(groups: list[str]) -> list[str]:
    if "" in groups:
        raise Misuse("--group is empty; name a group, durable or cohort, or leave --group out")
    return groups


Groups = Annotated[
    list[str],
    typer.Option(
        "--group",
        help="Group, durable or cohort of the workers; repeatable.",
        metavar="NAME",
        show_default=False,
        callback=_named,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Where(NamedTuple):
    """The options that reach the broker of a queue."""

    stream: Annotated[str, typer.Option(help="JetStream stream of the queue.", metavar="NAME", show_default=False)] = ""
    server: Server = ""
    config: Config = None
    settings: Settings = []  # noqa: RUF012 (typer copies it)

    def broker(self, queue: PartitionedQueue) -> QueueBroker:
        """Make the client of the broker.

        Raises ``ConfigError`` or ``Misuse``, or ends the process if an extra is missing.
        """
        if self.stream:
            if self.config is not None or self.settings:
                raise Misuse("has --stream with --config or -X, which are for Kafka; leave them out")
            if not self.server:
                raise Misuse("needs --server ADDRESS of a NATS server, such as nats://127.0.0.1:4222")
            return _make_broker("jetstream", queue, self.server, self.stream)
        if is_nats(self.server):
            raise Misuse("needs --stream NAME, because --server is the URL of a NATS server")
        return _make_broker("kafka", queue, self.server, self.config, self.settings)


def _make_broker(broker: str, *arguments: object) -> QueueBroker:
    made: QueueBroker = make_client("lanes.queue_brokers", broker, "lanes queue", *arguments)
    return made


@queue.command()
def grow(
    name: Queue,
    before: From,
    after: To,
    groups: Groups = [],  # noqa: B006 (typer copies it)
    names: PhysicalNames = [],  # noqa: B006
    where: Where = Where(),  # noqa: B008
    apply: Annotated[bool, typer.Option("--apply", help="Create the missing topics or subjects.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the runbook of a larger number of partitions.

    Exit status: 0 = no fault was found, 3 = a fault was found. Each step is done, due or unknown, by the state of the
    broker. With --stream, the queue is in a JetStream stream, otherwise on Kafka. Without --group, all groups that read
    the queue count. With --apply, the command creates the missing topics with the partitions, replicas and settings of
    the first topic, or adds the missing subjects to the stream. The command also removes the stored number of
    partitions of a cohort without live members.
    """
    old, new = _queues(name, before, after, names)
    if new.partitions <= old.partitions:
        raise Misuse(
            f"has --from {before} --to {after}, but --to must be larger; to remove partitions, use `lanes queue shrink`"
        )

    def read(broker: QueueBroker) -> tuple[Sequence[str], Runbook]:
        found = broker.survey(new.names, groups)
        wanted = groups or found.groups
        return wanted, grow_steps(old, new, found.facts, wanted, found.stored)

    def act(broker: QueueBroker) -> tuple[Runbook, list[str]]:
        done: list[str] = []
        wanted, runbook = read(broker)
        if wider := _wider(broker, new, names, wanted):
            return runbook._replace(faults=(*runbook.faults, *wider)), done
        if apply and runbook.create:
            done += broker.create(runbook.create, old.names[0])
            wanted, runbook = read(broker)
        if apply and runbook.steps[0].progress == "done" and (forgot := broker.forget(wanted, new.partitions)):
            done += forgot
            wanted, runbook = read(broker)
        return runbook, done

    runbook, done = _asked(where, new, act)
    _conclude(runbook, done, runbook.faults, names, as_json=as_json)


@queue.command()
def shrink(
    name: Queue,
    before: From,
    after: To,
    groups: Groups = [],  # noqa: B006
    names: PhysicalNames = [],  # noqa: B006
    where: Where = Where(),  # noqa: B008
    apply: Annotated[bool, typer.Option("--apply", help="Remove the finished topics or subjects.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the runbook of a smaller number of partitions.

    Exit status: 0 = no fault was found, 3 = a fault was found, or a removal was refused. The command counts the
    messages that arrive within 1 s. With --stream, the queue is in a JetStream stream, otherwise on Kafka. With
    --apply, the command removes the topics or subjects that all groups have finished and no member reads. The command
    refuses every other removal, and names group, physical queue and number of messages. After a removal, the command
    also removes the stored number of partitions of a cohort without live members.
    """
    old, new = _queues(name, before, after, names)
    if new.partitions >= old.partitions:
        raise Misuse(
            f"has --from {before} --to {after}, but --to must be smaller; to add partitions, use `lanes queue grow`"
        )
    removed = old.names[new.partitions :]

    def read(broker: QueueBroker, earlier: Survey) -> tuple[Survey, Sequence[str], Runbook]:
        found = broker.survey(old.names, groups)
        wanted, arrived = groups or found.groups, broker.arrived(earlier, found)
        return found, wanted, shrink_steps(old, new, found.facts, wanted, arrived, found.stored)

    def act(broker: QueueBroker) -> tuple[Runbook, list[str], list[str]]:
        done: list[str] = []
        first = broker.survey(old.names, groups)
        sleep(_ARRIVALS)
        found, wanted, runbook = read(broker, first)
        refused = refused_removals(runbook, removed, found.facts) if apply else []
        wider = _wider(broker, old, names, wanted)
        if apply and not refused and not wider:
            if runbook.remove:
                done += broker.remove(runbook.remove)
            done += broker.forget(wanted, new.partitions)
            *_, runbook = read(broker, found)
        return runbook._replace(faults=(*runbook.faults, *wider)), done, refused

    runbook, done, refused = _asked(where, old, act)
    faults = [*runbook.faults, *(f"not removed: {each}" for each in refused)]
    _conclude(runbook, done, faults, names, as_json=as_json)


@queue.command()
def status(
    name: Queue,
    partitions: Annotated[
        int | None, typer.Option(help="Number of partitions of the queue.", metavar="NUMBER", show_default=False)
    ] = None,
    names: PhysicalNames = [],  # noqa: B006
    where: Where = Where(),  # noqa: B008
    as_json: AsJson = False,
) -> None:
    """Show topics or subjects of a queue, with lag and members.

    Exit status: 0 = all of them exist and no message is stranded, 3 = otherwise. A stranded message is stored in a
    physical queue of a larger number, and its group does not read that queue. With --partition, the command reads the
    named physical queues only, because a queue with explicit names has no computed names.
    """
    shown = queue_of(name, partitions, "--partitions", names)

    def ask(broker: QueueBroker) -> tuple[str, Sequence[str], Survey]:
        beyond = _beyond(broker, shown, names)
        return broker.noun, beyond, broker.survey((*shown.names, *beyond))

    noun, beyond, found = _asked(where, shown, ask)
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
            "partitions": shown.partitions,
            f"{noun}s": {each: fact._asdict() for each, fact in facts.items()},
            "missing": missing,
            "stranded": [{noun: each, "group": group, "messages": n} for (each, group), n in stranded.items()]
            + [{noun: each, "group": None, "messages": number} for each, number in unclaimed.items()],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(noun, "partitions", "messages", "group", "not finished", "members", rows=_rows(facts))
        for (each, group), number in stranded.items():
            typer.echo(f"stranded: {number} messages in {each!a}, which group {group!a} does not read")
        for each, number in unclaimed.items():
            typer.echo(f"stranded: {number} messages in {each!a}, in which no group has a position")
        if names:
            typer.echo(_NAMED_ONLY)
    raise typer.Exit(EXIT_UNUSABLE if missing or stranded or unclaimed else 0)


def _queues(name: str, before: int, after: int, names: Sequence[str]) -> tuple[PartitionedQueue, PartitionedQueue]:
    if names and len(names) > max(before, after):
        raise Misuse(
            f"names {len(names)} partitions by --partition, but has only --from {before} --to {after}; name each "
            "partition of the larger number once"
        )
    return queue_of(name, before, "--from", names, part=True), queue_of(name, after, "--to", names, part=True)


def _beyond(broker: QueueBroker, queue: PartitionedQueue, names: Sequence[str]) -> Sequence[str]:
    """Return the physical queues of a larger number, or none if ``--partition`` gives explicit ``names``.

    A queue with explicit names has no computed names: ``orders__p1`` may then belong to another queue.
    """
    return () if names else names_beyond(queue, broker.names())


def _wider(broker: QueueBroker, queue: PartitionedQueue, names: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the faults of groups that read more physical queues than the command was told."""
    beyond = _beyond(broker, queue, names)
    return wider_readers(queue, broker.survey(beyond, groups).facts, groups) if beyond and groups else []


def _asked(where: Where, queue: PartitionedQueue, ask: Callable[[QueueBroker], T]) -> T:
    """Call ``ask`` with a client of the broker; an error of the broker ends the process."""
    try:
        with closing(where.broker(queue)) as broker, waiting_line(broker.what, where.server):
            return ask(broker)
    except SourceError as error:
        stop(printable(str(error)))


def _conclude(
    runbook: Runbook, done: Sequence[str], faults: Sequence[str], names: Sequence[str], *, as_json: bool
) -> NoReturn:
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
        if names:
            typer.echo(_NAMED_ONLY)
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
    print_table(table)
