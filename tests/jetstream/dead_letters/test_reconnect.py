"""Dead letters reconnect after the server disconnected their client."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from lanes.dead_letter import DeadLetter
from lanes.errors import SourceError
from lanes_jetstream import JetStreamDeadLetters
from tests.components import NatsServer

pytestmark = pytest.mark.anyio


def dead_letter(position: int) -> DeadLetter:
    return DeadLetter(
        id=uuid.uuid4().hex,
        source="S",
        partition=0,
        position=position,
        subject="S.1",
        key=b"k",
        value=b"v",
        headers=(),
        attempts=1,
        error_type="E",
        error_text="t",
        epoch=1,
        time=1.0,
    )


@pytest.fixture
async def subject(client: Client) -> AsyncIterator[str]:
    name = f"reopened-{uuid.uuid4().hex[:12]}"
    await client.jetstream().add_stream(name=name, subjects=[name])
    yield name
    await client.jetstream().delete_stream(name)


async def test_dead_letters_wait_while_their_connection_is_opened_again(
    nats_server: NatsServer, client: Client, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = JetStreamDeadLetters(nats_server.url, subject)
    await letters.open()
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.1)
    try:
        connection = letters._connection
        connection._url = "nats://127.0.0.1:1"
        await connection.client.close()
        refused: list[Exception] = []

        async def put(position: int) -> None:
            try:
                await letters.put(dead_letter(position))
            except Exception as error:
                refused.append(error)

        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put, 1)
                tasks.start_soon(put, 2)
        assert [(type(error), getattr(error, "retryable", None)) for error in refused] == [(SourceError, True)] * 4
        connection._url = nats_server.url
        monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 10.0)
        refused.clear()
        connect, made = Client.connect, 0

        async def counted(*arguments: Any, **options: Any) -> None:
            nonlocal made
            made += 1
            await connect(*arguments, **options)

        monkeypatch.setattr(Client, "connect", counted)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put, 1)
            tasks.start_soon(put, 2)
        assert (refused, made) == ([], 1)
        assert (await client.jetstream().stream_info(subject)).state.messages == 2
    finally:
        await letters.aclose()
