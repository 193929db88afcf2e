"""The check that the extra ``web`` is installed, before the modules that need it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from lanes.arguments import kind_of
from lanes.consumer import Consumer
from lanes.errors import ConfigError
from lanes.web.settings import Web, web_of

if TYPE_CHECKING:
    from starlette.applications import Starlette

_NEEDED: Final = ("starlette", "uvicorn", "prometheus_client", "opentelemetry.sdk", "opentelemetry.exporter.prometheus")


def port_of(consumer: Consumer, http: str | Web | None) -> AbstractContextManager[object]:
    """Return a context manager in whose block the HTTP server of a consumer is open.

    Args:
        consumer: The consumer.
        http: Address or settings of the HTTP server; None = no HTTP server.

    Returns:
        A context manager whose start raises ``ConfigError`` if the address is in use.

    Raises:
        ConfigError: ``http`` has a wrong type or value, or the extra ``web`` is not installed.
    """
    if http is None:
        return nullcontext()
    web = web_of(http)
    check_extra("http=")
    from lanes.web.port import Port

    return Port(consumer, web)


def application(
    consumer: Consumer, *, show_keys: bool, hosts: Collection[str], operate: bool, token: str | None
) -> Starlette:
    """Return the application; see ``lanes.web.app``."""
    if not isinstance(consumer, Consumer):
        raise ConfigError(f"consumer is {kind_of(consumer)}: pass lanes.Consumer(source, handler, …)")
    web = Web(address="127.0.0.1:0", show_keys=show_keys, hosts=hosts, operate=operate, token=token)
    check_extra("lanes.web.app")
    from lanes.web.board import Board
    from lanes.web.commands import Commands
    from lanes.web.lines import Lines
    from lanes.web.metrics import Metrics
    from lanes.web.routes import Routes

    board = Board(consumer)
    lines = Lines()
    lines.open()
    commands = None if token is None else Commands(consumer, token)
    return Routes(board, Metrics(board.view.name), web, lines, commands).application()


def check_extra(what: str) -> None:
    """Raise ``ConfigError`` unless the modules of the extra ``web`` are installed, which ``what`` needs."""
    missing = [name for name in _NEEDED if not _installed(name)]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install '.[web]' in the checkout of lanes")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # A parent package is missing.
        return False
