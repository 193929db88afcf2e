"""Connects to NATS with the caller's client or a client of its own, and converts the client's errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from lanes.clock import monotonic
from lanes.dead_letter import printable
from lanes.errors import ConfigError, SourceError
from lanes.line_limit import FoldedLog, OutageLog
from lanes.source import BrokerContact, Outage
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, fields_of
from lanes_jetstream.wire.secure_client import NoTls, SecureClient

log = logging.getLogger("lanes.jetstream.client")

Server = str | Client | JetStreamContext
"""URL of a server (several with commas), a connected nats client, or its JetStream context."""

CLOSED: Final = "the connection is closed permanently; start again"

CONNECT_TIMEOUT: Final = 10.0
"""Seconds to reach a server at the start. After a later loss of the connection the client reconnects without limit."""

API_TIMEOUT: Final = 5.0
"""Seconds for one request to the JetStream API."""

_REFUSED: Final = "Authorization Violation"
"""Text by which a server refuses the login."""

RECONNECT_WAIT: Final = 0.25
"""Seconds between two attempts to reconnect."""

FLUSH_PATIENCE: Final = 86_400
"""Seconds that the client waits for a flush, longer than a server freeze. See ``Connection.flush``."""

OLDEST_SERVER: Final = (2, 11)
"""The oldest supported nats-server, as major and minor version."""

CREATE_PAUSES: Final = (0.05, 0.1, 0.2, 0.4)
"""Seconds before each repetition of a failed creation."""

_DENIAL_POLL_INTERVAL: Final = 0.1
"""Seconds between two checks for a permission denial. The server sends a denial separately from the answer."""

_DENIED: Final = re.compile(r'permissions violation for .*"([^"]+)"', re.IGNORECASE)

_SCHEMES: Final = ("nats", "tls", "ws", "wss")
_SCHEME: Final = re.compile(r"(nats|tls|ws|wss)://")
_SOCKET: Final = re.compile("wss?://")
_SERVER: Final = re.compile(
    r"((?:nats|tls|ws|wss)://)?((?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?)(?:[/?#].*)?"
)
"""Pattern of one server in a URL: scheme, host with port, and a rest, which no message shows."""


_PROBE_TIMEOUT: Final = 1.0
_PORT: Final = 4222
"""Port of a server whose URL contains no port."""

_VARYING: Final = re.compile(r"\d+(?:\.\d+)? ?m?s\b")
"""Pattern of the parts of an error's text that differ between repetitions."""

_WORD: Final = re.compile(r"[^\s:@/?#,=&\[\]]+")
_LONG: Final = 6
"""Minimum length of a secret word that messages hide even inside longer words."""


class NoAnswer(Exception):
    """Error of an unanswered JetStream request: no connection, no leader, or no permission.

    ``temporary`` is True if a later request may succeed.
    """

    temporary = True


class NoJetStream(NoAnswer):
    """Error: no server answers API requests, because JetStream is off on the server or for the account."""

    temporary = False


class NotPermitted(NoAnswer):
    """Error: the server denied the request."""

    temporary = False


class Denials:
    """Reports permission denials of the server.

    A denial is the only sign that the server refused a plain publish, because a publish has no answer.

    Args:
        client: The connected client.
        ours: Function that returns whether the source needs a denied subject. The client reports the subject in lower
            case.
    """

    def __init__(self, client: Client, ours: Callable[[str], bool]) -> None:
        self._client = client
        self._ours = ours
        self._seen = client.last_error

    def new(self) -> str | None:
        """Return a new denial of a needed subject, with the remedy; None = no such denial since the last call."""
        seen, self._seen = self._seen, self._client.last_error
        if self._seen is None or self._seen is seen:
            return None
        found = _DENIED.search(str(self._seen))
        if found is None or not self._ours(found[1].casefold()):
            return None
        return f"{str(self._seen).removeprefix('nats: ')}; grant this permission"


