"""Tools that every command shares: a group, choices, extras, and one line on stderr for a mistake."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args

from lanes.cli.misuse import Misuse as Misuse
from lanes.process import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from lanes.process import EXIT_UNUSABLE as EXIT_UNUSABLE
from lanes.process import EXIT_USAGE as EXIT_USAGE

if TYPE_CHECKING:
    import typer

MODULES: Final = {
    "cli": ("typer", "rich"),
    "jetstream": ("nats",),
    "journal": ("pyarrow",),
    "kafka": ("confluent_kafka",),
    "postgres": ("psycopg",),
    "spark": ("pyspark", "pyarrow"),
}
"""Required modules of each extra."""


_CLIENT_LOGGERS: Final = ("lanes.jetstream.client", "lanes.kafka.client")
_SILENT: Final = logging.NullHandler()
"""Keeps the lines of the brokers' clients off stderr, because a command prints the cause of a failure as one line.
Handlers of the user's code still get the lines."""


def run_commands(make: Callable[[], typer.Typer], program: str, what: str) -> NoReturn:
    """Run the command of the process's arguments, and exit with its status. Print a mistake as one line on stderr."""
    require(what, "cli")
    for name in _CLIENT_LOGGERS:
        logging.getLogger(name).addHandler(_SILENT)
    try:
        status = make()(args=sys.argv[1:] or ["--help"], standalone_mode=False, prog_name=program)
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
        stop(f"{message().rstrip('.')}; run `{command} --help`", EXIT_USAGE)
    sys.exit(status)


def _usage(param: Any) -> str:
    """Return an option or an argument as the user writes it."""
    name = param.metavar or param.name.upper()
    return f"{param.opts[0]} {name}" if param.param_type_name == "option" else str(name)


def command_group(help: str = "") -> typer.Typer:  # noqa: A002 (as typer calls it)
    """Make a group of commands whose help and errors are plain text."""
    from lanes.cli.group import Group

    group = Group(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110},
    )
    if help:
        # With a callback, a group of one command still needs the name of that command.
        group.callback(help=help)(_no_options)
    return group


def _no_options() -> None:
    pass


def choice(option: str, text: str, kinds: Any) -> Any:
    """Return the text if it is a word of the ``Literal`` ``kinds``; any other text ends the process."""
    words = get_args(kinds)
    if text not in words:
        stop(f"{option} {text!r}: must be {' or '.join(words)}")
    return text


def require(what: str, *extras: str) -> None:
    """End the process unless the modules of these extras can be imported."""
    missing = [module for extra in extras for module in MODULES.get(extra, ()) if find_spec(module) is None]
    if missing:
        stop(f"{what} needs {' and '.join(missing)}: pip install 'lanes-runtime[{','.join(extras)}]'")


def stop(text: str, status: int = EXIT_UNUSABLE) -> NoReturn:
    """End the process with one line on stderr."""
    print(f"lanes: {text}", file=sys.stderr, flush=True)
    sys.exit(status)
