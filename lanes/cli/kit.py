"""Tools that every command shares: a group, options with units, and one line on stderr for a mistake."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args

from lanes.process import EXIT_INTERRUPTED, EXIT_UNUSABLE, EXIT_USAGE

if TYPE_CHECKING:
    import typer

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_UNUSABLE",
    "EXIT_USAGE",
    "choice",
    "command_group",
    "fractions",
    "require",
    "seconds",
    "stop",
]

MODULES: Final = {
    "cli": ("typer", "rich"),
    "jetstream": ("nats",),
    "journal": ("pyarrow",),
    "kafka": ("confluent_kafka",),
    "postgres": ("psycopg",),
    "spark": ("pyspark", "pyarrow"),
}
"""The modules of each extra that a command cannot do without."""

_SECONDS: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(us|ms|s|m)")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def command_group(help: str = "") -> typer.Typer:  # noqa: A002 (as typer calls it)
    """Make a group of commands whose help and errors are plain text."""
    import typer

    group = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110},
    )
    if help:
        # With a callback of its own, a group of one command still asks for that command's name.
        group.callback(help=help)(_no_options)
    return group


def _no_options() -> None:
    pass


def seconds(option: str, text: str) -> float:
    """Convert a duration such as ``10ms`` to seconds; any other text ends the process."""
    found = _SECONDS.fullmatch(text)
    if found is None:
        stop(f"{option} {text!r}: must be a number with a unit, such as 10ms, 0.5s or 2m")
    return float(found[1]) * _UNITS[found[2]]


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Convert numbers separated by commas, or an empty text; any other text ends the process."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        stop(f"{option} {text!r}: must be fractions separated by commas, such as 0.2,0.8, or empty for none")


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
