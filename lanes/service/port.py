"""The HTTP server of a service: probes, the status of the workers, and their metrics with a label."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, Protocol

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lanes.web.port import listener, server_config
from lanes.web.settings import Address, address_of

log = logging.getLogger("lanes.web")

VERSION: Final = 1
"""Version of the format of ``/status``."""

_HEADERS: Final = {"cache-control": "no-store"}
_NO_ANSWER: Final = "the process has not answered"


class AnyWorker(Protocol):
    """The part of a worker that the HTTP server uses; see ``lanes.service.supervisor.Worker``."""

    number: int
    restarts: int
    last_status: int | None
    restarts_at: float

    @property
    def state(self) -> str:
        """State of the worker."""

    @property
    def pid(self) -> int | None:
        """Number of the process; None = no process."""

    async def ask(self, *, metrics: bool = False) -> dict[str, Any] | None:
        """Return the status of the process, or its metrics; None = no answer."""


class AnySupervisor(Protocol):
    """The part of a supervisor that the HTTP server uses."""

    stopping: bool

    @property
    def workers(self) -> list[Any]:
        """The workers, each an ``AnyWorker``."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because the supervisor handles the signals."""
        yield


@contextlib.asynccontextmanager
async def open_port(supervisor: AnySupervisor, address: str) -> AsyncIterator[None]:
    """Answer at the address during the block. Raises ``ConfigError`` if the system refuses the address."""
    wanted = address_of(address)
    with contextlib.closing(listener(wanted)) as listening:
        server = _Server(server_config(ServicePort(supervisor).application()))
        answering = asyncio.create_task(server.serve(sockets=[listening]))
        log.info("serving http://%s", Address(wanted.host, listening.getsockname()[1]))
        try:
            yield
        finally:
            server.should_exit = True
            await answering


class ServicePort:
    """The answers of the HTTP server.

    Args:
        supervisor: The supervisor of the workers.
    """

    def __init__(self, supervisor: AnySupervisor) -> None:
        self._supervisor = supervisor

    def __repr__(self) -> str:
        return f"<ServicePort of {len(self._supervisor.workers)} worker(s)>"

    def application(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/live", self.live),
                Route("/ready", self.ready),
                Route("/status", self.status),
                Route("/metrics", self.metrics),
            ]
        )

    async def live(self, _: Request) -> Response:
        """Answer 503 if the event loop of a worker does not answer, else 200."""
        reasons = [
            f"worker {each['worker']}: {each['reason']}" for each in await self._answers() if each["live"] is False
        ]
        return _json({"live": not reasons, "reason": "; ".join(reasons) or None}, not reasons)

    async def ready(self, _: Request) -> Response:
        """Answer 200 while all workers are ready, else 503. The answer ignores a worker whose source has ended."""
        reasons = [f"worker {each['worker']}: {each['reason']}" for each in await self._answers() if not each["ready"]]
        if self._supervisor.stopping:
            reasons = ["the service drains"]
        return _json({"ready": not reasons, "reason": "; ".join(reasons) or None}, not reasons)

    async def status(self, _: Request) -> Response:
        """Answer the state of each worker as JSON, with the status of its consumer."""
        answers = await self._answers()
        ready = all(each["ready"] for each in answers) and not self._supervisor.stopping
        return _json(
            {"version": VERSION, "ready": ready, "draining": self._supervisor.stopping, "workers": answers}, True
        )

    async def metrics(self, _: Request) -> Response:
        """Answer the metrics of all workers in the format of Prometheus, with the label ``worker``."""
        workers = self._supervisor.workers
        answers = await asyncio.gather(*(worker.ask(metrics=True) for worker in workers))
        texts = {
            str(worker.number): answer.get("metrics", "")
            for worker, answer in zip(workers, answers, strict=True)
            if answer is not None
        }
        return Response(
            merged(texts, {str(worker.number): worker.restarts for worker in workers}),
            200,
            _HEADERS,
            media_type="text/plain; version=0.0.4",
        )

    async def _answers(self) -> list[dict[str, Any]]:
        return await asyncio.gather(*(_answer(worker) for worker in self._supervisor.workers))


async def _answer(worker: AnyWorker) -> dict[str, Any]:
    found = {
        "worker": worker.number,
        "state": worker.state,
        "pid": worker.pid,
        "restarts": worker.restarts,
        "last_exit_status": worker.last_status,
        "live": None,
        "ready": worker.state == "finished",
        "reason": None,
        "status": None,
    }
    if worker.state == "waiting":
        found["reason"] = f"it restarts in {max(0.0, worker.restarts_at - time.monotonic()):.1f} s after a failure"
    elif worker.state == "running":
        answer = await worker.ask() or {"live": None, "ready": False, "reason": _NO_ANSWER}
        found.update((name, answer[name]) for name in ("live", "ready", "reason", "status") if name in answer)
    elif worker.state != "finished":
        found["reason"] = {"starting": "the process starts", "refused": "its module has no consumer"}.get(
            worker.state, "it has stopped"
        )
    return found


def merged(texts: Mapping[str, str], restarts: Mapping[str, int]) -> bytes:
    """Merge the metrics of several processes.

    Args:
        texts: Metrics in the format of Prometheus, by the number of the worker.
        restarts: Number of restarts, by the number of the worker.

    Returns:
        The metrics with the label ``worker``. A metric family of several workers has one description.
    """
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in family.samples]
    counted = CounterMetricFamily(
        "lanes_worker_restarts", "Number of restarts of a worker process after its death.", labels=["worker"]
    )
    for worker, count in restarts.items():
        counted.add_metric([worker], count)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged([*families.values(), counted]))
    return bytes(generate_latest(registry))


class _Merged:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return the families; see ``CollectorRegistry``."""
        return self._families


def _json(content: dict[str, Any], good: bool) -> Response:
    return JSONResponse(content, 200 if good else 503, _HEADERS)
