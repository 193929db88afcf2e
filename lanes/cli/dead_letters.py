"""``lanes dead-letters …``: list, show, replay and drop what was parked.

An adapter registers its box in the entry-point group ``lanes.dead_letter_boxes``. ``kafka`` is called with topic,
server, configuration file and settings; ``jetstream`` is called with server and subject.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import anyio
import typer
from rich.console import Console
from rich.table import Table

from lanes.cli.kit import EXIT_INTERRUPTED, EXIT_UNUSABLE, EXIT_USAGE, command_group, require, stop
from lanes.cli.views import document, fields, payload, printable, row, row_headings
from lanes.dead_letter import error_text
from lanes.dead_letters.box import DeadLetterBox, Disposition, StoredDeadLetter, replay
from lanes.errors import LanesError, SourceError
from lanes.workers.outcomes import counts

_ID: Final = re.compile(r"[0-9a-f]{32}")
_AT_ONCE: Final = 16
"""Letters that are in memory at once."""

_WIDE: Final = 200
"""Columns of a table that no terminal shows."""

_ORDER: Final = "they come behind later messages of their keys: order against those is not claimed"

Topic = Annotated[str, typer.Option(help="Kafka: the topic of the dead letters.", metavar="NAME", show_default=False)]
Config = Annotated[
    Path | None,
    typer.Option(help="Kafka: the client's settings: name=value lines, or .json, or .toml.", metavar="FILE"),
]
Setting = Annotated[
    list[str],
    typer.Option("-X", help="Kafka: a setting that wins over the file's.", metavar="NAME=VALUE", show_default=False),
]
Subject = Annotated[
    str, typer.Option(help="JetStream: the subject of the dead letters.", metavar="NAME", show_default=False)
]
Server = Annotated[
    str, typer.Option(help="JetStream: the server's URL; Kafka: host:port.", metavar="URL", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Id = Annotated[str, typer.Argument(help="As `list` shows it.", metavar="ID", show_default=False)]
Ids = Annotated[list[str], typer.Argument(help="As `list` shows them.", metavar="ID", show_default=False)]

Work = Callable[[DeadLetterBox], Awaitable[int]]


class Where(NamedTuple):
    """Which letters: a topic of Kafka, or a subject of JetStream."""

    topic: str
    config: Path | None
    settings: list[str]
    subject: str
    server: str

    def __str__(self) -> str:
        return printable(self.topic or self.subject)

    def box(self) -> DeadLetterBox:
        """The box of these letters, not open. Raises ``ConfigError``; ends the process where an extra is missing."""
        if bool(self.topic) == bool(self.subject):
            stop("`lanes dead-letters` needs --topic (Kafka) or --subject (JetStream), one of the two", EXIT_USAGE)
        if self.subject:
            if self.config is not None or self.settings or not self.server:
                stop("--subject (JetStream) needs --server URL, and takes neither --config nor -X", EXIT_USAGE)
            return _make_box("jetstream", "--subject", self.server, self.subject)
        return _make_box("kafka", "--topic", self.topic, self.server, self.config, self.settings)


def _make_box(broker: str, option: str, *arguments: object) -> DeadLetterBox:
    """Make the box that an adapter registers in the entry-point group ``lanes.dead_letter_boxes``."""
    (point,) = entry_points(group="lanes.dead_letter_boxes", name=broker)
    require(f"`lanes dead-letters {option}`", *point.extras)
    box: DeadLetterBox = point.load()(*arguments)
    return box


dead_letters = command_group("List, show, replay and drop dead letters.")


@dead_letters.command("list")
def list_letters(
    topic: Topic = "",
    config: Config = None,
    settings: Setting = [],  # noqa: B006 (typer copies it)
    subject: Subject = "",
    server: Server = "",
    limit: Annotated[int, typer.Option(min=1, help="Only so many, the oldest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List what is parked: where it came from and why. Shows no key and no payload."""
    where = Where(topic, config, settings, subject, server)
    _run(where, functools.partial(_list, where=where, limit=limit, as_json=as_json))


