"""Stores the leases of a cohort in a KV bucket. Writes compare the revision, and entries expire by a message TTL.

A bucket is a stream with one message for each key, and a revision is the sequence of the message. The store sends raw
requests, which only the stream's leader answers. The client's KV class sets no TTL on an update, and replicas may
answer its reads. A change that ``watch`` reports is only a hint.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lanes.clock import monotonic
from lanes.cohort.leases import Conflict, Entry, UnknownResult
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.cohort.settings import NAME
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, fields_of, read_pages
from lanes_jetstream.wire.connection import CLOSED, Connection, Denials, NoAnswer, NoJetStream, NotPermitted
from lanes_jetstream.wire.stream import START_PATIENCE, find_or_create

log = logging.getLogger("lanes.jetstream")

TIMEOUT: Final = 1.5
"""Seconds allowed for one request. After this time the result of the request is unknown."""

MARKER_SECONDS: Final = 60
"""Seconds for which the server keeps the marker of an expired key."""

_READS: Final = 32
"""Maximum number of concurrent reads."""

_POLL_INTERVAL: Final = 0.05
"""Seconds between two checks of a lost connection."""


_API_LEVEL: Final = 1
"""Lowest API level of servers with message TTLs: nats-server 2.11."""

_BUCKET: Final = re.compile(r"[A-Za-z0-9_-]+")
_KEY: Final = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")


def bucket_name(stream: str, namespace: str) -> str:
    """Return the name of a cohort's bucket, which is unique for each stream and namespace.

    The name is ``lanes_<stream>_<namespace>``. For a namespace with an underscore, the name is
    ``lanes-<length>_<stream>_<namespace>``, because the stream's name may contain underscores too.
    """
    return f"lanes-{len(namespace)}_{stream}_{namespace}" if "_" in namespace else f"lanes_{stream}_{namespace}"


def namespace_of(bucket: str, stream: str) -> str | None:
    """Find the namespace in the name of a bucket; None = no cohort of this stream has a bucket of this name."""
    named = re.fullmatch(rf"lanes(?:-[0-9]+)?_{re.escape(stream)}_({NAME.pattern})", bucket)
    return named[1] if named is not None and bucket_name(stream, named[1]) == bucket else None


class _NobodyThere(UnknownResult):
    """Error: no server has read the request, so the request has no effect."""


class JetStreamLeaseStore:
    """A KV bucket as a ``lanes.cohort.leases.LeaseStore``. Needs asyncio.

    After a deletion of the bucket during the run, the store creates an empty bucket. The members then find no lease,
    and lose their partitions. The first revision of the new bucket is the time in milliseconds since 1970, or a higher
    number if this store has seen a higher revision. The new bucket therefore repeats no revision of the lost bucket.

    Args:
        connection: Connection to the server.
        bucket: Name of the bucket.
        replicas: Number of copies of a bucket that the store creates, 1 to 5.
        timeout: Seconds that a request waits for its answer, more than 0.
    """

    def __init__(self, connection: Connection, bucket: str, *, replicas: int = 1, timeout: float = TIMEOUT) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(
                f"bucket {bucket!r}: a KV bucket's name may contain only letters, digits, - and _; rename the stream "
                "or the cohort"
            )
        self._connection = connection
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._subjects = f"$KV.{bucket}."
        self._replicas = replicas
        self._timeout = timeout
        self._highest = 0
        self._watches: list[Subscription] = []

    def __repr__(self) -> str:
        return f"<JetStreamLeaseStore {self._bucket}>"

    async def open(self) -> bool:
        """Find or create the bucket, and check its configuration. Idempotent.

        Returns:
            Whether the store created the bucket.

        Raises:
            ConfigError: The bucket does not fit, the server is too old, or JetStream is off.
            SourceError: The server does not answer, or a permission is missing.
        """
        with self._connection.api_errors(f"bucket {self._bucket!r}"):
            return await self._find_or_make(START_PATIENCE)

    async def watch(self, patterns: Sequence[str], changed: Callable[[str], None]) -> None:
        """Call ``changed`` with the key whenever a client writes a key of these patterns.

        A call is only a hint, because the store may miss changes. The subscription ends with the connection, or with
        ``aclose``.
        """

        async def receive(message: Msg) -> None:
            changed(message.subject.removeprefix(self._subjects))

        for pattern in patterns:
            self._watches.append(await self._connection.client.subscribe(f"{self._subjects}{pattern}", cb=receive))

    async def aclose(self) -> None:
        """End the subscriptions of ``watch``. The bucket remains, and the connection stays open. Idempotent."""
        while self._watches:
            watch = self._watches.pop()
            if not self._connection.client.is_closed:
                await watch.unsubscribe()

    # --- lanes.cohort.leases.LeaseStore

    async def read(self, key: str) -> Entry:
        """Read the newest entry of a key; see ``lanes.cohort.leases.LeaseStore.read``."""
        request = json.dumps({"last_by_subj": self._subject(key)}).encode()
        subject = self._connection.api_subject(f"STREAM.MSG.GET.{self._stream}")
        try:
            return self._entry(key, await self._ask(subject, request, f"read of {key!r}"))
        except ApiError as error:
            if error.err_code == codes.STREAM_NOT_FOUND:
                await self._make_anew()
            elif error.err_code not in codes.MESSAGE_NOT_FOUND:
                raise self._refused(f"read of {key!r}", error) from None
        return Entry(None, 0)

    async def write(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None,
        ttl: float | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        """Write a key and return its new revision; see ``lanes.cohort.leases.LeaseStore.write``."""
        return await self._put(key, value, self._conditions(key, revision, ttl, fence))

    async def delete(self, key: str, *, revision: int) -> None:
        """Delete a key, as an operator does. A deleted key has no value.

        Args:
            key: The key.
            revision: Revision that the key must have.

        Raises:
            Conflict: The key has another revision.
            UnknownResult: No answer arrived.
            SourceError: The server refused the deletion.
        """
        headers = {**self._conditions(key, revision, None, None), "KV-Operation": "DEL"}
        await self._put(key, b"", headers)

    async def entries(self, prefix: str) -> Mapping[str, Entry]:
        """Read the keys that have a prefix and a value; see ``lanes.cohort.leases.LeaseStore.entries``.

        Args:
            prefix: Whole tokens with a dot at the end; empty = all keys.

        Returns:
            The entries by key.
        """
        if prefix and not (prefix.endswith(".") and _KEY.fullmatch(prefix[:-1])):
            raise ValueError(f"prefix {prefix!r}: must be empty, or whole tokens with a dot at the end")
        keys = await self._keys(prefix)
        turns = asyncio.Semaphore(_READS)

        async def read(key: str) -> Entry:
            async with turns:
                return await self.read(key)

        try:
            async with asyncio.TaskGroup() as tasks:
                reads = {key: tasks.create_task(read(key)) for key in keys}
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return {key: read.result() for key, read in reads.items() if read.result().value is not None}

    # --- requests

    async def _put(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        # A client that uses an API prefix, for an account or a domain, reaches the buckets by the same prefix.
        prefix = "" if self._connection.api_subject("") == "$JS.API." else self._connection.api_subject("")
        try:
            answer = await self._ask(prefix + self._subject(key), value, f"write of {key!r}", headers)
        except _NobodyThere:
            await self._look_for_bucket(key)
            raise Conflict(f"{key!r}: the bucket {self._bucket!r} is new, and empty") from None
        except ApiError as error:
            if error.err_code in codes.WRONG_REVISION:
                raise Conflict(f"{key!r}: {error}") from None
            raise self._refused(f"write of {key!r}", error) from None
        self._highest = max(self._highest, int(answer["seq"]))
        return int(answer["seq"])

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key!r}: must be tokens of letters, digits and - _ = / with dots between them")
        return self._subjects + key

    def _conditions(
        self, key: str, revision: int | None, ttl: float | None, fence: tuple[str, int] | None
    ) -> dict[str, str]:
        headers: dict[str, str] = {}
        if fence is not None:
            if revision is not None:
                raise ValueError(f"write of {key!r}: a revision and a fence exclude each other")
            headers["Nats-Expected-Last-Subject-Sequence"] = str(fence[1])
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = self._subject(fence[0])
        elif revision is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        else:
            raise ValueError(f"write of {key!r}: needs a revision or a fence, or it could undo another client's write")
        if ttl is not None:
            # The server ignores fractions: 1.9 s would be 1 s.
            if ttl < 1 or ttl != int(ttl):
                raise ValueError(f"ttl={ttl!r}: must be whole seconds, 1 or more")
            headers["Nats-TTL"] = f"{int(ttl)}s"
        return headers

    async def _ask(self, subject: str, body: bytes, what: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Send one request, never after the timeout, and wait for the answer.

        Raises ``ApiError`` for a refusal, ``UnknownResult`` without an answer, ``_NobodyThere`` without a server, and
        ``SourceError`` for a missing permission or a closed connection.
        """
        client = self._connection.client
        denials, sent_at = Denials(client, subject.casefold().__eq__), monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                # A client that reconnects would keep the request, and send it after the timeout.
                while not client.is_connected:
                    if client.is_closed:
                        raise SourceError(f"{self._connection.servers}: {CLOSED}")
                    await asyncio.sleep(_POLL_INTERVAL)
                answer = await client.request(subject, body, timeout=self._timeout, headers=headers)
        except nats.errors.NoRespondersError:
            raise _NobodyThere(f"bucket {self._bucket!r}: {what} has no responder at the moment") from None
        except nats.errors.ConnectionClosedError:
            raise SourceError(f"{self._connection.servers}: {CLOSED}") from None
        except (nats.errors.Error, TimeoutError, OSError) as error:
            denied = denials.new()
            if denied is not None:
                raise SourceError(f"bucket {self._bucket!r}, {what}: {denied}, then start again") from None
            why = f"bucket {self._bucket!r}: {what} has no answer ({type(error).__name__})"
            self._connection.unanswered(sent_at, why)
            raise UnknownResult(why) from None
        self._connection.answered()
        return fields_of(answer, f"bucket {self._bucket!r}: {what}")

    def _entry(self, key: str, answer: dict[str, Any]) -> Entry:
        try:
            message = answer["message"]
            headers = base64.b64decode(message.get("hdrs") or "")
            value = base64.b64decode(message.get("data") or "")
            revision = int(message["seq"])
            self._highest = max(self._highest, revision)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceError(
                f"bucket {self._bucket!r}: the read of {key!r} has a malformed answer ({type(error).__name__}); check "
                "that the server is a nats-server"
            ) from None
        # The entry records a client's deletion of the key, or the server's expiry of the key.
        gone = b"\r\nKV-Operation:" in headers or b"\r\nNats-Marker-Reason:" in headers
        return Entry(None if gone else value, revision)

    async def _keys(self, prefix: str) -> list[str]:
        """List the keys with a prefix, including deleted and expired keys."""
        subject, what = self._connection.api_subject(f"STREAM.INFO.{self._stream}"), f"list of {prefix!r}"

        async def ask(subject: str, request: dict[str, object]) -> dict[str, Any]:
            request["subjects_filter"] = f"{self._subjects}{prefix}>"
            try:
                answer = await self._ask(subject, json.dumps(request).encode(), what)
            except ApiError as error:
                if error.err_code != codes.STREAM_NOT_FOUND:
                    raise self._refused(what, error) from None
                await self._make_anew()
                return {}
            return {**(answer.get("state") or {}), **answer}

        found = await read_pages(ask, subject, "subjects")
        return [subject.removeprefix(self._subjects) for subject in found]

    def _refused(self, what: str, error: ApiError) -> UnknownResult | SourceError:
        text = f"bucket {self._bucket!r}: {what} is refused ({error})"
        # These codes report a temporary fault of the server, such as a missing leader.
        return UnknownResult(text) if error.code in (408, 500, 503) else SourceError(text)

    # --- the bucket itself

    async def _look_for_bucket(self, key: str) -> None:
        """Create a missing bucket again. Raises ``UnknownResult`` if the bucket exists or no server answers."""
        try:
            if await self._connection.find(f"STREAM.INFO.{self._stream}", codes.STREAM_NOT_FOUND) is None:
                await self._make_anew()
                return
        except NotPermitted as error:
            raise self._failed(error) from None
        except (ApiError, NoAnswer):
            pass
        raise UnknownResult(f"bucket {self._bucket!r}: the write of {key!r} has no leader at the moment")

    async def _make_anew(self) -> None:
        try:
            if await self._find_or_make():
                log.error(
                    "bucket %r was deleted with all leases. This member has created the bucket again, and the "
                    "members acquire their partitions again. Prevent such a deletion",
                    self._bucket,
                )
        except (ApiError, NoAnswer) as error:
            failed = self._failed(error)
            # JetStream answered at the start. A missing responder therefore means that the server restarts or is
            # unreachable.
            if failed.retryable or isinstance(error, NoJetStream):
                raise UnknownResult(str(failed)) from None
            raise failed from None

    async def _find_or_make(self, patience: float = 0.0) -> bool:
        """Find or create the bucket, and check its configuration. Returns whether the call created the bucket.

        Retries after temporary errors for ``patience`` seconds.

        Raises ``ApiError``, ``NoAnswer`` and ``ConfigError``.
        """
        await self._check_server()
        config = {
            "name": self._stream,
            "description": "leases of a lanes cohort",
            "subjects": [f"{self._subjects}>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "num_replicas": self._replicas,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": False,
            "allow_msg_ttl": True,
            "subject_delete_marker_ttl": MARKER_SECONDS * 1_000_000_000,
            # The first revision is above every revision of a lost bucket, even if the clock was set back.
            "first_seq": max(time.time_ns() // 1_000_000, self._highest + 1),
        }
        info, made = await find_or_create(
            self._connection,
            self._stream,
            config,
            what=f"bucket {self._bucket!r}",
            remedy="correct the setting",
            patience=patience,
        )
        self._check(info["config"])
        return made

    def _failed(self, error: ApiError | NoAnswer) -> SourceError:
        return self._connection.failed(f"bucket {self._bucket!r}", error)

    async def _check_server(self) -> None:
        try:
            info = await self._connection.api("INFO")
        except ApiError as error:
            if error.err_code in codes.NO_JETSTREAM:
                raise ConfigError(f"{self._connection.servers}: {error}") from None
            raise
        if int((info.get("api") or {}).get("level", 0)) < _API_LEVEL:
            raise ConfigError(
                f"{self._connection.servers}: the server is too old for a cohort, which needs expiring keys; upgrade "
                "the server to 2.11 or newer, or run one process with durable=…"
            )

    def _check(self, config: Mapping[str, Any]) -> None:
        wrong = []
        if config.get("max_msgs_per_subject") != 1:
            wrong.append(f"its history is {config.get('max_msgs_per_subject')}, not 1")
        if not config.get("allow_msg_ttl"):
            wrong.append("its keys cannot expire (allow_msg_ttl)")
        if config.get("allow_direct"):
            wrong.append("replicas may answer instead of its leader (allow_direct)")
        if config.get("subjects") != [f"{self._subjects}>"]:
            wrong.append(f"its subjects are {config.get('subjects')}")
        if int(config.get("max_age") or 0) > 0:
            wrong.append(f"all of its keys expire (max_age is {int(config['max_age']) / 1e9:g} s)")
        if config.get("discard") != "new":
            limits = [limit for limit in ("max_bytes", "max_msgs") if int(config.get(limit) or 0) > 0]
            wrong += [f"at {limit}={config[limit]} it drops keys (discard is not 'new')" for limit in limits]
        if config.get("discard_new_per_subject"):
            wrong.append("it refuses a second value of a key (discard_new_per_subject)")
        if wrong:
            raise ConfigError(
                f"bucket {self._bucket!r} does not fit: {'; '.join(wrong)}; correct its stream {self._stream}, or "
                "delete the bucket while no member runs, so that lanes creates the bucket again"
            )
