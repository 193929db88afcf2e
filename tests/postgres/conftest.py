"""psycopg runs on asyncio alone; every test has a schema of its own on a real server, with the tables in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from tests.components import PostgresServer
from tests.postgres.tables import Effects

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def schema() -> str:
    """A name that nobody has used; there is nothing in it yet."""
    return f"s{os.getpid()}x{next(_numbers)}"


@pytest.fixture
def effects(postgres: PostgresServer, schema: str) -> Effects:
    """The tables of `lanes` and one of effects beside them."""
    return Effects.make(postgres, schema)


@pytest.fixture
def connection(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url) as connection:
        yield connection


@pytest.fixture
async def aconnection(postgres: PostgresServer) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
        yield connection
