"""Tools that every command shares: a group, choices, extras, and one line on stderr for a mistake."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args

from lanes.cli.misuse import Misuse as Misuse
from lanes.dead_letter import printable
from lanes.errors import ConfigError, LanesError
from lanes.process import EXIT_CLOSED_PIPE as EXIT_CLOSED_PIPE
from lanes.process import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from lanes.process import EXIT_UNUSABLE as EXIT_UNUSABLE
from lanes.process import EXIT_USAGE as EXIT_USAGE

if TYPE_CHECKING:
    import typer
    from rich.table import Table

MODULES: Final = {
    "cli": ("typer", "rich"),
    "jetstream": ("nats",),
    "journal": ("pyarrow",),
    "kafka": ("confluent_kafka",),
    "postgres": ("psycopg",),
    "spark": ("pyspark", "pyarrow"),
}
"""Required modules of each extra."""


_SILENT_FOR: Final = 2.0
"""Seconds without an answer after which a command says that it waits."""

_CLIENT_LOGGERS: Final = ("lanes.jetstream.client", "lanes.kafka.client")
_SILENT: Final = logging.NullHandler()
"""Keeps the lines of the brokers' clients off stderr, because a command prints the cause of a failure as one line.
Handlers of the user's code still get the lines."""


def queue_fault(error: ConfigError, option: str) -> str:
    """Return the text of an error of ``PartitionedQueue`` with option names instead of argument names.

    Args:
        error: The error.
        option: Name of the option that has the number of partitions.

    Returns:
        The text.
    """
    argument, _, fault = str(error).partition("=")
    fault = fault.replace("must be a str that is not empty", "must not be empty")
    if argument in ("name", "logical"):
        return f"QUEUE {fault}"
    return f"--partition {fault}" if argument.startswith("physical_names") else f"{option} {fault}"


def run_commands(make: Callable[[], typer.Typer], program: str, what: str) -> NoReturn:
    """Run the command of the process's arguments, and exit with its status. Print a mistake as one line on stderr."""
    require(what, "cli")
    for name in _CLIENT_LOGGERS:
        logging.getLogger(name).addHandler(_SILENT)
    try:
        status = make()(args=sys.argv[1:] or ["--help"], standalone_mode=False, prog_name=program)
        sys.stdout.flush()
    except BrokenPipeError:
        _end_at_closed_pipe()
    except SystemExit as ended:
        # The parser answers a closed pipe with status 1, as a failure.
        if isinstance(ended.__context__, BrokenPipeError):
            _end_at_closed_pipe()
        raise
    except Exception as error:
        # The class of a parser's error depends on the version of typer; all of them format their message.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        context: Any = getattr(error, "ctx", None)
        command = program if context is None else context.command_path
        missing: Any = getattr(error, "param", None) if type(error).__name__ == "MissingParameter" else None
        if missing is not None:
            stop(f"`{command}` needs {_usage(missing)}; run `{command} --help`", EXIT_USAGE)
        if isinstance(error, Misuse):
            stop(f"`{command}` {error}; run `{command} --help`", EXIT_USAGE)
        text = message().rstrip(".")
        group: Any = getattr(context, "command", None)
        if text.startswith("No such command") and group is not None and "Did you mean" not in text:
            text += f"; `{command}` has {', '.join(sorted(group.list_commands(context)))}"
        if (unknown := getattr(error, "option_name", None)) is not None and context is not None:
            text = f"No such option: {unknown}; `{command}` has {_all_of(context.command, context, str(unknown))}"
        stop(f"{text}; run `{command} --help`", EXIT_USAGE)
    sys.exit(status)


def _end_at_closed_pipe() -> NoReturn:
    """End the process without a line, because the reader of its output has ended."""
    # Otherwise the interpreter writes the rest of the output at its exit, and reports the closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(EXIT_CLOSED_PIPE)


def _all_of(command: Any, context: Any, unknown: str) -> str:
    """Return the options of a command that resemble an unknown option, or all options and arguments."""
    params = command.get_params(context)
    # The parser keeps the names of the help in a set, whose order differs from process to process.
    names = [name for each in params if each.param_type_name == "option" for name in sorted(each.opts)]
    near = difflib.get_close_matches(unknown, names, n=1)
    wanted = [_usage(each) for each in params if each.param_type_name == "argument"]
    return ", ".join(near or [*wanted, *names])