class Connection:
    """One client and the API prefix of its JetStream context. Needs asyncio."""

    def __init__(self, server: Server) -> None:
        if server == "":
            raise ConfigError(
                "the URL of the NATS server is empty, perhaps because an environment variable is not set; pass a URL, "
                "such as nats://localhost:4222"
            )
        if not isinstance(server, str | Client | JetStreamContext):
            raise ConfigError(
                # The text omits the value, because a list of URLs may contain credentials.
                f"a {type(server).__name__} is no NATS connection; pass a URL (or several with commas), a connected "
                "nats client, or its jetstream()"
            )
        self._flushes: set[asyncio.Task[None]] = set()
        self._reopening = asyncio.Lock()
        # Whether a server answers requests to the JetStream API, or to the bucket of a cohort.
        self.contact = BrokerContact()
        self._url = server if isinstance(server, str) else None
        if self._url is not None:
            _check_url(self._url)
        self._owner = ""
        self._shown = f"NATS client at {self.servers}"
        self._log = FoldedLog(log, self._shown, monotonic)
        self._outage_log = _outage_log(self.servers)
        # The outages of the sources that use the connection.
        self._outages: list[Callable[[], Outage | None]] = []
        # The last error that the client reported, and its time. A caller's client reports errors to the caller.
        self._last_error: tuple[str, float] | None = None
        self._client = server if isinstance(server, Client) else None
        self._prefix = "$JS.API"
        if isinstance(server, JetStreamContext):
            # nats-py has no public names for the prefix and the client. The prefix of a domain or account must be kept.
            self._prefix = server._prefix
            self._client = server._nc

    @property
    def client(self) -> Client:
        """The current client, which ``reopen`` may replace. With a URL, call ``open`` first."""
        assert self._client is not None, "open() comes first"
        return self._client

    @property
    def servers(self) -> str:
        """Scheme, host and numeric port of the servers, for messages; … replaces text that may hold a password."""
        if self._url is None:
            return "the given connection"
        scheme = _SCHEME.match(self._url)
        shown = []
        # A password may contain any character, so show only the text after the last @.
        for server in self._url.rpartition("@")[2].split(","):
            found = _SERVER.fullmatch(server)
            if found is None:
                # If the host is missing, the text may be the password or a part of the password.
                return f"{scheme[0]}…" if scheme else "…"
            shown.append(found[2])
        return (scheme[0] if scheme else "") + ",".join(shown)

    def serve(self, name: str) -> None:
        """Set the name of the owner, for log lines of the client and errors of ``open``. Call this method first."""
        self._owner = f"{name}: "
        self._shown = f"{self._owner}NATS client at {self.servers}"
        self._log = FoldedLog(log, self._shown, monotonic)
        self._outage_log = _outage_log(f"{self._owner}{self.servers}")

    async def open(self) -> None:
        """Connect to the URL, or check that the caller's client is connected. Idempotent.

        Raises ``SourceError`` if the call reaches no server within ``CONNECT_TIMEOUT``, or the caller's client is not
        connected. Raises ``ConfigError`` outside asyncio, or if the caller's client belongs to another event loop.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError(
                'JetStream needs asyncio, because nats-py does not support trio; run with backend="asyncio"'
            ) from None
        if self._url is None:
            if self.client.is_closed or not (self.client.is_connected or self.client.is_reconnecting):
                raise SourceError(f"{self._owner}the given NATS client is not connected; await nats.connect(…) first")
            # nats-py has no public name for the loop of a client, and only this loop runs the task that reads answers.
            reading = getattr(self.client, "_reading_task", None)
            if reading is not None and reading.get_loop() is not asyncio.get_running_loop():
                raise ConfigError(
                    "the given NATS client was connected in another event loop, so the client receives no answer; "
                    "await nats.connect(…) in the event loop of the consumer, or pass the URL"
                )
        elif self._client is None:
            self._client = await self._connect(self._url)

    async def _connect(self, url: str, *, retryable: bool = False) -> Client:
        if _SOCKET.match(url) and importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                "server: ws:// and wss:// need aiohttp, which is not installed; pip install aiohttp, or use nats:// "
                "or tls://"
            )
        client = SecureClient()
        seen: dict[bool, Exception] = {}
        loop = asyncio.get_running_loop()
        give_up: float | None = loop.time() + CONNECT_TIMEOUT

        async def note(error: Exception) -> None:
            # The client reports each failed attempt here. Without a callback the client prints a traceback each time.
            seen[isinstance(error, nats.errors.Error)] = error
            if give_up is not None and isinstance(error, NoTls):
                sent = "user and password" if "@" in url else "the messages"
                raise ConfigError(
                    f"server: {self.servers} offers no TLS, so {sent} would be sent in clear text; turn on TLS at the "
                    "server, or write nats:// in place of tls://"
                )
            if give_up is not None and _REFUSED in str(error) and "," not in url:
                why = printable(self._hidden(str(error)))
                raise SourceError(
                    f"{self._owner}login refused at {self.servers} ({why}); correct the user and the password, the "
                    "token or the credentials",
                    retryable=retryable,
                )
            self._note(error)
            if give_up is not None and loop.time() > give_up:
                # The client loses a cancellation at the end of an attempt, and then retries forever.
                raise TimeoutError

        async def note_reconnect() -> None:
            self._log.end()
            log.info("%s: connected again", self._shown)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await client.connect(
                    url.split(","),
                    error_cb=note,
                    reconnected_cb=note_reconnect,
                    connect_timeout=2,
                    max_reconnect_attempts=-1,
                    # The client's type is int, but the client accepts any number of seconds.
                    reconnect_time_wait=RECONNECT_WAIT,  # type: ignore[arg-type]
                )
            give_up = None
        except BaseException as error:
            # After a cancellation the client would retry forever, and no other code can close the client. A client that
            # failed before its first attempt, for example because of an invalid URL, needs no close.
            with contextlib.suppress(AssertionError):
                await client.close()
            if not isinstance(error, TimeoutError | nats.errors.Error | OSError | ValueError):
                raise
            # Prefer the server's own error, such as a refused login, to the later error about the disconnection.
            cause = seen.get(True) or seen.get(False) or error
            # A parser error quotes the URL with its credentials.
            why = "" if isinstance(cause, ValueError) else f": {self._hidden(str(cause))}"
            if isinstance(cause, TimeoutError) and await _accepts(url):
                raise SourceError(
                    f"{self._owner}{self.servers} accepts connections, but did not answer like a NATS server within "
                    f"{CONNECT_TIMEOUT:g} s. Correct the address if it is the address of another server, or restart "
                    "the NATS server",
                    retryable=retryable,
                ) from None
            raise SourceError(
                f"{self._owner}no NATS server reached at {self.servers} within {CONNECT_TIMEOUT:g} s "
                f"({type(cause).__name__}{why}); start the server, or correct the URL or the credentials",
                retryable=retryable,
            ) from None
        self._log.end()
        return client

    def _note(self, error: Exception) -> None:
        """Log an error that the client reports."""
        # A parser error quotes the URL with its credentials.
        text = "" if isinstance(error, ValueError) else printable(self._hidden(str(error)))
        if isinstance(error, TimeoutError) and not text:
            text = "no answer of a NATS server in time"
        kind = type(error).__name__
        line = f"{kind}: {text}" if text else kind
        self._last_error = line, monotonic()
        self._log.write(logging.WARNING, f"{kind} {_VARYING.sub('', text)}", line)

    def _hidden(self, text: str) -> str:
        """Return a text with … in place of each word of the URL that ``servers`` does not show, such as a password."""
        words = set(_WORD.findall(self._url or "")) - set(_WORD.findall(self.servers))
        for word in sorted(words, key=len, reverse=True):
            # A short word may be part of a longer word by chance.
            side = "" if len(word) >= _LONG else r"\b"
            text = re.sub(side + re.escape(word) + side, "…", text)
        return text

    def last_error(self) -> tuple[str, float | None]:
        """The last error of the client, and its age in seconds; age None = unknown, ("", None) = no error."""
        if self._last_error is not None:
            text, at = self._last_error
            return text, monotonic() - at
        error = self._client.last_error if self._url is None and self._client is not None else None
        return ("" if error is None else f"{type(error).__name__}: {printable(str(error))}"), None

    def outage(self) -> Outage | None:
        """The present outage; None = a server answers. Any thread may call this method."""
        return self.contact.outage(*self.last_error())

    def answered(self) -> None:
        """Record that a server has answered, and log the end of an outage."""
        self.contact.answered()
        self._outage_log.look(None)

    def unanswered(self, sent_at: float, error: str) -> None:
        """Record that no server has answered a request in time, and log an outage.

        Args:
            sent_at: Time at which the client sent the request.
            error: Text of the failure, without secrets.
        """
        self.contact.unanswered(sent_at, error)
        if (outage := self.outage()) is not None:
            # A busy server may answer no requests for a moment, and still deliver.
            found = [each() or Outage(0.0) for each in self._outages]
            self._outage_log.look(outage._replace(seconds=min([outage.seconds, *(each.seconds for each in found)])))

    def watch_outages(self, outage: Callable[[], Outage | None]) -> None:
        """Log an outage only if this function of a source also reports an outage."""
        self._outages.append(outage)

    @property
    def server_version(self) -> tuple[int, int]:
        """Major and minor version of the connected server; (0, 0) = unknown."""
        version = self.client.connected_server_version
        try:
            return version.major, version.minor
        except ValueError:
            return 0, 0

    def check_server(self) -> None:
        """Raise ``ConfigError`` for a server older than ``OLDEST_SERVER``.

        The check accepts a server with an unknown version.
        """
        found = self.server_version
        if (0, 0) < found < OLDEST_SERVER:
            raise ConfigError(
                f"{self.servers}: nats-server {found[0]}.{found[1]} is too old; upgrade it to "
                f"{OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer"
            )

    async def reopen(self) -> None:
        """Connect again if the client is closed, for example after the server has refused the size of a message.

        Does nothing for a caller's client. Cancel-safe. Raises a retryable ``SourceError`` if the call reaches no
        server in time.
        """
        async with self._reopening:
            # If several callers wait, the first caller reconnects for all callers.
            if self._url is not None and self.client.is_closed:
                self._client = await self._connect(self._url, retryable=True)

    async def close(self) -> None:
        """Close a connection that ``open`` opened. A caller's client stays open. Idempotent."""
        if self._url is None:
            return  # Do not cancel a waiting flush, because that would end the read loop of the caller's client.
        client = self._client
        if client is not None and not client.is_closed:
            if not client.is_connected:
                # The client would flush its unsent data to the lost connection, and would never finish its close.
                client._pending, client._pending_data_size = [], 0
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()
        self._log.end()
        for flush in self._flushes:
            flush.cancel()

    async def flush(self, timeout: float = API_TIMEOUT) -> None:
        """Wait until the server has read all earlier published messages, at most ``timeout`` seconds.

        Cancel-safe. Raises a retryable ``SourceError`` if the flush fails or exceeds the timeout.
        """
        # A separate task flushes and never ends early, because an answer to a cancelled flush ends the client's read
        # loop. The timeout bounds only the wait for the task. The task begins after the client has written the
        # published data. The ping of an earlier flush would overtake this data.
        flush = asyncio.create_task(self.client.flush(timeout=FLUSH_PATIENCE))
        self._flushes.add(flush)
        flush.add_done_callback(self._flushes.discard)
        flush.add_done_callback(retrieve)
        await asyncio.wait([flush], timeout=timeout)
        if not flush.done():
            raise SourceError(
                f"{self.servers}: the server did not confirm a flush within {timeout:g} s; check that the server is up",
                retryable=True,
            )
        try:
            flush.result()
        except (nats.errors.Error, TimeoutError, OSError, asyncio.CancelledError) as error:
            raise SourceError(
                f"{self.servers}: flush failed ({type(error).__name__}); check the server", retryable=True
            ) from error

    async def api(self, subject: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Send one request to the JetStream API and wait for the answer.

        If the server fails to create a consumer or a stream, the call sends the same request again, after each of
        ``CREATE_PAUSES``. A creation is idempotent: the server answers a repetition with the existing consumer or
        stream, or with an error that its name is taken.

        Args:
            subject: Name of the request, without the prefix of the API.
            request: Fields of the request, sent as JSON; None sends an empty request.

        Returns:
            The fields of the answer.

        Raises:
            ApiError: The API refused the request.
            NoAnswer: No answer arrived in time; ``NoJetStream`` if no server responds, ``NotPermitted`` after a denial.
            SourceError: The connection is permanently closed, or the answer is no JSON object.
        """
        for pause in CREATE_PAUSES:
            try:
                return await self._api(subject, request)
            except ApiError as error:
                # A client that reconnects would keep the request, and send it after the timeout.
                if error.err_code not in codes.NOT_CREATED or not self.client.is_connected:
                    raise
                log.info("%s: %s: %s; retrying", self.servers, subject, printable(str(error)))
            await asyncio.sleep(pause)
        return await self._api(subject, request)

    async def _api(self, subject: str, request: Mapping[str, object] | None) -> dict[str, Any]:
        body = json.dumps(request).encode() if request is not None else b""
        sent_at = monotonic()
        try:
            answer = await self.request(self.api_subject(subject), body)
        except nats.errors.NoRespondersError:
            off = f"{self.servers}: JetStream does not answer; enable it on the server (-js) and for this account"
            self.unanswered(sent_at, off)
            raise NoJetStream(off) from None
        except nats.errors.ConnectionClosedError:
            raise SourceError(f"{self.servers}: {CLOSED}") from None
        except (nats.errors.Error, TimeoutError, OSError) as error:
            why = (
                f"{self.servers}: no answer to {subject} ({type(error).__name__}); check that the server is up, that "
                f"the stream has a leader, and that this client may publish to {self.api_subject(subject)}"
            )
            self.unanswered(sent_at, why)
            raise NoAnswer(why) from None
        self.answered()
        return fields_of(answer, f"{self.servers}: {subject}")

    async def find(
        self, subject: str, *missing: int, request: Mapping[str, object] | None = None
    ) -> dict[str, Any] | None:
        """Send one request like ``api``. Returns None for a refusal with a code in ``missing``."""
        try:
            return await self.api(subject, request)
        except ApiError as error:
            if error.err_code not in missing:
                raise
        return None

    @contextlib.contextmanager
    def api_errors(self, what: str) -> Iterator[None]:
        """Convert ``ApiError`` and ``NoAnswer`` into the error that ``failed`` returns for ``what``."""
        try:
            yield
        except (ApiError, NoAnswer) as error:
            raise self.failed(what, error) from None

    def failed(self, what: str, error: ApiError | NoAnswer) -> SourceError:
        """Return the ``SourceError`` for a refused or unanswered request; retryable if the error is temporary.

        ``what`` names the request, stream, consumer or bucket, without the servers.
        """
        # `NoAnswer` already names the servers.
        where = f" at {self.servers}" if isinstance(error, ApiError) else ""
        return SourceError(f"{what}{where}: {error}", retryable=error.temporary)

    async def request(self, subject: str, body: bytes, timeout: float = API_TIMEOUT) -> Msg:
        """Send one request, and wait for its answer.

        Args:
            subject: Full subject of the request.
            body: Body of the request.
            timeout: Maximum wait in seconds.

        Returns:
            The answer.

        Raises:
            NotPermitted: The server denied the request.
            nats.errors.NoRespondersError: No client subscribes to the subject.
            TimeoutError: No answer arrived in time.
            nats.errors.Error: The request failed.
        """
        denials = Denials(self.client, subject.casefold().__eq__)
        request = asyncio.create_task(self.client.request(subject, body, timeout=timeout))
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
        """Return the subject of the API request ``name``."""
        return f"{self._prefix}.{name}"

    def next_subject(self, stream: str, durable: str) -> str:
        """Return the subject of pull requests to a consumer."""
        return self.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{durable}")


def _outage_log(name: str) -> OutageLog:
    waits = "no acknowledgement is confirmed"
    return OutageLog(logging.getLogger("lanes.jetstream"), name, "NATS server", waits, monotonic)


def _check_url(url: str) -> None:
    """Raise ``ConfigError`` for a URL that the client cannot use. The error shows no part that may be a password."""
    sockets = set()
    for server in url.split(","):
        scheme, has_scheme, rest = server.partition("://")
        if not has_scheme:
            scheme, rest = "nats", server
        elif scheme not in _SCHEMES:
            # A longer text, or a text with other characters, may be a part of the credentials.
            shown = f"{scheme}://" if re.fullmatch("[A-Za-z]{1,9}", scheme) else "in the URL"
            raise ConfigError(
                f"server: the scheme {shown} is not a scheme of NATS; write nats://host:4222, or use tls://, "
                "ws:// or wss://"
            )
        try:
            parsed = urlsplit(f"{scheme}://{rest}")
            valid = bool(parsed.hostname) and parsed.port != 0 and not re.search(r"\s", rest)
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(
                "server: the URL has no host, or a port outside 1 to 65535; write nats://host:4222 or "
                "nats://user:password@host:4222, with commas and no blanks between several URLs. This error hides "
                "the URL, because it may have a password"
            )
        sockets.add(scheme in ("ws", "wss"))
    if len(sockets) > 1:
        raise ConfigError(
            "server: the URLs mix websockets (ws://, wss://) with nats:// or tls://, but one client uses only one "
            "kind; write all URLs with one kind"
        )


def retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the result of a task without a waiter, so that asyncio does not report the task's error."""
    if not task.cancelled():
        task.exception()


async def _accepts(url: str) -> bool:
    """Return whether a server of a URL accepts a TCP connection within ``_PROBE_TIMEOUT`` seconds."""
    for server in url.split(","):
        place = urlsplit(server if "://" in server else f"nats://{server}")
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                _, writer = await asyncio.open_connection(place.hostname or "", place.port or _PORT)
        except (OSError, ValueError):
            continue
        writer.close()
        return True
    return False
