"""The opening of a connection. Needs asyncio."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import psycopg
from psycopg import AsyncConnection

from lanes_postgres.errors import not_connected


async def connect(dsn: str, where: str, **options: Any) -> AsyncConnection[Any]:
    """Open a connection with autocommit. A cancelled call leaves no socket open.

    Raises ``SourceError`` with a remedy if the server cannot be reached or refuses the connection.
    """
    try:
        return await AsyncConnection.connect(dsn, autocommit=True, **options)
    except psycopg.Error as error:
        # The client's own text may show a part of the password.
        raise not_connected(error, where) from None
    except asyncio.CancelledError as error:
        # The frames hold the begun connection, and the garbage collector would close its socket much later.
        traceback.clear_frames(error.__traceback__)
        raise
