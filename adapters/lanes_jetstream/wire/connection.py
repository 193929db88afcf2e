"""A connection to NATS: the user's own, or one that is opened and closed here. Maps the client's errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from lanes.errors import ConfigError, SourceError

log = logging.getLogger("lanes.jetstream")

Server = str | Client | JetStreamContext
"""A URL (or several, separated by commas), a connected client, or its JetStream context."""

CONNECT_TIMEOUT: Final = 10.0
"""Seconds to reach a server at the start; later losses are waited for without limit."""

API_TIMEOUT: Final = 5.0
"""Seconds for one request to the JetStream API."""

RECONNECT_WAIT: Final = 0.25
"""Seconds between two attempts to reconnect."""

FLUSH_PATIENCE: Final = 86_400
"""Seconds the client itself waits for a flush: longer than any server stays frozen. See ``Connection.flush``."""

OLDEST_SERVER: Final = (2, 11)
"""The oldest nats-server this was tested with, as major and minor version."""

# Error codes of the JetStream API, as in `ApiError.err_code`.
CONSUMER_NOT_FOUND: Final = 10014
CONSUMER_NAME_TAKEN: Final = frozenset({10013, 10148})
CONSUMER_NOT_UNIQUE: Final = frozenset({10099, 10100})
"""A work queue has a consumer already that filters some of the same subjects."""
NO_MORE_CONSUMERS: Final = 10026

STREAM_NOT_FOUND: Final = 10059
STREAM_NAME_TAKEN: Final = 10058

MESSAGE_NOT_FOUND: Final = 10037
WRONG_REVISION: Final = frozenset({10071, 10164})
"""The last sequence of a subject is another one than expected."""

NO_JETSTREAM: Final = frozenset({10039, 10076})
"""There is none on the server or for the account, with the same status as what is over in a moment."""

_DENIAL_POLL_INTERVAL: Final = 0.1
"""Seconds between two looks at whether the server has refused a request for want of a permission: it says so, but not
as the answer."""

_PAGES: Final = 1_000
"""Pages of a listing that are read at most: more would be an answer that never ends."""

_DENIED: Final = re.compile(r'permissions violation for .*"([^"]+)"', re.IGNORECASE)

_SCHEME: Final = re.compile(r"(nats|tls|ws|wss)://")
_SERVER: Final = re.compile(
    r"((?:nats|tls|ws|wss)://)?((?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?)(?:[/?#].*)?"
)
"""A server of a URL: its scheme, its host and port, and what is not shown."""


class ApiError(Exception):
    """The JetStream API refused a request. ``err_code`` is the server's own number for it.

    ``temporary``: it may do the same later, as when there is no leader or no room.
    """

    def __init__(self, err_code: int, description: str, code: int = 0) -> None:
        remedy = ": enable JetStream on the server (-js) and for this account" if err_code in NO_JETSTREAM else ""
        super().__init__(f"{description} ({err_code}){remedy}")
        self.err_code = err_code
        self.temporary = code == 503 and err_code not in NO_JETSTREAM


class NoAnswer(Exception):
    """The JetStream API did not answer: no connection, no leader, or no permission.

    ``temporary``: it may do so later.
    """

    temporary = True


class NoJetStream(NoAnswer):
    """Nobody is there to answer: JetStream is off, on the server or for the account."""

    temporary = False


class NotPermitted(NoAnswer):
    """The server has said that this client may not ask."""

    temporary = False


class Denials:
    """What the server denies a client from now on, of subjects that are ``ours``.

    What is only published is not answered: no other sign is given of what is not permitted, or not any more. ``ours``
    is asked with the subject in small letters: that is all that the client leaves of it.
    """

    def __init__(self, client: Client, ours: Callable[[str], bool]) -> None:
        self._client = client
        self._ours = ours
        self._seen = client.last_error

    def new(self) -> str | None:
        """The last thing the server has said since the last call, with the remedy, if that denies one of them."""
        seen, self._seen = self._seen, self._client.last_error
        if self._seen is None or self._seen is seen:
            return None
        found = _DENIED.search(str(self._seen))
        if found is None or not self._ours(found[1].casefold()):
            return None
        return f"{str(self._seen).removeprefix('nats: ')}: permit it"


class Connection:
    """One client and the API prefix of its JetStream context; asyncio only."""

    def __init__(self, server: Server) -> None:
        if not isinstance(server, str | Client | JetStreamContext) or server == "":
            raise ConfigError(
                # Not its repr: a list of URLs has credentials in it.
                f"a {type(server).__name__} is no NATS connection: pass a URL (or several with commas), a connected "
                "nats client, or its jetstream()"
            )
        self._flushes: set[asyncio.Task[None]] = set()
        self._reopening = asyncio.Lock()
        self._url = server if isinstance(server, str) else None
        self._client = server if isinstance(server, Client) else None
        self._prefix = "$JS.API"
        if isinstance(server, JetStreamContext):
            # nats-py has no public name for either; a domain or an account prefix must not be lost.
            self._prefix = server._prefix
            self._client = server._nc

    @property
    def client(self) -> Client:
        """The client; ``reopen`` may make another one. Not before ``open`` where a URL was given."""
        assert self._client is not None, "open() comes first"
        return self._client

    @property
    def servers(self) -> str:
        """Scheme, host and numeric port of the servers, for messages; … for what may be anything else."""
        if self._url is None:
            return "the given connection"
        scheme = _SCHEME.match(self._url)
        shown = []
        # A password may hold any character: nothing before the last @ of all is shown.
        for server in self._url.rpartition("@")[2].split(","):
            found = _SERVER.fullmatch(server)
            if found is None:
                # With the host forgotten it is the password, or a part of it.
                return f"{scheme[0]}…" if scheme else "…"
            shown.append(found[2])
        return (scheme[0] if scheme else "") + ",".join(shown)

    async def open(self) -> None:
        """Connect if a URL was given, else check that the client is connected. Idempotent.

        Raises ``SourceError`` when no server is reached within ``CONNECT_TIMEOUT``, ``ConfigError`` off asyncio.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError('JetStream needs asyncio: nats-py has no trio; run with backend="asyncio"') from None
        if self._url is None:
            if self.client.is_closed or not (self.client.is_connected or self.client.is_reconnecting):
                raise SourceError("the given NATS connection is not connected: await nats.connect(…) first")
        elif self._client is None:
            self._client = await self._connect(self._url)

    async def _connect(self, url: str, *, retryable: bool = False) -> Client:
        client = Client()
        seen: dict[bool, Exception] = {}
        loop = asyncio.get_running_loop()
        give_up: float | None = loop.time() + CONNECT_TIMEOUT

        async def note(error: Exception) -> None:
            # The client reports every failed attempt here; without a callback it prints a traceback each time.
            seen[isinstance(error, nats.errors.Error)] = error
            log.debug("%s: %s", self.servers, error)
            if give_up is not None and loop.time() > give_up:
                # A cancellation that meets the end of an attempt is lost in the client, which then tries for ever.
                raise TimeoutError

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await client.connect(
                    url.split(","),
                    error_cb=note,
                    connect_timeout=2,
                    max_reconnect_attempts=-1,
                    # Typed int by the client, used as any number of seconds.
                    reconnect_time_wait=RECONNECT_WAIT,  # type: ignore[arg-type]
                )
            give_up = None
        except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
            # What the server said, such as a refused login, before that it hung up after saying so.
            cause = seen.get(True) or seen.get(False) or error
            # One that was refused before its first attempt, such as a bad URL, has nothing to close and says so.
            with contextlib.suppress(AssertionError):
                await client.close()
            # A URL that cannot be parsed is quoted by what refuses it.
            why = "" if isinstance(cause, ValueError) else f": {cause}"
            raise SourceError(
                f"no NATS server reached at {self.servers} within {CONNECT_TIMEOUT:g} s "
                f"({type(cause).__name__}{why}): start it, or correct the URL or the credentials",
                retryable=retryable,
            ) from None
        except BaseException:
            # Cancelled: nobody else has it, and by itself it would try for ever.
            with contextlib.suppress(AssertionError):
                await client.close()
            raise
        return client

    @property
    def own(self) -> bool:
        """Whether it was opened here."""
        return self._url is not None

    @property
    def server_version(self) -> tuple[int, int]:
        """Major and minor version of the server that the client is connected to; (0, 0) where that is not known."""
        version = self.client.connected_server_version
        try:
            return version.major, version.minor
        except ValueError:
            return 0, 0

    def check_server(self) -> None:
        """Raise ``ConfigError`` for a server older than ``OLDEST_SERVER``. One that does not say is let pass."""
        found = self.server_version
        if (0, 0) < found < OLDEST_SERVER:
            raise ConfigError(
                f"{self.servers}: nats-server {found[0]}.{found[1]} is too old: lanes needs "
                f"{OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer; upgrade the server"
            )

    async def reopen(self) -> None:
        """Connect anew where the client has given up, as it does when the server hangs up on a message; else nothing.

        Not for a connection that was given. Raises a retryable ``SourceError`` when no server is reached in time: the
        next call tries again. Cancel-safe.
        """
        async with self._reopening:
            # Of several that wait for it the first one has done it for all.
            if self._url is not None and self.client.is_closed:
                self._client = await self._connect(self._url, retryable=True)

    async def close(self) -> None:
        """Close a connection that was opened here; the user's own stays as it is. Idempotent."""
        if self._url is None:
            return  # A flush that still waits stays too: to cancel it would make the user's client deaf.
        if self._client is not None and not self._client.is_closed:
            await self._client.close()
        for flush in self._flushes:
            flush.cancel()

    async def flush(self, timeout: float = API_TIMEOUT) -> None:
        """Return when the server has read everything published so far, or raise after ``timeout`` seconds.

        Raises ``SourceError`` (retryable). Cancel-safe.
        """
        # A task of its own that nothing ends early: the client's read loop dies of the answer to a flush that was
        # cancelled or timed out, so only the waiting for it is bounded.
        flush = asyncio.create_task(self.client.flush(timeout=FLUSH_PATIENCE))
        self._flushes.add(flush)
        flush.add_done_callback(self._flushed)
        await asyncio.wait([flush], timeout=timeout)
        if not flush.done():
            raise SourceError(f"{self.servers}: not flushed within {timeout:g} s", retryable=True)
        try:
            flush.result()
        except (nats.errors.Error, TimeoutError, OSError, asyncio.CancelledError) as error:
            raise SourceError(f"{self.servers}: not flushed: {type(error).__name__}", retryable=True) from error

    def _flushed(self, flush: asyncio.Task[None]) -> None:
        self._flushes.discard(flush)
        if not flush.cancelled():
            flush.exception()

    async def api(self, subject: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        """One request to the JetStream API.

        Raises ``ApiError`` for a refusal, ``NoAnswer`` when nothing answers in time (``NoJetStream`` when nobody is
        there to, ``NotPermitted`` as soon as the server denies it), and ``SourceError`` when the connection is closed
        for good.
        """
        body = json.dumps(request).encode() if request is not None else b""
        try:
            answer = await self._request(self.api_subject(subject), body)
        except nats.errors.NoRespondersError:
            raise NoJetStream(
                f"{self.servers}: JetStream does not answer: enable it on the server (-js) and for this account"
            ) from None
        except nats.errors.ConnectionClosedError:
            raise SourceError(f"{self.servers}: the connection is closed and does not come back: start again") from None
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise NoAnswer(
                f"{self.servers}: no answer to {subject} ({type(error).__name__}): see that the server is up and the "
                f"stream has a leader, and that this client may publish to {self.api_subject(subject)}"
            ) from None
        fields = json_object(answer, f"{self.servers}: {subject}")
        refusal = fields.get("error")
        if refusal:
            raise ApiError(
                int(refusal.get("err_code", 0)),
                str(refusal.get("description", "unknown error")),
                int(refusal.get("code", 0)),
            )
        return fields

    def failed(self, what: str, error: ApiError | NoAnswer) -> SourceError:
        """What to raise where the API refused a request, or did not answer it.

        ``what`` was asked for, or of which stream, consumer or bucket; not with the servers. Retryable where the error
        is temporary.
        """
        # Where nothing has answered it says itself whom it asked.
        where = f" at {self.servers}" if isinstance(error, ApiError) else ""
        return SourceError(f"{what}{where}: {error}", retryable=error.temporary)

    async def _request(self, subject: str, body: bytes) -> Msg:
        denials = Denials(self.client, subject.casefold().__eq__)
        request = asyncio.create_task(self.client.request(subject, body, timeout=API_TIMEOUT))
        try:
            while not request.done():
                await asyncio.wait([request], timeout=_DENIAL_POLL_INTERVAL)
                denied = denials.new()
                if denied is not None and not request.done():
                    raise NotPermitted(f"{self.servers}: {denied}")
            return request.result()
        finally:
            request.cancel()

    def api_subject(self, name: str) -> str:
        """Where requests of this name to the JetStream API go."""
        return f"{self._prefix}.{name}"

    def next_subject(self, stream: str, durable: str) -> str:
        """Where pull requests of a consumer go."""
        return self.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{durable}")


def json_object(answer: Msg, what: str) -> dict[str, Any]:
    """The object that an answer is. Raises ``SourceError`` for what is none; ``what`` was asked."""
    try:
        fields = json.loads(answer.data)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise SourceError(f"{what}: the answer is no JSON object: see that it is a nats-server")
    return fields


async def read_pages(
    ask: Callable[[int], Awaitable[dict[str, Any]]], found: Callable[[dict[str, Any]], Iterable[Any]]
) -> list[Any]:
    """All that a listing of the API has. ``ask`` is called with how many to pass over; ``found``: those of a page."""
    listed: list[Any] = []
    for _ in range(_PAGES):
        page = await ask(len(listed))
        before = len(listed)
        listed += found(page)
        if len(listed) == before or len(listed) >= int(page.get("total", 0)):
            break
    return listed


def unix_seconds(stamp: object) -> float:
    """A server's time stamp, in seconds since 1970. Raises ``SourceError`` for what is none."""
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        raise SourceError(
            f"the server says {stamp!r:.60}, which is no time: see that it is a nats-server of 2.11 or newer"
        ) from None
