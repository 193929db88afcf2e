"""The HTTP server of a consumer.

The server runs in a separate thread, so it also answers while the event loop is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from types import TracebackType
from typing import Final, Self

import uvicorn
from starlette.applications import Starlette

from lanes.consumer import Consumer
from lanes.errors import ConfigError
from lanes.web.board import FRESH, Board
from lanes.web.commands import Commands
from lanes.web.lines import Lines
from lanes.web.metrics import Metrics
from lanes.web.routes import Routes
from lanes.web.settings import Address, Web, address_of
from lanes.web.switching import QuickProtocol

log = logging.getLogger("lanes.web")

_CLOSED_WITHIN: Final = 3.0
"""Seconds that the thread gets to end."""


class Port:
    """The HTTP server of one consumer, from ``open`` until ``close``.

    Args:
        consumer: The consumer.
        web: Settings of the HTTP server.

    Attributes:
        address: Address that the server listens on.
    """

    def __init__(self, consumer: Consumer, web: Web) -> None:
        self.address = address_of(web.address)
        self._name = consumer._life.name
        self._board = Board(consumer)
        self._metrics = Metrics(self._name)
        self._lines = Lines()
        commands = None if web.token is None else Commands(consumer, web.token)
        self._routes = Routes(self._board, self._metrics, web, self._lines, commands)
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None

    def __repr__(self) -> str:
        return f"<Port {self.address}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Begin to listen and to answer requests. The call does not block.

        Raises:
            ConfigError: The address is in use, does not belong to this machine, or requires more permissions.
        """
        listening = listener(self.address)
        self.address = Address(self.address.host, listening.getsockname()[1])
        self._metrics.provide()
        self._lines.open()
        self._server = uvicorn.Server(server_config(self._routes.application(), QuickProtocol))
        self._thread = threading.Thread(
            target=self._answer, args=(self._server, listening), name="lanes-web", daemon=True
        )
        self._thread.start()
        log.info("%s: serving http://%s", self._name, self.address)

    def close(self) -> None:
        """Stop answering. Blocks for at most a few seconds. Idempotent."""
        if self._server is None or self._thread is None:
            return
        self._lines.close()
        self._routes.close()
        self._server.should_exit = True
        self._thread.join(_CLOSED_WITHIN)

    def _answer(self, server: uvicorn.Server, listening: socket.socket) -> None:
        async def serve() -> None:
            refreshing = asyncio.create_task(self._refresh())
            try:
                await server.serve(sockets=[listening])
            finally:
                refreshing.cancel()

        try:
            with contextlib.closing(listening):
                asyncio.run(serve())
        except Exception:
            log.exception("%s: http://%s answers no more", self._name, self.address)

    async def _refresh(self) -> None:
        while True:
            self._board.ask()
            await asyncio.sleep(FRESH)


def server_config(application: Starlette, protocol: type[asyncio.Protocol] | None = None) -> uvicorn.Config:
    """Return the settings of a server that does not change the logging of the program.

    Args:
        application: The application.
        protocol: Class of the connections; None = the class of uvicorn.

    Returns:
        The settings.
    """
    return uvicorn.Config(
        application,
        http=protocol or "auto",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )


def listener(address: Address) -> socket.socket:
    """Return a socket that listens on the address. Raises ``ConfigError`` if the system refuses."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        code = error.errno or 0
        if isinstance(error, socket.gaierror) or code < 0:
            raise ConfigError(f'http="{address}": the host is unknown; write a host such as "127.0.0.1:8080"') from None
        # The text of Python repeats the address.
        why = os.strerror(code) if code else str(error)
        remedy = "choose another port, or stop the process that uses it"
        if code == errno.EADDRNOTAVAIL:
            remedy = "write an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all its addresses"
        elif code == errno.EACCES:
            remedy = "choose a port above 1023, or run the process with the right to use this one"
        raise ConfigError(f'http="{address}": cannot listen there ({why}); {remedy}') from None
