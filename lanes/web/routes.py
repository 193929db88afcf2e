"""The routes of the HTTP server, as an application for any ASGI server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lanes.web.board import FRESH, Board
from lanes.web.commands import COMMANDS, Commands, Refused
from lanes.web.lines import Lines
from lanes.web.metrics import Metrics, missing_reader
from lanes.web.settings import Web, address_of, is_of_host
from lanes.web.values import page_of, reason_not_live, status_of, written

_ANSWER_WITHIN: Final = 0.03
"""Seconds for which a request waits for a new snapshot, so that a probe is quick while the loop is busy."""

_BODY_LIMIT: Final = 4_096
"""Maximum number of bytes of a command."""

_LOOKS: Final = 10
"""Number of looks in a second whether the port closes."""

_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_PAGE_HEADERS: Final = {
    **_HEADERS,
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
}

_FILES: Final = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css"}

_Answer = Callable[[Request], Awaitable[Response]]


class Routes:
    """The answers of the HTTP server.

    Args:
        board: Board of the consumer.
        metrics: Metrics of the process.
        web: Settings of the HTTP server.
        lines: The last lines of the log.
        commands: Commands of an operator; None = the server accepts no commands.
    """

    def __init__(
        self, board: Board, metrics: Metrics, web: Web, lines: Lines, commands: Commands | None = None
    ) -> None:
        self._board = board
        self._metrics = metrics
        self._web = web
        self._lines = lines
        self._commands = commands
        self._closed = False
        self._hosts = {*web.hosts, address_of(web.address).host}

    def application(self) -> Starlette:
        """Return the application."""
        found: dict[str, _Answer] = {
            "/live": self.live,
            "/ready": self.ready,
            "/status": self.status,
            "/metrics": self.metrics,
            "/events": self._for_browsers(self.events),
            **{path: self._for_browsers(self.file) for path in _FILES},
        }
        routes = [Route(path, answer, methods=["GET"]) for path, answer in found.items()]
        if self._commands is not None:
            routes += [
                Route(f"/operate/{command}", self._for_browsers(self.operate), methods=["POST"]) for command in COMMANDS
            ]
        return Starlette(routes=routes)

    def close(self) -> None:
        """Ask the streams of events to end. Any thread may make this call. Idempotent."""
        self._closed = True

    async def live(self, _: Request) -> Response:
        """Answer 200 while the event loop answers and no error has ended the consumer, else 503."""
        self._renew()
        reason = reason_not_live(self._board)
        return _json({"live": reason is None, "reason": reason}, reason is None)

    async def ready(self, _: Request) -> Response:
        """Answer 200 while the consumer is ready and does not drain, else 503."""
        self._renew()
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
            return _text(missing_reader(), 404)
        body, content_type = found
        return Response(body, 200, {**_HEADERS, "content-type": content_type})

    async def file(self, request: Request) -> Response:
        """Answer a file of the page."""
        name = _FILES["/" + request.url.path.rpartition("/")[2]]
        text = files("lanes.web").joinpath(name).read_text(encoding="utf-8")
        return Response(text, 200, _PAGE_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])

    async def events(self, _: Request) -> Response:
        """Answer a stream of server-sent events: a snapshot each second."""
        return StreamingResponse(self._snapshots(), 200, _PAGE_HEADERS, media_type="text/event-stream")

    async def operate(self, request: Request) -> Response:
        """Perform a command of an operator: 200 with a line, 401 without the token, 409 if it is refused."""
        assert self._commands is not None, "only a port with commands has this route"
        authorization = request.headers.get("authorization", "")
        if not self._commands.permits(authorization):
            given = authorization.removeprefix("Bearer").strip()
            return _text(f"{'the token is wrong: ' if given else ''}write the token of the operator", 401)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            # A form of another site can send other types without a question of the browser.
            return _text("send application/json", 415)
        command = request.url.path.rpartition("/")[2]
        try:
            key = await _key_of(request)
            if (key is None) != (command in ("pause", "resume")):
                return _text(f"{command} {'takes no key' if key is not None else 'needs key_hash'}", 422)
            return _text(await self._commands.perform(command, key), 200)
        except ValueError as error:
            return _text(str(error), 422)
        except Refused as refused:
            return _text(str(refused), 409)

    # --- inside

    def _for_browsers(self, answer: _Answer) -> _Answer:
        """Refuse requests that name another host, and requests from pages of other sites."""

        async def checked(request: Request) -> Response:
            host = request.headers.get("host", "")
            if not is_of_host(host, self._hosts):
                return _text("this name of the host is not allowed: add it to hosts of lanes.web.Web", 403)
            origin = request.headers.get("origin")
            if origin is not None and origin.partition("://")[2] != host:
                return _text("a page of another site may not use this port", 403)
            return await answer(request)

        return checked

    async def _snapshots(self) -> AsyncIterator[bytes]:
        while True:
            await self._refresh()
            now = page_of(
                self._board,
                show_keys=self._web.show_keys,
                operate=self._commands is not None,
                lines=self._lines.newest(),
            )
            yield b"data: " + written(now) + b"\n\n"
            for _ in range(_LOOKS):
                if self._closed:
                    return
                await asyncio.sleep(FRESH / _LOOKS)

    def _renew(self) -> None:
        """Request a new snapshot, unless the latest one is fresh, so that ``silent`` grows if the loop stands still."""
        if self._board.age >= FRESH:
            self._board.ask()

    async def _refresh(self) -> None:
        """Wait briefly for a new snapshot, unless the latest snapshot is recent or the loop does not answer."""
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


async def _key_of(request: Request) -> str | None:
    """Return the hash of the key in the body of a command; None = no key. Raises ``ValueError`` for a wrong body."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_LIMIT:
            raise ValueError(f"the body has more than {_BODY_LIMIT} bytes")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is no JSON") from None
    if not isinstance(fields, dict) or not fields.keys() <= {"key_hash"}:
        raise ValueError('the body must be {} or {"key_hash": "…"}')
    key = fields.get("key_hash")
    if key is not None and not isinstance(key, str):
        raise ValueError("key_hash must be a text")
    return key


def _json(value: dict[str, Any], good: bool) -> Response:
    return Response(written(value), 200 if good else 503, _HEADERS, media_type="application/json")


def _text(line: str, status: int) -> Response:
    return Response(f"{line}\n", status, _HEADERS, media_type="text/plain")