def _usage(param: Any) -> str:
    """Return an option or an argument as the user writes it."""
    name = param.metavar or param.name.upper()
    return f"{param.opts[0]} {name}" if param.param_type_name == "option" else str(name)


def command_group(help: str = "", cls: Any = None) -> typer.Typer:  # noqa: A002 (as typer calls it)
    """Make a group of commands whose help and errors are plain text.

    Args:
        help: Text of the help; "" = the group has no callback.
        cls: Class of the group. ``None`` = the class of ``typer``.

    Returns:
        The group.
    """
    from lanes.cli.group import Group, show_help

    group = Group(
        add_completion=False,
        cls=cls,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110, "help_option_names": ["--help", "-h"]},
    )
    if help:
        # With a callback, a group of one command still needs the name of that command.
        group.callback(help=help, invoke_without_command=True)(show_help)
    return group


def choice(option: str, text: str, kinds: Any) -> Any:
    """Return the text if it is a word of the ``Literal`` ``kinds``; any other text ends the process."""
    words = get_args(kinds)
    if text not in words:
        stop(f"{option} {text!r}: must be {' or '.join(words)}", EXIT_USAGE)
    return text


def require(what: str, *extras: str) -> None:
    """End the process unless the modules of these extras are importable."""
    missing = [module for extra in extras for module in MODULES.get(extra, ()) if find_spec(module) is None]
    if missing:
        names = ",".join(extras)
        stop(f"{what} needs {' and '.join(missing)}: pip install '.[{names}]' in the checkout of lanes")


@contextmanager
def waiting_line(what: str, address: str = "") -> Iterator[None]:
    """Print one line on stderr if the block takes longer than 2 s, so that a command does not seem to hang.

    Args:
        what: Words for the server that has not answered.
        address: Address or URL of the server, shown without its login; "" = unknown.
    """
    # A password may hold any character, so only the text after the last @ is shown.
    shown = address.rpartition("@")[2]
    line = f"lanes: waiting for {what}{f' at {printable(shown)}' if shown else ''}"
    timer = threading.Timer(_SILENT_FOR, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def print_table(*printed: Table | str, width: int | None = None) -> None:
    """Print tables and texts. In a pipe or a file, no line ends with the blanks that fill the last column.

    Args:
        *printed: Tables and texts to print, in this order. The function prints cells and texts unchanged.
        width: Number of characters in a line; None = the width of the terminal.
    """
    import typer
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False, width=width)
    for each in printed:
        if console.is_terminal:
            console.print(each)
            continue
        with console.capture() as drawn:
            console.print(each)
        typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()))


@contextmanager
def one_line_errors(interrupted: str = "interrupted") -> Iterator[None]:
    """End the process with one line on stderr after an error of ``lanes`` or an interruption."""
    try:
        yield
    except LanesError as error:
        stop(printable(str(error)))
    except KeyboardInterrupt:
        stop(interrupted, EXIT_INTERRUPTED)


@contextmanager
def option_values(prefix: str = "", options: Mapping[str, str] | None = None) -> Iterator[None]:
    """End the process with ``EXIT_USAGE`` and one line on stderr after a ``ConfigError`` that names an option.

    The block makes an object from options and files, and asks no server. Every other ``ConfigError`` passes.

    Args:
        prefix: Text before the text of each error.
        options: Beginnings of errors about an option, and the texts with the option's name that replace them.
    """
    try:
        yield
    except ConfigError as error:
        text = f"{prefix}{error}"
        named = [beginning for beginning in options or () if text.startswith(beginning)]
        if options and named:
            text = f"{options[named[0]]}{text.removeprefix(named[0])}"
        elif not text.startswith(("--", "-X")):
            raise
        stop(printable(text), EXIT_USAGE)


def stop(text: str, status: int = EXIT_UNUSABLE) -> NoReturn:
    """End the process with one line on stderr."""
    print(f"lanes: {text}", file=sys.stderr, flush=True)
    sys.exit(status)
