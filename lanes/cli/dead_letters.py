"""``lanes dead-letters …``: list, show, replay and drop dead letters."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Final, Literal, NamedTuple

import anyio
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from lanes.cli.dead_letter_places import Where
from lanes.cli.kit import (
    EXIT_UNUSABLE,
    EXIT_USAGE,
    Misuse,
    command_group,
    one_line_errors,
    print_table,
    stop,
    waiting_line,
)
from lanes.cli.origins import Origins
from lanes.cli.views import ROW_HEADINGS, document, fields, payload, row
from lanes.config import Settings
from lanes.core.types import Message
from lanes.dead_letter import error_text, printable
from lanes.dead_letters.box import DeadLetterBox, Disposition, Explaining, StoredDeadLetter, replay
from lanes.errors import ConfigError, MessageError, SourceError
from lanes.handlers import check_handler
from lanes.runtime.consumer_arguments import StartedByImport, import_for_a_function
from lanes.workers.outcomes import counts

_ID: Final = re.compile(r"[0-9a-f]{32}")

_AT_ONCE: Final = 16
"""Maximum number of dead letters that ``list`` keeps in memory with their values."""

_REASON_WIDTH: Final = 30
"""Minimum width of the reasons in a list, in columns of the terminal."""

_LEFT_OUT: Final = ("bytes", "key", "attempts", "dead-lettered")
"""Headings that a list leaves out on a narrow terminal, one after the other. ``show`` has all of them."""

_WIDE: Final = 250
"""Width of a table in columns when stdout is no terminal."""

_LIST_WANTED: Final = re.compile(r"'Message' object is not (iterable|subscriptable)|type 'Message' has no len\(\)")
"""Texts of a ``TypeError`` in a handler of batches that gets one message."""

_ONE_MESSAGE: Final = (
    "needs a handler of one message, but {} takes a list of messages; name a function that passes [message] to "
    "that handler"
)

_ORDER: Final = "dead letters are replayed after later messages of their keys, so the order within a key is not kept"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Queue = Annotated[
    list[str],
    typer.Option(help="Select one log, topic, stream, subject or queue.", metavar="NAME", show_default=False),
]
Partitions = Annotated[int | None, typer.Option(help="Number of partitions of each --queue.", metavar="NUMBER")]
Id = Annotated[str, typer.Argument(help="Id as `list` shows it.", metavar="ID", show_default=False)]
Ids = Annotated[list[str], typer.Argument(help="Ids as `list` shows them.", metavar="ID", show_default=False)]

Work = Callable[[DeadLetterBox], Awaitable[int]]


dead_letters = command_group("List, show, replay and drop dead letters.")


@dead_letters.command("list")
def list_dead_letters(
    where: Where,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of dead letters, the oldest first.", metavar="NUMBER")
    ] = 100,
    queue: Queue = [],  # noqa: B006 (typer copies it)
    partitions: Partitions = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters with their origins and reasons. The list shows no key and no payload.

    A reason is the type and the escaped, shortened text of the handler's exception. The reason of a Nak or Term is its
    text alone. --queue lists all partitions of a partitioned queue, if the consumer registered the queue in its dead
    letters. For other dead letters add --partitions. Without --partitions, a line counts the omitted dead letters of
    NAME__p1, NAME__p2 and so on.
    """
    origins = Origins(queue, partitions)
    _run(where, functools.partial(_list, where=where, limit=limit, origins=origins, as_json=as_json))


