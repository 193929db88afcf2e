"""Fixtures of PostgreSQL tests: each test has its own schema, with tables, on a real server. psycopg needs asyncio."""

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
    """An unused name of a schema that does not exist yet."""
    return f"s{os.getpid()}x{next(_numbers)}"


@pytest.fixture
def effects(postgres: PostgresServer, schema: str) -> Effects:
    """The tables of ``lanes`` and a table of effects."""
    return Effects.make(postgres, schema)


@pytest.fixture
def connection(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url) as connection:
        yield connection


@pytest.fixture
async def aconnection(postgres: PostgresServer) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
        yield connection
