"""The routes of the port, as an application for every ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lanes.web.board import FRESH, Board
from lanes.web.metrics import SNIPPET, Metrics
from lanes.web.settings import Web
from lanes.web.values import reason_not_live, status_of, written

_ANSWER_WITHIN: Final = 0.03
"""Seconds for which a request waits for a new snapshot, so that a probe is quick while the loop is busy."""

_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Routes:
    """The answers of the port.

    Args:
        board: Board of the consumer.
        metrics: Metrics of the process.
        web: Settings of the port.
    """

    def __init__(self, board: Board, metrics: Metrics, web: Web) -> None:
        self._board = board
        self._metrics = metrics
        self._web = web

    def application(self) -> Starlette:
        """Return the application."""
        found = {"/live": self.live, "/ready": self.ready, "/status": self.status, "/metrics": self.metrics}
        return Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in found.items()])

    async def live(self, _: Request) -> Response:
        """Answer 200 while the event loop answers and no error has ended the consumer, else 503."""
        await self._refresh()
        reason = reason_not_live(self._board)
        return _json({"live": reason is None, "reason": reason}, reason is None)

    async def ready(self, _: Request) -> Response:
        """Answer 200 while the consumer is ready and does not drain, else 503."""
        await self._refresh()
        board = self._board
        reason = reason_not_live(board)
        ready = board.ready and reason is None
        if reason is None and not ready:
            reason = "the consumer drains" if board.draining else "the group has not answered the consumer yet"
        return _json({"ready": ready, "reason": reason}, ready)

    async def status(self, _: Request) -> Response:
        """Answer the status as JSON."""
        await self._refresh()
        return _json(status_of(self._board, show_keys=self._web.show_keys), True)

    async def metrics(self, request: Request) -> Response:
        """Answer the metrics in the format of Prometheus; 404 without a reader for Prometheus."""
        found = self._metrics.exposition(request.headers.get("accept", ""))
        if found is None:
            text = f"the MeterProvider of the program has no reader for Prometheus; write {SNIPPET}\n"
            return Response(text, 404, _HEADERS, media_type="text/plain")
        body, content_type = found
        return Response(body, 200, {**_HEADERS, "content-type": content_type})

    async def _refresh(self) -> None:
        """Wait a moment for a new snapshot, unless the latest one is fresh or the loop is silent already."""
        if self._board.silent > _ANSWER_WITHIN or (self._board.age < FRESH and not self._board.silent):
            return
        loop, made = asyncio.get_running_loop(), asyncio.Event()
        told: Callable[[], Any] = lambda: loop.call_soon_threadsafe(made.set)  # noqa: E731
        self._board.ask(told)
        try:
            async with asyncio.timeout(_ANSWER_WITHIN):
                await made.wait()
        except TimeoutError:
            # The answer then shows the former snapshot and its age.
            return


def _json(value: dict[str, Any], good: bool) -> Response:
    return Response(written(value), 200 if good else 503, _HEADERS, media_type="application/json")
