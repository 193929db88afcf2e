"""A broker that is down for a while."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from anyio.to_thread import run_sync

from tests.components import KafkaServer, NatsServer


@contextlib.asynccontextmanager
async def killed(server: KafkaServer | NatsServer | None) -> AsyncIterator[None]:
    """The broker is killed inside the context, and started again after the context."""
    assert server is not None, "the harness has no broker to kill"
    await run_sync(server.kill)
    yield
    await run_sync(server.start)
