"""One run of the demo, from the log to the report.

The parent makes the streams, publishes, measures one at a time, runs the main part with its crash, and then asks
ledger, dead letters and histories what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from lanes.clock import monotonic
from lanes.demo.broker import Broker
from lanes.demo.config import HOOK_EVERY, DemoConfig
from lanes.demo.errors import DemoError
from lanes.demo.events import Event, load
from lanes.demo.faults import POISON
from lanes.demo.history import examine
from lanes.demo.ledger import Ledger, Step
from lanes.demo.places import Places, places
from lanes.demo.progress import Progress
from lanes.demo.report import Report
from lanes.demo.sample import measure
from lanes.demo.under_lanes import UnderLanes
from lanes.demo.view import View
from lanes.history import History
from lanes_jetstream.connection import NoAnswer

_ANSWER_WITHIN: Final = 60.0
"""Seconds the server has at the end to come back and show the dead letters."""

_RETRY: Final = 0.25

_Answer = TypeVar("_Answer")


async def run(config: DemoConfig, view: View | None = None) -> Report:
    """Run the demo once; nothing of it is left running, on the server or on disk, however it ends.

    asyncio only; takes as long as the log needs. To stop it, cancel an ``anyio.CancelScope`` around it. Raises
    ``DemoError`` or another ``LanesError`` for bad input and for what keeps the parent itself from going on;
    everything that goes wrong under ``lanes`` is in the report.
    """
    # The log first: what is wrong with it shows before anything is touched.
    events = await asyncio.to_thread(load, config.data, config.events, config.seed)
    progress = Progress(events=len(events), cases=len({event.case for event in events}))
    showing = view.showing(progress) if view is not None else contextlib.nullcontext()
    with places(config.keep) as where:
        broker = Broker(config.server, config.name or secrets.token_hex(4))
        progress.stream = broker.stream
        async with showing:
            try:
                return await _run(config, events, broker, where, progress)
            finally:
                with anyio.CancelScope(shield=True):
                    stayed = await broker.close()
                if stayed:
                    names = ", ".join(stayed)
                    print(f"lanes: the server does not answer; delete there: {names}", file=sys.stderr, flush=True)


async def _run(config: DemoConfig, events: list[Event], broker: Broker, where: Places, progress: Progress) -> Report:
    progress.phase = "connecting to the server"
    await broker.open()
    progress.phase = "publishing"
    await _publish(config, events, broker, where, progress)
    serial_rate = 0.0
    if config.serial_seconds:
        progress.phase = "one at a time"
        serial_rate = progress.serial_rate = await measure(config, broker, where)
    ledger = Ledger(where.folder / "ledger.sqlite")
    try:
        part = UnderLanes(config, broker, ledger, where, progress)
        await part.run()
        progress.phase = "checking"
        return await _report(config, events, broker, ledger, where, part, serial_rate)
    finally:
        ledger.close()


async def _publish(config: DemoConfig, events: list[Event], broker: Broker, where: Places, progress: Progress) -> None:
    history = History(where.history, member="publisher")
    # A publisher has nothing in flight in the sense of a consumer; the bounds of its segment say so little.
    history.open(source=broker.stream, concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=monotonic())

    hooked = 0.0

    async def published(count: int) -> None:
        nonlocal hooked
        progress.published = count
        progress.answering = broker.connected
        if config.on_progress is not None and monotonic() - hooked >= HOOK_EVERY:
            hooked = monotonic()
            await config.on_progress(progress)

    try:
        await broker.publish(events, history, published)
    except BaseException:
        history.close("failed", monotonic())
        raise
    history.close("stopped", monotonic())


async def _report(
    config: DemoConfig,
    events: list[Event],
    broker: Broker,
    ledger: Ledger,
    where: Places,
    part: UnderLanes,
    serial_rate: float,
) -> Report:
    letters = set(await _patiently(broker.dead_letters))
    steps: list[Step] = [(event.case, event.step) for event in events]
    poison = {step for step in steps if config.faults.failures(*step) == POISON}
    audit = ledger.audit(steps, letters)
    findings = await asyncio.to_thread(examine, where.history)
    return Report(
        events=len(events),
        keys=len({event.case for event in events}),
        done=len(events) - len(audit.lost),
        seconds=part.seconds,
        serial_rate=serial_rate,
        repeats=audit.repeats,
        dead_letters=len(letters),
        # A worker that is killed does not say its last peak; its history does.
        max_in_flight_seen=max(part.peak_in_flight, findings.peak_in_flight),
        max_in_flight=config.max_in_flight,
        rss_mb=part.rss_mb,
        kills=part.kills,
        workers=part.workers,
        violations=audit.violations,
        lost=audit.lost,
        doubled=audit.doubled,
        foreign=audit.foreign,
        missing_letters=sorted(poison - letters),
        unexpected_letters=sorted(letters - poison),
        redelivered=findings.redelivered,
        verdicts=findings.verdicts,
        failure=part.failure,
    )


async def _patiently(question: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Ask the server until it answers. Raises ``DemoError`` when it does not within ``_ANSWER_WITHIN`` seconds."""
    deadline = monotonic() + _ANSWER_WITHIN
    while True:
        try:
            return await question()
        except NoAnswer as error:
            if monotonic() > deadline:
                raise DemoError(f"{error}; the dead letters cannot be counted without it") from None
        await asyncio.sleep(_RETRY)
