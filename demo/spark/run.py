"""One run of the demo on Spark, from the log to the report."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from pathlib import Path
from typing import Any, Final

import anyio

from demo.brokers.kafka import KafkaBroker
from demo.errors import DemoError, NoAnswer
from demo.events import Event, load
from demo.faults import POISON
from demo.history import Verdict
from demo.ledger import Step
from demo.places import Places, places
from demo.progress import Progress
from demo.spark.config import ReplayConfig, SparkConfig
from demo.spark.drivers import Drivers
from demo.spark.judge import judge
from demo.spark.report import AUDIT, NO_AUDIT, SparkReport
from demo.spark.tables import Tables
from demo.view import View
from demo.workers.service import Service
from lanes.clock import monotonic
from lanes.history.journal import Journal, close_journal, recorder

_ANSWER_WITHIN: Final = 30.0
"""Most seconds to wait at the end until the broker returns the dead letters."""

_JOURNAL_WITHIN: Final = 30.0
"""Most seconds to wait for the publisher's journal."""


async def run(config: SparkConfig, view: View | None = None) -> SparkReport:
    """Run the demo once.

    At the end, the run removes its processes and temporary files, and if possible its topics and schema.

    Runs on asyncio only, for a minute or more. To stop the run, cancel an ``anyio.CancelScope`` around the call. A
    failure on Spark is part of the report.

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
    name = config.name or secrets.token_hex(4)
    with places(config.keep) as where:
        broker = KafkaBroker(config.kafka, name, config.partitions)
        tables = Tables(config.postgres, f"lanes_demo_{name}")
        progress.stream = broker.stream
        made = False
        async with showing:
            try:
                progress.phase = "connecting to the servers"
                await broker.open()
                await asyncio.to_thread(tables.make, _steps(events))
                made = True
                return await _run(config, events, broker, tables, where, progress)
            finally:
                with anyio.CancelScope(shield=True):
                    stayed = await broker.close()
                    if made and not await asyncio.to_thread(tables.drop):
                        stayed.append(f"the schema {tables.schema}")
                if stayed:
                    names = ", ".join(stayed)
                    line = f"lanes: the run could not delete {names} on the servers; delete these names"
                    print(line, file=sys.stderr, flush=True)


async def _run(
    config: SparkConfig,
    events: list[Event],
    broker: KafkaBroker,
    tables: Tables,
    where: Places,
    progress: Progress,
) -> SparkReport:
    progress.phase = "publishing"
    await _publish(events, broker, where, progress)
    token = secrets.token_hex(16)
    scratch = where.sockets / "spark"
    scratch.mkdir()

    def told(service: Service) -> ReplayConfig:
        return ReplayConfig(
            kafka=config.kafka,
            postgres=config.postgres,
            jars=[str(jar) for jar in config.jars],
            topic=broker.stream,
            dead_topic=broker.dead_subject,
            schema=tables.schema,
            service=service.address,
            token=token,
            journal=str(_journal(where)),
            checkpoint=str(where.sockets / "checkpoint"),
            scratch=str(scratch),
            cores=config.cores,
            connections=config.connections,
            rows_per_batch=max(1, -(-len(events) // config.batches)),
            concurrency=config.concurrency,
            max_in_flight=config.max_in_flight,
            fail_every=config.faults.fail_every,
            poison_every=config.faults.poison_every,
        )

    drivers = Drivers(config, tables, where, progress, told, token)
    await drivers.run()
    progress.phase = "checking"
    return await _report(config, events, broker, tables, drivers, progress)


async def _publish(events: list[Event], broker: KafkaBroker, where: Places, progress: Progress) -> None:
    """Publish the log to the topic, and record the published events in the journal for the audit."""
    journal = Journal(_journal(where), member="publisher")
    history = recorder(None, journal)
    assert history is not None, "there is a journal"
    # A publisher has no messages in flight, so the bounds in its segment do not matter.
    history.open(source=broker.stream, concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=monotonic())

    async def published(count: int) -> None:
        progress.published = count
        progress.answering = broker.connected

    await broker.publish(events, history, published)
    history.close("stopped", monotonic())
    await close_journal(journal, "publisher", _JOURNAL_WITHIN)


async def _report(
    config: SparkConfig,
    events: list[Event],
    broker: KafkaBroker,
    tables: Tables,
    drivers: Drivers,
    progress: Progress,
) -> SparkReport:
    await asyncio.to_thread(tables.add_letters, await _letters(broker))
    judged = await asyncio.to_thread(judge, tables)
    found: dict[str, Any] = drivers.told.get("audit", {})
    return SparkReport(
        events=len(events),
        keys=progress.cases,
        seconds=drivers.seconds,
        judged=judged,
        poison=sorted(step for step in _steps(events) if config.faults.failures(*step) == POISON),
        drivers=progress.starts,
        workers_killed=drivers.workers_killed,
        drivers_killed=drivers.drivers_killed,
        missed=drivers.missed,
        tried_again=drivers.tried_again,
        batches=len(drivers.done),
        interrupted=len(drivers.interrupted),
        resumed=len(drivers.interrupted & drivers.done),
        rss_mb=drivers.rss_mb,
        audit=AUDIT[found["status"]] if found else NO_AUDIT,
        verdicts=[
            Verdict(
                name, status, f"{violations} violations, {said[0] if said else ''}" if violations else "; ".join(said)
            )
            for name, status, violations, said in found.get("verdicts", [])
        ],
        duplicates=found.get("duplicates", {}),
        unfinished=found.get("unfinished", 0),
        failure=drivers.failure,
    )


async def _letters(broker: KafkaBroker) -> list[Step]:
    deadline = monotonic() + _ANSWER_WITHIN
    while True:
        try:
            return await broker.dead_letters()
        except NoAnswer as error:
            if monotonic() > deadline:
                raise DemoError(
                    f"{error}; without the broker the dead letters cannot be counted; run the demo again"
                ) from None
        await asyncio.sleep(0.25)


def _steps(events: list[Event]) -> list[Step]:
    return [(event.case, event.step) for event in events]


def _journal(where: Places) -> Path:
    return where.folder / "journal"
