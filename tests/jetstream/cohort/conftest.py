"""Streams of the cohort tests that are deleted at the end of a test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.client import Client

from tests.jetstream.workload import unique


class Names:
    """Names of streams, which are deleted at the end."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.made: list[str] = []

    def __call__(self) -> str:
        self.made.append(unique("P"))
        return self.made[-1]

    async def create(self, **config: Any) -> str:
        name = self()
        await self.request(f"STREAM.CREATE.{name}", {"name": name, **config})
        return name

    async def request(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=5)
        fields: dict[str, Any] = json.loads(answer.data)
        assert "error" not in fields, fields
        return fields

    async def stored(self, stream: str, sequence: int) -> str:
        """The subject of a stored message."""
        answer = await self.request(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
        subject: str = answer["message"]["subject"]
        return subject


@pytest.fixture
async def names(client: Client) -> AsyncIterator[Names]:
    names = Names(client)
    yield names
    for name in reversed(names.made):
        await client.request(f"$JS.API.STREAM.DELETE.{name}", b"", timeout=5)
