"""The commands for JetStream.

``lanes cohort`` shows and drains members, and ``lanes doctor jetstream`` checks a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Final

import anyio
import typer
from rich.table import Table

from lanes.cli.doctor import conclude
from lanes.cli.kit import Misuse, command_group, one_line_errors, option_values, print_table, waiting_line
from lanes.cli.views import moment
from lanes.dead_letter import printable
from lanes.errors import ConfigError
from lanes_jetstream.cohort.settings import Cohort
from lanes_jetstream.cohort.view import CohortStatus, CohortView, MemberView, read_namespaces
from lanes_jetstream.dead_letters.writer import dead_letter_subject
from lanes_jetstream.doctor import examine
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.stream import check_name, read_stream, similar_stream

_WIDE: Final = 200
"""Width of the output in characters, if the output is not a terminal."""

Stream = Annotated[str, typer.Option(help="Stream of the cohort.", metavar="NAME", show_default=False)]
Member = Annotated[
    str, typer.Argument(help="Name of the member, as `status` shows it.", metavar="MEMBER", show_default=False)
]
Server = Annotated[str, typer.Option(help="URL of a NATS server.", metavar="URL", show_default=False)]
Namespace = Annotated[
    str, typer.Option(help="Namespace of the cohort.", metavar="NAME", show_default="the only namespace of the stream")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Work = Callable[[CohortView], Awaitable[None]]


def doctor(
    server: Server,
    stream: Annotated[str, typer.Option(help="Check this stream.", metavar="NAME", show_default=False)] = "",
    durable: Annotated[
        str, typer.Option(help="Check this durable of the stream.", metavar="NAME", show_default=False)
    ] = "",
    dead_letters: Annotated[
        str, typer.Option(help="Check this subject for dead letters.", metavar="SUBJECT", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a NATS server, a stream and a durable.

    Exit status: 0 = usable, 3 = a check failed. The command changes nothing at the server. Other users can see the
    arguments of a process, so put a password into a credentials file of your program.
    """
    if durable and not stream:
        raise Misuse("has --durable and no --stream; name the stream of the durable")
    with option_values("--"):
        Connection(server)
    with option_values("--dead-letters: "):
        if dead_letters:
            dead_letter_subject(dead_letters)
    with waiting_line("the NATS server", server):
        checks = anyio.run(examine, server, stream, durable, dead_letters, backend="asyncio")
    conclude(checks, as_json=as_json, facts={"stream": stream or None, "durable": durable or None})


cohort = command_group("Show a JetStream cohort, and drain or undrain a member.")


@cohort.command()
def status(stream: Stream, server: Server, namespace: Namespace = "", as_json: AsJson = False) -> None:
    """Show members, partitions, epochs, lag and the oldest message."""

    async def work(view: CohortView) -> None:
        found = await view.status()
        if as_json:
            typer.echo(json.dumps({**asdict(found), "lag": found.lag, "oldest": found.oldest}))
        else:
            _show(found)

    _run(server, stream, namespace, work)


@cohort.command()
def drain(member: Member, stream: Stream, server: Server, namespace: Namespace = "") -> None:
    """Move all partitions of a member to the other members.

    The drain ends with `undrain`, or when the member leaves the cohort without a crash. If a member crashes and returns
    under its name, its drain continues. A second drain has no effect.
    """

    async def work(view: CohortView) -> None:
        new = await view.drain(member)
        typer.echo(printable(f"{member}: {'is drained' if new else 'is drained already'}"))

    _run(server, stream, namespace, work)


@cohort.command()
def undrain(member: Member, stream: Stream, server: Server, namespace: Namespace = "") -> None:
    """Withdraw a drain, so the member gets partitions again."""

    async def work(view: CohortView) -> None:
        new = await view.undrain(member)
        typer.echo(printable(f"{member}: {'is not drained any more' if new else 'was not drained'}"))

    _run(server, stream, namespace, work)


def _run(server: str, stream: str, namespace: str, work: Work) -> None:
    """Run ``work`` on the cohort. Report an error of ``lanes`` as one line."""

    async def job() -> None:
        with option_values("--"):
            check_name("stream", stream)
            if namespace:
                Cohort(namespace=namespace)
            connection = Connection(server)
        with waiting_line("the NATS server", server):
            await connection.open()
        try:
            name = namespace or await _only_one(connection, stream)
            view = CohortView(connection, stream, name)
            await view.check()
            await work(view)
        finally:
            await connection.close()

    with one_line_errors():
        anyio.run(job, backend="asyncio")


async def _only_one(connection: Connection, stream: str) -> str:
    found = await read_namespaces(connection, stream)
    if not found:
        # The call raises an error if the stream does not exist.
        await read_stream(connection, stream, option="--stream")
        raise ConfigError(
            f"stream {stream!a} has no cohort; start a member, or correct --stream and "
            f"--server{await similar_stream(connection, stream)}"
        )
    if len(found) != 1:
        raise ConfigError(f"stream {stream!a} has several cohorts; select one by --namespace: {', '.join(found)}")
    return found[0]


def _show(status: CohortStatus) -> None:
    head = (
        f"cohort {status.cohort} in namespace {status.namespace} of stream {status.stream}, generation "
        f"{status.generation}: lag {status.lag:,}, oldest unfinished {_age(status.oldest)}"
    )
    if status.too_few_members:
        live = sum(member.live and not member.draining for member in status.members)
        head += f". TOO FEW MEMBERS: {live} of {status.active_members}"
    if status.under_provisioned:
        over = sum(each.consumer_target is not None and each.planned > each.consumer_target for each in status.members)
        head += f". UNDER-PROVISIONED: {over} member(s) above the target"
    members = Table("member", "state", box=None)
    for heading in ("partitions", "planned", "target", "weight"):
        members.add_column(heading, justify="right")
    members.add_column("since")
    for one in status.members:
        since = "-" if one.since is None else moment(one.since)
        target, weight = ("-" if number is None else str(number) for number in (one.consumer_target, one.weight))
        members.add_row(printable(one.name), _state(one), str(one.partitions), str(one.planned), target, weight, since)
    partitions = Table("partition", "owner", "planned", box=None)
    for heading in ("epoch", "lag", "oldest unfinished"):
        partitions.add_column(heading, justify="right")
    for each in status.partitions:
        partitions.add_row(
            str(each.number),
            printable(each.owner or "-"),
            printable(each.planned or "-"),
            "-" if each.epoch is None else str(each.epoch),
            "-" if each.lag is None else f"{each.lag:,}",
            _age(each.oldest),
        )
    print_table(printable(head), members, partitions, width=None if sys.stdout.isatty() else _WIDE)


def _state(member: MemberView) -> str:
    if not member.live:
        return "gone, to be drained" if member.draining else "gone"
    return "draining" if member.draining else "standby" if member.standby else "active"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
