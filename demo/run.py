"""One run of the demo, from the log to the report.

The parent creates streams or topics, publishes, measures a serial loop, and runs the main part with its crash. Then
the parent compares ledger, dead letters and histories with the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from demo.brokers.backends import broker_of, renewal_time
from demo.brokers.broker import Broker, GroupBroker
from demo.config import DemoConfig
from demo.errors import DemoError, NoAnswer
from demo.events import Event, load
from demo.faults import POISON
from demo.group.feed import Feed
from demo.group.members import Members
from demo.group.scenario import ranged_scenario, scenario
from demo.history import Seen, examine
from demo.ledger import Ledger, Step
from demo.places import Places, places
from demo.progress import Progress
from demo.report import Report
from demo.under_lanes import UnderLanes
from demo.view import View
from demo.workers.sample import measure
from lanes.clock import monotonic

_ANSWER_WITHIN: Final = 60.0
"""Most seconds to wait at the end until the server returns the dead letters."""

_FIRST_SHARE: Final = 0.2
"""Share of the events that the parent publishes before a group begins, unless the stream's retention is ``"interest"``.
"""

_RETRY: Final = 0.25

_Answer = TypeVar("_Answer")


async def run(config: DemoConfig, view: View | None = None) -> Report:
    """Run the demo once.

    At the end, the run removes its processes and temporary files, and if possible its streams or topics.

    Runs on asyncio only, until the workers have handled every event of the log, or the run fails. To stop the run,
    cancel an ``anyio.CancelScope`` around the call. A failure of a worker is part of the report.

    Args:
        config: Configuration of the run.
        view: Display of the progress; None = no display.

    Returns:
        The report.

    Raises:
        LanesError: The input is wrong, or the parent process cannot continue.
    """
    # The log is checked before the run touches a server.
    events = await asyncio.to_thread(load, config.data, config.events, config.seed)
    progress = Progress(events=len(events), cases=len({event.case for event in events}))
    showing = view.showing(progress) if view is not None else contextlib.nullcontext()
    with places(config.keep) as where:
        broker = broker_of(config, config.name or secrets.token_hex(4))
        progress.stream = broker.stream
        async with showing:
            try:
                return await _run(config, events, broker, where, progress)
            finally:
                with anyio.CancelScope(shield=True):
                    stayed = await broker.close()
                if stayed:
                    names = ", ".join(stayed)
                    line = f"lanes: the run could not delete {names} on the server; delete these names"
                    print(line, file=sys.stderr, flush=True)


async def _run(config: DemoConfig, events: list[Event], broker: Broker, where: Places, progress: Progress) -> Report:
    progress.phase = "connecting to the server"
    await broker.open()
    progress.phase = "publishing"
    feed = Feed(config, events, broker, where, progress)
    feed.open()
    try:
        # A group gets only the first share here. The script of its faults publishes the other events.
        if not config.waits_for_members:
            await feed.publish(_FIRST_SHARE if config.in_group else 1.0)
        if config.serial_seconds:
            progress.phase = f"measuring one at a time, for {config.serial_seconds:g} s"
            progress.serial_rate = await measure(config, broker, where)
        ledger = Ledger(where.folder / "ledger.sqlite")
        try:
            part = _main_part(config, broker, ledger, where, progress, feed)
            await part.run()
            feed.close("stopped")
            progress.phase = "checking"
            return await _report(config, events, broker, ledger, where, part, progress)
        finally:
            ledger.close()
    except BaseException:
        feed.close("failed")
        raise


def _main_part(
    config: DemoConfig, broker: Broker, ledger: Ledger, where: Places, progress: Progress, feed: Feed
) -> UnderLanes | Members:
    if not isinstance(broker, GroupBroker):
        return UnderLanes(config, broker, ledger, where, progress)
    script = config.script or (ranged_scenario if config.ranges else scenario)
    return Members(config, broker, ledger, where, progress, feed, script)


async def _report(
    config: DemoConfig,
    events: list[Event],
    broker: Broker,
    ledger: Ledger,
    where: Places,
    part: UnderLanes | Members,
    progress: Progress,
) -> Report:
    letters = set(await _patiently(broker.dead_letters))
    steps: list[Step] = [(event.case, event.step) for event in events]
    poison = {step for step in steps if config.faults.failures(*step) == POISON}
    audit = ledger.audit(steps, letters)
    seen = None if isinstance(part, UnderLanes) else Seen(part.snapshots, part.faults, part.late, renewal_time(config))
    findings = await asyncio.to_thread(examine, where.history, seen)
    return Report(
        events=len(events),
        keys=len({event.case for event in events}),
        done=len(events) - len(audit.lost),
        seconds=part.seconds,
        serial_rate=progress.serial_rate,
        repeats=audit.repeats,
        dead_letters=len(letters),
        # A killed worker cannot report its last peak, but its history records the peak.
        max_in_flight_seen=max(part.peak_in_flight, findings.peak_in_flight),
        max_in_flight=config.max_in_flight,
        rss_mb=part.rss_mb,
        kills=part.kills,
        killed=[str(kill) for kill in progress.kills],
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
        group=findings.group,
        width=config.width,
        stranded=findings.stranded,
    )


async def _patiently(question: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Ask the server until it answers. Raises ``DemoError`` after ``_ANSWER_WITHIN`` seconds without an answer."""
    deadline = monotonic() + _ANSWER_WITHIN
    while True:
        try:
            return await question()
        except NoAnswer as error:
            if monotonic() > deadline:
                raise DemoError(
                    f"{error}; without the server the dead letters cannot be counted; run the demo again"
                ) from None
        await asyncio.sleep(_RETRY)
