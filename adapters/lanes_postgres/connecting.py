"""Opens a connection to a server. Needs asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from lanes_postgres.address import place_of
from lanes_postgres.errors import not_connected

log = logging.getLogger("lanes.postgres")

_TIMEOUT: Final = 10
"""Seconds allowed for the connection to each host, unless the user sets ``connect_timeout``."""

_WARN_AFTER: Final = 3.0
"""Seconds without an answer after which the function logs a warning."""


async def connect(dsn: str, where: str, **options: Any) -> AsyncConnection[Any]:
    """Open a connection with autocommit. A cancelled call leaves no socket open.

    Each host must answer within 10 s, unless the address, ``options`` or ``PGCONNECT_TIMEOUT`` sets another time.

    Raises ``SourceError`` with a remedy if the server is unreachable or refuses the connection.
    """
    warning = asyncio.get_running_loop().call_later(_WARN_AFTER, _warn, _where(dsn, where))
    try:
        return await AsyncConnection.connect(dsn, autocommit=True, **_time_limit(dsn, options), **options)
    except psycopg.Error as error:
        # Do not show the client's own text, which may contain a part of the password.
        raise not_connected(error, _where(dsn, where)) from None
    except asyncio.CancelledError as error:
        # The frames of the traceback reference the unfinished connection, so its socket would remain open until a
        # garbage collection.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        warning.cancel()


def _where(dsn: str, where: str) -> str:
    place = f"{where} at {place_of(dsn)}"
    return place if dsn else f"{place}, without an address and so by the PG… variables"


def _time_limit(dsn: str, options: Mapping[str, Any]) -> dict[str, Any]:
    name = "connect_timeout"
    if name in options or name in conninfo_to_dict(dsn) or os.environ.get("PGCONNECT_TIMEOUT"):
        return {}
    return {name: _TIMEOUT}


def _warn(where: str) -> None:
    log.warning(
        "%s: the PostgreSQL server has not answered for %g s; check the address, the server and the network",
        where,
        _WARN_AFTER,
    )