@dead_letters.command()
def show(
    letter: Id,
    topic: Topic = "",
    config: Config = None,
    settings: Setting = [],  # noqa: B006 (typer copies it)
    subject: Subject = "",
    server: Server = "",
    with_payload: Annotated[bool, typer.Option("--payload", help="Show subject, key, headers and value too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one letter."""
    _run(
        Where(topic, config, settings, subject, server),
        functools.partial(_show, letter=checked([letter])[0], with_payload=with_payload, as_json=as_json),
    )


@dead_letters.command("replay")
def replay_letters(
    letters: Ids = [],  # noqa: B006 (typer copies it)
    topic: Topic = "",
    config: Config = None,
    settings: Setting = [],  # noqa: B006 (typer copies it)
    subject: Subject = "",
    server: Server = "",
    every: Annotated[bool, typer.Option("--all", help="All that is parked, the oldest first.")] = False,
    handler: Annotated[
        str, typer.Option(help="The handler to run, as package.module:function.", show_default=False)
    ] = "",
    decode: Annotated[
        str, typer.Option(help="What makes message.data, as package.module:function.", show_default=False)
    ] = "",
    to_origin: Annotated[
        bool, typer.Option("--to-origin", help="Publish them where they came from, at the end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run your handler over letters, or publish them again. What succeeds is listed no more.

    Exit 0 all done, now or before; 3 some failed and stay. Letters are replayed one at a time, behind later
    messages of their keys: order against those is not claimed. Replaying one twice does nothing the second time,
    but for what is interrupted between the effect and its mark.
    """
    if bool(letters) == every:
        stop("`lanes dead-letters replay` needs IDs, or --all, one of the two", EXIT_USAGE)
    if bool(handler) == to_origin or (decode and to_origin):
        stop("`lanes dead-letters replay` needs --handler, or --to-origin without --decode", EXIT_USAGE)
    ids = checked(letters)
    act = _publish if to_origin else _handle(handler, decode)
    where = Where(topic, config, settings, subject, server)
    _run(where, functools.partial(_replay, ids=ids, act=act, as_json=as_json))


@dead_letters.command()
def drop(
    letters: Ids,
    topic: Topic = "",
    config: Config = None,
    settings: Setting = [],  # noqa: B006 (typer copies it)
    subject: Subject = "",
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Give letters up: they are listed no more. Dropping one twice does nothing the second time."""
    where = Where(topic, config, settings, subject, server)
    _run(where, functools.partial(_drop, ids=checked(letters), as_json=as_json))


def _run(where: Where, work: Work) -> None:
    """Do it with the open box, and end with its status; an error of ``lanes`` is one line."""

    async def job() -> int:
        async with _opened(where.box()) as box:
            return await work(box)

    try:
        status = anyio.run(job)
    except LanesError as error:
        stop(printable(str(error)))
    except KeyboardInterrupt:
        stop("interrupted: what was said to be done is done", EXIT_INTERRUPTED)
    raise typer.Exit(status)


@asynccontextmanager
async def _opened(box: DeadLetterBox) -> AsyncIterator[DeadLetterBox]:
    await box.open()
    try:
        yield box
        if box.other_messages:
            _note(f"{box.other_messages} messages there are no dead letters, and are left alone")
    finally:
        await box.aclose()


async def _list(box: DeadLetterBox, where: Where, limit: int, as_json: bool) -> int:
    # One more than is shown says that there are more.
    ids = await box.ids(limit + 1)
    shown: list[Any] = []
    for start in range(0, min(limit, len(ids)), _AT_ONCE):
        wanted = ids[start : min(start + _AT_ONCE, limit)]
        found = await box.find(wanted)
        parked = [letter for letter in map(found.get, wanted) if isinstance(letter, StoredDeadLetter)]
        shown += map(document if as_json else row, parked)
    if as_json:
        for one in shown:
            typer.echo(json.dumps(one))
    elif shown:
        table = Table(box=None)
        for heading in row_headings():
            table.add_column(heading, no_wrap=True)
        for one in shown:
            table.add_row(*one)
        _console().print(table)
    else:
        _note(f"{where}: no dead letters")
    if len(ids) > limit:
        _note(f"there are more than {limit}: --limit shows more of them")
    return 0


async def _show(box: DeadLetterBox, letter: str, with_payload: bool, as_json: bool) -> int:
    found = (await box.find([letter])).get(letter)
    if not isinstance(found, StoredDeadLetter):
        became = _elsewhere(box, found)
        _note(f"{letter}: {became.said}")
        return 0 if became.done else EXIT_UNUSABLE
    if as_json:
        typer.echo(json.dumps(document(found, with_payload=with_payload)))
        return 0
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in fields(found, with_payload=with_payload):
        table.add_row(name, text)
    _console().print(table)
    if with_payload:
        typer.echo(payload(found.dead_letter))
    return 0


Act = Callable[[DeadLetterBox, StoredDeadLetter], Awaitable[str]]
"""What is done with a letter; returns what is to be said of it. Raises what it fails with."""


async def _publish(box: DeadLetterBox, parked: StoredDeadLetter) -> str:
    return f"replayed: it is {await box.publish(parked)} now"


def _handle(handler: str, decode: str) -> Act:
    run = _loaded("--handler", handler)
    read = _loaded("--decode", decode) if decode else None

    async def act(box: DeadLetterBox, parked: StoredDeadLetter) -> str:
        await replay(parked.dead_letter, run, read)
        return "replayed"

    return act


class _Became(NamedTuple):
    """What became of a letter. ``done``: what was asked for, now or before; ``said``: the same for people."""

    state: Literal["replayed", "dropped", "stays", "gone", "unknown"]
    done: bool
    said: str


async def _replay(box: DeadLetterBox, ids: Sequence[str], act: Act, as_json: bool) -> int:
    wanted = ids or await box.ids()
    _note(_ORDER)
    return await _each(box, wanted, functools.partial(_replay_one, act=act), as_json=as_json)


async def _drop(box: DeadLetterBox, ids: Sequence[str], as_json: bool) -> int:
    return await _each(box, ids, _drop_one, as_json=as_json)


async def _each(
    box: DeadLetterBox,
    ids: Sequence[str],
    one: Callable[[DeadLetterBox, StoredDeadLetter], Awaitable[_Became]],
    *,
    as_json: bool,
) -> int:
    """Do it to every letter that is parked, say what became of each, and return the status."""
    failed = 0
    for letter in ids:
        # One at a time, so that what somebody else does meanwhile is seen.
        found = (await box.find([letter])).get(letter)
        if isinstance(found, StoredDeadLetter):
            try:
                became = await one(box, found)
            except _Stays as why:
                became = _Became("stays", False, str(why))
        else:
            became = _elsewhere(box, found)
        failed += not became.done
        typer.echo(json.dumps({"id": letter} | became._asdict()) if as_json else printable(f"{letter}: {became.said}"))
    if failed:
        _note(f"{failed} of {len(ids)} failed")
    return EXIT_UNUSABLE if failed else 0


class _Stays(Exception):
    """A letter stays parked, or may be replayed again."""


async def _replay_one(box: DeadLetterBox, parked: StoredDeadLetter, act: Act) -> _Became:
    letter = parked.dead_letter
    if parked.whole_size is not None:
        raise _Stays(
            f"stays: it was cut to {len(letter.value)} of {parked.whole_size} bytes; take the whole message "
            f"from {letter.source}/{letter.partition} position {letter.position}, then drop the letter"
        )
    try:
        said = await act(box, parked)
    except BaseException as error:
        if not counts(error):
            raise
        raise _Stays(f"stays: {type(error).__qualname__}: {error_text(error)}") from error
    await _dispose(box, parked, "replayed")
    return _Became("replayed", True, said)


async def _drop_one(box: DeadLetterBox, parked: StoredDeadLetter) -> _Became:
    await _dispose(box, parked, "dropped")
    return _Became("dropped", True, "dropped")


async def _dispose(box: DeadLetterBox, parked: StoredDeadLetter, how: Disposition) -> None:
    try:
        await box.dispose(parked, how)
    except SourceError as error:
        raise _Stays(
            f"{how}, but that could not be written down, so it is listed still ({error}): drop it when that is mended"
        ) from error


def _elsewhere(box: DeadLetterBox, found: Disposition | None) -> _Became:
    """What has become of a letter that is not parked."""
    if found is not None:
        return _Became(found, True, f"already {found}")
    if box.remembers:
        return _Became("unknown", False, "there is no such dead letter")
    return _Became("gone", True, "not there: already replayed or dropped, or never here")


def checked(ids: Sequence[str]) -> list[str]:
    """Ids as they are written, each once; anything else ends the process with one line."""
    for letter in ids:
        if not letter.isascii() or _ID.fullmatch(letter) is None:
            stop(f"ID {letter!a}: must be 32 hex digits, as `lanes dead-letters list` shows them")
    return list(dict.fromkeys(ids))


def _loaded(option: str, text: str) -> Callable[..., object]:
    """The function that an option names; anything else ends the process with one line."""
    module, colon, path = text.partition(":")
    if not module or not colon or not path or module.endswith(".py"):
        stop(f"{option} {text!a}: must be package.module:function, without .py")
    if "" not in sys.path:
        # As `python -m` has it: what is in the working folder can be named.
        sys.path.insert(0, "")
    try:
        found: object = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error_text(error)}")
        stop(f"{option} {text!a}: cannot be imported ({why}): correct it, or set PYTHONPATH")
    if not callable(found):
        stop(f"{option} {text!a}: is no function but a {type(found).__name__}: name a function")
    return found


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def _note(text: str) -> None:
    typer.echo(f"lanes: {printable(text)}", err=True)
