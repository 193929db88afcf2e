"""The options that reach a broker, and the clients that adapters register for the commands of ``lanes``."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lanes.cli.kit import option_values, require, stop

_NATS_URL: Final = re.compile(r"(?:nats|tls|wss?)://", re.IGNORECASE)

_OPTIONS: Final = {
    "server:": "--server:",
    "dead-letter topic ": "--topic ",
    "dead-letter subject ": "--subject ",
    "stream=": "--stream=",
    "queue=": "QUEUE ",
    "physical queue ": "QUEUE has the physical queue ",
}
"""The beginnings of a client's errors about an option, and the name of the option for each."""

Config = Annotated[Path | None, typer.Option(help="Kafka settings: name=value lines, .json or .toml.", metavar="FILE")]
Settings = Annotated[
    list[str],
    typer.Option("-X", help="Kafka setting that wins over the file.", metavar="NAME=VALUE", show_default=False),
]
Server = Annotated[
    str, typer.Option(help="Kafka broker as host:port, or URL of a NATS server.", metavar="ADDRESS", show_default=False)
]


def is_nats(server: str) -> bool:
    """Return whether an address is the URL of a NATS server."""
    return _NATS_URL.match(server) is not None


def make_client(group: str, broker: str, command: str, *arguments: object) -> Any:
    """Make the client that the adapter of a broker registers in an entry-point group.

    Ends the process if the extra of the adapter is missing, or if the value of an option is invalid.
    """
    points = entry_points(group=group, name=broker)
    if not points:
        stop(f"`{command}`: lanes is not installed as a package; pip install . in the checkout of lanes")
    (point,) = points
    require(f"`{command}`", *point.extras)
    make = point.load()
    with option_values(options=_OPTIONS):
        return make(*arguments)