@dead_letters.command()
def show(
    id_: Id,
    where: Where,
    with_payload: Annotated[bool, typer.Option("--payload", help="Show subject, key, headers and value too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter."""
    _run(
        where,
        functools.partial(_show, id_=checked([id_])[0], with_payload=with_payload, as_json=as_json),
    )


@dead_letters.command("replay")
def replay_dead_letters(
    where: Where,
    ids: Ids = [],  # noqa: B006 (typer copies it)
    every: Annotated[bool, typer.Option("--all", help="Replay every dead letter, the oldest first.")] = False,
    handler: Annotated[str, typer.Option(help="Handler to run.", metavar="MODULE:FUNCTION", show_default=False)] = "",
    decode: Annotated[
        str, typer.Option(help="Function that makes message.data.", metavar="MODULE:FUNCTION", show_default=False)
    ] = "",
    to_origin: Annotated[
        bool, typer.Option("--to-origin", help="Publish messages again at the end of their log or topic.")
    ] = False,
    new_origin: Annotated[
        bool, typer.Option("--new-origin", help="With --to-origin: accept another log or topic.")
    ] = False,
    queue: Queue = [],  # noqa: B006 (typer copies it)
    partitions: Partitions = None,
    as_json: AsJson = False,
) -> None:
    """Run a handler over dead letters, or publish them again.

    Exit status 0 means that no dead letter of the command is still listed. Exit status 3 means that a replay or the
    broker failed, or that an id is unknown. A dead letter whose replay failed stays listed. The command replays one
    dead letter at a time. A replay does not keep the order within its key, because later messages of the key have
    already run. A second replay of a dead letter does nothing. If the first replay was interrupted between the effect
    and its record, the second replay may repeat the effect. --queue selects as in list. Without --partitions, the
    command replays nothing if it finds dead letters of NAME__p1, NAME__p2 and so on whose consumer registered no queue.
    --to-origin publishes each message to its origin partition, and only at the server of the dead letters. A message of
    another broker, or of a topic, stream or log that was recreated, stays listed. --new-origin publishes such a message
    to the topic, stream or log of the same name.
    """
    if bool(ids) == every:
        raise Misuse("needs either IDs or --all")
    if ids and queue:
        raise Misuse("has IDs and --queue, but --queue selects from --all; leave out the IDs or --queue")
    if to_origin and (handler or decode):
        raise Misuse(
            f"has --to-origin and --{'handler' if handler else 'decode'}, but --to-origin publishes the messages "
            "again and calls no function; leave out one of the two options"
        )
    if new_origin and not to_origin:
        raise Misuse("has --new-origin, which is for --to-origin; add --to-origin, or leave out --new-origin")
    if not to_origin and not handler:
        raise Misuse("needs --handler MODULE:FUNCTION, or --to-origin")
    act = functools.partial(_publish, new_origin=new_origin) if to_origin else _handle(handler, decode)
    origins = Origins(queue, partitions)
    _run(where, functools.partial(_replay, where=where, ids=checked(ids), origins=origins, act=act, as_json=as_json))


@dead_letters.command()
def drop(
    ids: Ids,
    where: Where,
    as_json: AsJson = False,
) -> None:
    """Drop dead letters permanently. Dropping a dead letter again does nothing."""
    _run(where, functools.partial(_drop, ids=checked(ids), as_json=as_json))


def _run(where: Where, work: Work) -> None:
    """Call ``work`` with an open box, and exit with the returned status. Print an error of ``lanes`` as one line."""

    async def job() -> int:
        async with _opened(where) as box:
            return await work(box)

    with one_line_errors("interrupted; the dead letters that are shown as done need no repetition"):
        status = anyio.run(job)
    raise typer.Exit(status)


@asynccontextmanager
async def _opened(where: Where) -> AsyncIterator[DeadLetterBox]:
    box = where.box()
    with waiting_line(f"the {where.broker}", where.server):
        await box.open()
    try:
        yield box
        if box.other_messages:
            _note(f"{box.other_messages} other messages are not dead letters, and stay unchanged")
    finally:
        await box.aclose()


async def _selected(box: DeadLetterBox, ids: Sequence[str], origins: Origins) -> AsyncGenerator[StoredDeadLetter, None]:
    """Read dead letters, a few at a time, and yield those of the origins."""
    for start in range(0, len(ids), _AT_ONCE):
        wanted = ids[start : start + _AT_ONCE]
        found = await box.find(wanted)
        for one in map(found.get, wanted):
            if isinstance(one, StoredDeadLetter) and origins.has(one.dead_letter):
                yield one


async def _list(box: DeadLetterBox, where: Where, limit: int, origins: Origins, as_json: bool) -> int:
    # One more id than the limit shows whether there are more. With origins, only the content of a dead letter shows
    # whether it counts.
    ids = await box.ids(None if origins else limit + 1)
    shown: list[Any] = []
    more = not origins and len(ids) > limit
    async with aclosing(_selected(box, ids if origins else ids[:limit], origins)) as selected:
        async for one in selected:
            if len(shown) == limit:
                more = True
                break
            shown.append((document if as_json else row)(one))
    if as_json:
        for one in shown:
            typer.echo(json.dumps(one))
    elif shown:
        print_table(_table(shown), width=_width())
    else:
        _note(await _none(box, where, origins, ids))
    if more:
        _note(f"there are more than {limit} dead letters; use --limit to show more")
    if origins.others:
        _note(origins.left_out())
    return 0


async def _none(box: DeadLetterBox, where: Where, origins: Origins, ids: Sequence[str]) -> str:
    """Return the line about a selection without dead letters; ``ids`` = all ids of the box."""
    if origins and ids:
        return f"{where}: no dead letters of {origins}"
    return f"{where}: no dead letters{await box.why_empty() if isinstance(box, Explaining) else ''}"


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """Return a list as a table. A narrow terminal folds origins and reasons, and cuts no id."""
    columns = dict(zip(ROW_HEADINGS, zip(*rows, strict=True), strict=True))
    widths = {heading: max(map(cell_len, (heading, *cells))) + 2 for heading, cells in columns.items()}
    widths["reason"] = min(widths["reason"], _REASON_WIDTH)
    for heading in _LEFT_OUT:
        if sum(widths[each] for each in columns) > Console(width=_width()).width:
            del columns[heading]
    table = Table(box=None)
    for heading in columns:
        table.add_column(heading, no_wrap=heading not in ("origin", "reason"), overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


async def _show(box: DeadLetterBox, id_: str, with_payload: bool, as_json: bool) -> int:
    found = (await box.find([id_])).get(id_)
    if not isinstance(found, StoredDeadLetter):
        result = _elsewhere(box, found)
        _note(f"{id_}: {result.said}")
        return 0 if result.done else EXIT_UNUSABLE
    if as_json:
        typer.echo(json.dumps(document(found, with_payload=with_payload)))
        return 0
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in fields(found, with_payload=with_payload):
        table.add_row(name, text)
    print_table(table, width=_width())
    if with_payload:
        typer.echo(payload(found.dead_letter))
    return 0


Act = Callable[[DeadLetterBox, StoredDeadLetter], Awaitable[str]]
"""Function that replays a dead letter, and returns the text for the user or raises the error of the replay."""


async def _publish(box: DeadLetterBox, stored: StoredDeadLetter, *, new_origin: bool) -> str:
    if new_origin:
        stored = dataclasses.replace(stored, dead_letter=dataclasses.replace(stored.dead_letter, incarnation=""))
    return f"replayed: the message is now {await box.publish(stored)}"


def _handle(handler: str, decode: str) -> Act:
    run = _loaded("--handler", handler)
    read = _loaded("--decode", decode) if decode else None
    _check_handler(handler, run, read)

    async def act(box: DeadLetterBox, stored: StoredDeadLetter) -> str:
        try:
            await replay(stored.dead_letter, run, read)
        except AttributeError as error:
            if read is None and error.name == "data" and isinstance(error.obj, Message):
                # Every dead letter would fail in this way.
                raise Misuse(f"needs --decode MODULE:FUNCTION, because {handler} reads message.data") from error
            raise
        except TypeError as error:
            if _LIST_WANTED.search(str(error)):
                raise Misuse(_ONE_MESSAGE.format(handler)) from error
            raise
        return "replayed"

    return act


def _check_handler(name: str, handler: Callable[..., object], decode: Callable[..., object] | None) -> None:
    """End the process before the connection to the broker if the handler does not accept one message."""
    try:
        check_handler(handler, None, Settings())
    except ConfigError as error:
        try:
            check_handler(handler, None, Settings(batch=1))
        except ConfigError:
            stop(f"--handler {name!a}: {printable(str(error))}")
        raise Misuse(_ONE_MESSAGE.format(name)) from None
    try:
        check_handler(handler, decode, Settings())
    except ConfigError as error:
        stop(f"--decode: {printable(_of_the_option(str(error)))}")


def _of_the_option(text: str) -> str:
    """Return the text of an error about ``decode=`` in the words of the command line."""
    # The option names a function of a module, and cannot have a lambda.
    text = text.replace("write decode=lambda message: ", "name a function of your own that returns ")
    return text.replace("correct decode=…", "correct --decode")


class _Result(NamedTuple):
    """The result for one dead letter; ``done`` = the command reached its goal, ``said`` = text for the user."""

    state: Literal["replayed", "dropped", "stays", "gone", "unknown"]
    done: bool
    said: str


async def _replay(
    box: DeadLetterBox, where: Where, ids: Sequence[str], origins: Origins, act: Act, as_json: bool
) -> int:
    found = ids or await box.ids()
    wanted: Sequence[str] = found
    if origins:
        wanted = [one.dead_letter.id async for one in _selected(box, wanted, origins)]
        origins.check()
    if not wanted:
        _note(await _none(box, where, origins, found))
        if origins.others:
            _note(origins.left_out())
        return 0
    stay = replayed = 0

    async def one(box: DeadLetterBox, stored: StoredDeadLetter) -> _Result:
        nonlocal stay, replayed
        try:
            result = await _replay_one(box, stored, act)
        except _Stays:
            stay += 1
            raise
        if not replayed:
            _note(_ORDER)
        replayed += 1
        return result

    failed = await _each(box, wanted, one, as_json=as_json)
    unknown = f", {failed - stay} not found" if failed > stay else ""
    _note(f"{replayed} replayed, {stay} stay{unknown}")
    if origins.others:
        _note(origins.left_out())
    return EXIT_UNUSABLE if failed else 0


async def _drop(box: DeadLetterBox, ids: Sequence[str], as_json: bool) -> int:
    failed = await _each(box, ids, _drop_one, as_json=as_json)
    if failed:
        _note(f"{failed} of {len(ids)} failed")
    return EXIT_UNUSABLE if failed else 0


async def _each(
    box: DeadLetterBox,
    ids: Sequence[str],
    one: Callable[[DeadLetterBox, StoredDeadLetter], Awaitable[_Result]],
    *,
    as_json: bool,
) -> int:
    """Call ``one`` with every dead letter that is not disposed of, print each result, and return how many failed."""
    failed = 0
    for id_ in ids:
        # Find one dead letter at a time, so that a concurrent command is noticed.
        found = (await box.find([id_])).get(id_)
        if isinstance(found, StoredDeadLetter):
            try:
                result = await one(box, found)
            except _Stays as why:
                result = _Result("stays", False, str(why))
        else:
            result = _elsewhere(box, found)
        failed += not result.done
        typer.echo(json.dumps({"id": id_} | result._asdict()) if as_json else printable(f"{id_}: {result.said}"))
    return failed


class _Stays(Exception):
    """Error with the reason, in words for the user, for which a dead letter stays listed."""


async def _replay_one(box: DeadLetterBox, stored: StoredDeadLetter, act: Act) -> _Result:
    dead_letter = stored.dead_letter
    if stored.whole_size is not None:
        size = len(dead_letter.value)
        lost = f"its value was cut to {size} of {stored.whole_size} bytes"
        if size == stored.whole_size:
            lost = "its headers were cut off, because the message was too large"
        raise _Stays(
            f"stays: {lost}; read the message from {dead_letter.source}/{dead_letter.partition} position "
            f"{dead_letter.position}, then drop the dead letter"
        )
    try:
        said = await act(box, stored)
    except BaseException as error:
        if isinstance(error, Misuse) or not counts(error):
            raise
        text = error_text(error)
        if isinstance(error, MessageError) and error.unread:
            text = _of_the_option(text)
        raise _Stays(f"stays: {type(error).__qualname__}: {text}") from error
    await _dispose(box, stored, "replayed")
    return _Result("replayed", True, said)


async def _drop_one(box: DeadLetterBox, stored: StoredDeadLetter) -> _Result:
    await _dispose(box, stored, "dropped")
    return _Result("dropped", True, "dropped")


async def _dispose(box: DeadLetterBox, stored: StoredDeadLetter, how: Disposition) -> None:
    try:
        await box.dispose(stored, how)
    except SourceError as error:
        raise _Stays(
            f"{how}, but still listed, because the broker did not record the change ({error}); drop the dead "
            "letter later"
        ) from error


def _elsewhere(box: DeadLetterBox, found: Disposition | None) -> _Result:
    """Return the result for a dead letter that is not listed; ``found`` None = its disposition is unknown."""
    if found is not None:
        return _Result(found, True, f"already {found}")
    if box.remembers:
        return _Result("unknown", False, "no such dead letter")
    return _Result("gone", True, "not listed: already replayed or dropped, or never here")


def checked(ids: Sequence[str]) -> list[str]:
    """Return the ids, each once. A malformed id ends the process."""
    for id_ in ids:
        if not id_.isascii() or _ID.fullmatch(id_) is None:
            stop(f"ID {id_!a}: must be 32 hex digits, as `lanes dead-letters list` shows them", EXIT_USAGE)
    return list(dict.fromkeys(ids))


def _loaded(option: str, text: str) -> Callable[..., object]:
    """Import the function that an option names. A value that names no function ends the process."""
    module, colon, path = text.partition(":")
    if not module or not colon or not path or module.endswith(".py"):
        stop(f"{option} {text!a}: must be package.module:function, without .py", EXIT_USAGE)
    if "" not in sys.path:
        # A module of the working folder can be named, as with `python -m`.
        sys.path.insert(0, "")
    try:
        with import_for_a_function(module):
            found: object = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except StartedByImport as error:
        stop(f"{option} {text!a}: {printable(str(error))}")
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error_text(error)}")
        stop(f"{option} {text!a}: cannot be imported ({why}); correct it, or set PYTHONPATH")
    if not callable(found):
        stop(f"{option} {text!a}: is a {type(found).__name__}, not a function; name a function")
    return found


def _width() -> int | None:
    """Return the number of characters in a line of a pipe or file; None = the terminal has its own number."""
    return None if sys.stdout.isatty() else _WIDE


def _note(text: str) -> None:
    typer.echo(f"lanes: {printable(text)}", err=True)
