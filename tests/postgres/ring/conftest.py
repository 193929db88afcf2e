"""Fixtures of ring tests: a log of one partition, and one of four, each in a schema of its own."""

from __future__ import annotations

import pytest

from tests.components import PostgresServer
from tests.postgres.log.logs import Logs


@pytest.fixture
def logs(postgres: PostgresServer, schema: str) -> Logs:
    return Logs.make(postgres, schema)


@pytest.fixture
def four(postgres: PostgresServer, schema: str) -> Logs:
    return Logs.make(postgres, schema, partitions=4)
