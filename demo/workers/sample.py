"""The measurement of a serial loop over the first events, with a separate process and ledger."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any, Final

import anyio

from demo.brokers.broker import Broker
from demo.config import DemoConfig, WorkerConfig
from demo.errors import DemoError
from demo.ledger import Ledger
from demo.places import Places
from demo.supervise import Child
from demo.workers.service import Service

COMMAND: Final = (sys.executable, "-m", "demo.workers.serial")

_MARGIN: Final = 30.0
"""Seconds beyond the length of the sample after which the loop counts as stuck."""


async def measure(config: DemoConfig, broker: Broker, places: Places) -> float:
    """Return the events per second of the serial loop. Raises ``DemoError`` if the loop fails."""
    ledger = Ledger(places.folder / "ledger-one-at-a-time.sqlite")
    token = secrets.token_hex(16)
    service = Service(ledger, latency=config.latency, token=token, on_status=_ignore, on_commit=_nothing)
    await service.start(places.sockets)
    told = worker_config(config, broker, places, service, token, member="serial")
    child = Child(COMMAND, places.log, told.environment())
    try:
        await child.start()
        status = await child.wait(config.serial_seconds + _MARGIN)
        if service.failure is not None:
            raise service.failure
        if status != 0:
            raise DemoError(f"the one-at-a-time loop failed (status {status}): {child.last_words}")
        result = json.loads(await child.output())
    finally:
        with anyio.CancelScope(shield=True):
            await child.end()
            await service.close()
        ledger.close()
    return result["events"] / result["seconds"] if result["seconds"] else 0.0


def worker_config(
    config: DemoConfig,
    broker: Broker,
    places: Places,
    service: Service,
    token: str,
    *,
    member: str,
    server: str | None = None,
) -> WorkerConfig:
    """Make the configuration of a child process. ``server`` is the broker's address; None = the address of the run."""
    return WorkerConfig(
        server=server or config.server,
        stream=broker.stream,
        durable=broker.durable,
        dead_subject=broker.dead_subject,
        service=service.address,
        token=token,
        history=str(places.history),
        member=member,
        concurrency=config.concurrency,
        max_in_flight=config.max_in_flight,
        ack_wait=config.ack_wait,
        seconds=config.serial_seconds,
        fail_every=config.faults.fail_every,
        poison_every=config.faults.poison_every,
        broker=config.broker,
        protocol=config.protocol,
        lease=config.lease if config.broker != "kafka" and config.in_group else 0.0,
        queue=broker.queue.name,
        width=broker.queue.partitions,
        ranges=config.ranges,
    )


def _ignore(status: dict[str, Any]) -> None:
    del status


def _nothing() -> None:
    pass
