"""Which kind of workers a handler gets."""

from __future__ import annotations

from typing import cast

from lanes.clock import Clock
from lanes.config import Settings
from lanes.core.engine import Engine
from lanes.handlers import BatchHandler, Decode, Handler, async_handler, is_async, sync_handler
from lanes.observe.tap import Tap
from lanes.workers.batches import BatchWorkers
from lanes.workers.context import Shell
from lanes.workers.tasks import Workers, Workforce
from lanes.workers.threads import ThreadWorkers


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
