"""Which kind of workers a handler gets."""

from __future__ import annotations

from typing import cast

from lanes.batches import BatchWorkers
from lanes.clock import Clock
from lanes.config import Settings
from lanes.core.engine import Engine
from lanes.handlers import BatchHandler, Decode, Handler, async_handler, is_async, sync_handler
from lanes.shell import Shell
from lanes.tap import Tap
from lanes.threads import ThreadWorkers
from lanes.workers import Workers, Workforce


def workforce(
    handler: Handler, decode: Decode | None, settings: Settings, engine: Engine, shell: Shell, clock: Clock, tap: Tap
) -> Workforce:
    """The workers for a handler that ``check_handler`` has let pass. Starts nothing."""
    inline = settings.sync_handlers == "inline"
    if settings.batch is not None:
        return BatchWorkers(
            engine,
            cast(BatchHandler, handler),
            shell,
            clock,
            tap,
            size=settings.batch,
            linger=settings.linger,
            timeout=settings.timeout,
            grace=settings.grace,
            inline=inline,
            decode=decode,
        )
    if is_async(handler) or inline:
        return Workers(engine, async_handler(handler, decode), shell, clock, tap, settings.timeout)
    return ThreadWorkers(
        engine, sync_handler(handler, decode), shell, clock, tap, timeout=settings.timeout, grace=settings.grace
    )
