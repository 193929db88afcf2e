"""The durables of a cohort: one durable for each cohort partition and epoch. Creation never overwrites a durable.

Requests are raw JSON, because the client's own create call overwrites a consumer of the same name, and the client's
types drop unknown fields.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, NamedTuple

from lanes.cohort.leases import ConsumerExists, EpochConsumer, UnknownResult
from lanes.core.cohort.records import HIGHEST
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.cohort.lease_store import bucket_name
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, number, read_pages, unix_seconds
from lanes_jetstream.wire.connection import Connection, NoAnswer, NotPermitted, retrieve
from lanes_jetstream.wire.stream import start_fields

log = logging.getLogger("lanes.jetstream")

_NAME: Final = re.compile(r"-p(\d{1,5})-e(\d{1,19})(?:-(\d{1,9}))?")


NONCE: Final = "lanes-nonce"
"""Metadata of a durable: the nonce of the acquisition that created it."""

LEASE: Final = "lanes-lease"
"""Metadata of a durable: the lease time in seconds of the member that created it."""

MARKED: Final = "_lanes.cohort.mark"
"""Filter subject of a cohort's mark, without the namespace at its end. The filter subject of a partition has a number
as one token, and the filter subject of a mark has no number. No message matches both filters, so a work queue accepts a
mark beside the durables.
"""

DEFAULT_ACK_WAIT: Final = 300.0
"""Default of ``ack_wait`` in seconds, longer than a pause between two keep-alives. The expiry of a lease moves a
partition, and ack_wait has no effect on it."""

_TRIES: Final = 3

_NAMED: Final = 5
"""Maximum number of foreign consumers that an error names."""


def mark_of(namespace: str) -> str:
    """Return the name of the durable that marks a work queue as used by a cohort."""
    return f"{namespace}-cohort"


class EpochName(NamedTuple):
    """The parts of a durable's name.

    Attributes:
        partition: Number of the cohort partition.
        epoch: Epoch of the ownership.
        sub: Number of the durable within the epoch: 0 for the first durable, and 1 more after each takeover.
    """

    partition: int
    epoch: int
    sub: int

    def durable(self, namespace: str) -> str:
        """Make the durable's name ``<namespace>-p<partition>-e<epoch>``, followed by ``-<sub>`` if ``sub`` is not 0."""
        return f"{namespace}-p{self.partition}-e{self.epoch}" + (f"-{self.sub}" if self.sub else "")

    @classmethod
    def parse(cls, namespace: str, durable: object) -> EpochName | None:
        """Parse a name that ``durable`` made; None = the name has another form."""
        if not isinstance(durable, str) or not durable.startswith(namespace):
            return None
        match = _NAME.fullmatch(durable, len(namespace))
        if match is None:
            return None
        parsed = cls(int(match[1]), int(match[2]), int(match[3] or 0))
        # `durable` writes no leading zero, and no record holds an epoch above HIGHEST.
        return parsed if parsed.epoch <= HIGHEST and parsed.durable(namespace) == durable else None


@dataclass(eq=False, repr=False)
class JetStreamEpochConsumers:
    """The durables of one cohort, as ``lanes.cohort.leases.EpochConsumers``. Needs asyncio.

    Attributes:
        connection: Connection to the server.
        stream: Name of the stream.
        namespace: Namespace of the cohort.
        incarnation: Creation time of the stream. If the stream has another creation time during the run, the object
            raises an error.
        filters: Function that returns the filter subjects of a cohort partition.
        highest: Function that returns the highest sequence read by this process. If the stream ends below this
            sequence, the object raises an error.
        check: Function that raises ``ConfigError`` if the stream's configuration does not fit. The object calls the
            function after each read of the stream.
        lease: Lease time of this member in seconds, which its durables record; 0 = unknown.
        ack_wait: Seconds until the server redelivers a message, 1 or more.
        max_ack_pending: Limit of unacknowledged messages of each durable, 1 or more.
    """

    connection: Connection
    stream: str
    namespace: str
    _: KW_ONLY
    incarnation: str
    filters: Callable[[int], Sequence[str]]
    highest: Callable[[], int] = lambda: 0
    check: Callable[[Mapping[str, Any]], None] = lambda _: None
    lease: float = 0
    ack_wait: float = DEFAULT_ACK_WAIT
    max_ack_pending: int = 10_000

    def __post_init__(self) -> None:
        self._bucket = bucket_name(self.stream, self.namespace)
        self._others: list[str] = []
        self._last = 0
        self._reading = asyncio.Lock()
        self._coming: asyncio.Task[tuple[list[EpochName], int]] | None = None

    def name(self, partition: int, epoch: int, sub: int) -> str:
        """Return the name of a durable."""
        return EpochName(partition, epoch, sub).durable(self.namespace)

    # --- lanes.cohort.leases.EpochConsumers

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        """Find the durables of one cohort partition; see ``lanes.cohort.leases.EpochConsumers.found``.

        Concurrent calls share one listing, which begins after the last of these calls.

        Args:
            partition: Number of the cohort partition.

        Returns:
            The durables, by rising epoch and sub-number, and the time of the server's clock in milliseconds since 1970.
        """
        beyond = 0
        for _ in range(_TRIES):
            names, clock = await self._list()
            consumers = []
            for found, epoch, sub in names:
                if found != partition:
                    continue
                info = await self._find("INFO", self.name(partition, epoch, sub))
                if info is None:
                    break  # The durable was deleted, or its creation is not complete. List again.
                described = _described(partition, epoch, sub, info)
                if described.floor > self._last and described.floor > beyond:
                    # The message is newer than the listing. If the next listing also ends below the message, the stream
                    # has lost its last messages.
                    beyond = described.floor
                    break
                consumers.append(described)
                clock = max(clock, _milliseconds(info.get("ts")))
            else:
                return consumers, clock
        raise UnknownResult(f"stream {self.stream!r}: its consumers changed during each of {_TRIES} listings; retrying")

    async def marked(self) -> int | None:
        """Read the lease time in the mark of the stream; see ``lanes.cohort.leases.EpochConsumers.marked``."""
        info = await self._find("INFO", mark_of(self.namespace))
        return None if info is None else _lease_of(info)

    async def mark(self) -> None:
        """Mark the stream as used by a cohort; see ``lanes.cohort.leases.EpochConsumers.mark``.

        The mark is a separate durable. Raises ``SourceError`` if a foreign consumer prevents its creation.
        """
        name = mark_of(self.namespace)
        config: dict[str, object] = {
            "name": name,
            "durable_name": name,
            "description": "a cohort of lanes uses this stream",
            "ack_policy": "explicit",
            "metadata": {NONCE: "", LEASE: str(int(self.lease))},
            "filter_subject": f"{MARKED}-{self.namespace}",
        }
        try:
            await self._create(name, config)
        except ConsumerExists as error:
            if error.nonce is None:
                raise SourceError(f"{error}; delete the foreign consumers") from None
            told = await self.marked()
            if told is not None and told < int(self.lease):
                await self._create(name, config, action="update")

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        """Create a durable; see ``lanes.cohort.leases.EpochConsumers.create``."""
        name = self.name(partition, epoch, sub)
        await self._create(name, self._config(name, partition, nonce, start))

    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        """Delete a durable; see ``lanes.cohort.leases.EpochConsumers.delete``."""
        await self._find("DELETE", self.name(partition, epoch, sub))

    # --- further queries

    def check_end(self, highest: int) -> None:
        """Raise ``SourceError`` if the stream ended below ``highest`` at its last read.

        The server then reuses sequences, and the source would treat new messages as finished.

        Args:
            highest: Highest sequence that this process has read.

        Raises:
            SourceError: The stream lost messages at its end.
        """
        if self._last < highest:
            raise SourceError(
                f"stream {self.stream!r} ends at sequence {self._last} but was read up to {highest}, so the server "
                "lost messages and reuses their sequences. Check which messages are missing, stop all members, "
                f"delete the bucket {self._bucket!r} and the consumers {self.namespace}-p…, and start again"
            )

    async def names(self) -> list[EpochName]:
        """List all durables of the cohort, in order of partition, epoch and sub-number. Raises like ``found``."""
        return (await self._list())[0]

    async def newest(self, partitions: Collection[int]) -> dict[int, dict[str, Any]]:
        """Read the server's description of the newest durable of each of these partitions. Raises like ``found``.

        Args:
            partitions: Numbers of partitions, including partitions of a former, larger number.

        Returns:
            The descriptions by partition. The result omits partitions without a durable.
        """
        newest = {name.partition: name for name in await self.names() if name.partition in partitions}
        found = {number: await self._find("INFO", name.durable(self.namespace)) for number, name in newest.items()}
        return {number: info for number, info in found.items() if info is not None}

    # --- requests

    def _config(self, name: str, partition: int, nonce: str, start: int | None) -> dict[str, Any]:
        filters = self.filters(partition)
        return {
            "name": name,
            "durable_name": name,
            "description": "a cohort partition of lanes",
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait * 1e9),
            "max_deliver": -1,
            "max_ack_pending": self.max_ack_pending,
            "replay_policy": "instant",
            "metadata": {NONCE: nonce, LEASE: str(int(self.lease))},
            **({"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": list(filters)}),
            **start_fields("beginning" if start is None else max(1, start)),
        }

    async def _api(self, subject: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        try:
            # A client that reconnects would keep the request, and send it after the timeout.
            if not self.connection.client.is_connected and not self.connection.client.is_closed:
                raise NoAnswer(f"{self.connection.servers}: not connected")
            return await self.connection.api(subject, request)
        except NotPermitted as error:
            raise SourceError(f"stream {self.stream!r}: {error}, and start again") from None
        except NoAnswer as error:
            raise UnknownResult(f"stream {self.stream!r}: {error}") from None
        except ApiError as error:
            if error.temporary:
                raise UnknownResult(f"stream {self.stream!r}: {error}") from None
            if error.err_code == codes.STREAM_NOT_FOUND:
                raise SourceError(
                    f"stream {self.stream!r} was deleted while the cohort in namespace {self.namespace!r} used it; "
                    f"create it again, delete the bucket {self._bucket!r}, and start again"
                ) from None
            raise

    def _refused(self, name: str, error: ApiError) -> SourceError:
        return self.connection.failed(f"consumer {self.stream}/{name}", error)

    async def _create(
        self, name: str, config: Mapping[str, object], *, action: Literal["create", "update"] = "create"
    ) -> None:
        try:
            await self._api(
                f"CONSUMER.CREATE.{self.stream}.{name}",
                {"stream_name": self.stream, "config": config, "action": action},
            )
        except ApiError as error:
            if error.err_code in codes.CONSUMER_NAME_TAKEN:
                info = await self._find("INFO", name)
                raise ConsumerExists(f"consumer {self.stream}/{name} exists", nonce=_metadata(info, NONCE)) from None
            if error.err_code in codes.CONSUMER_NOT_UNIQUE:
                with suppress(SourceError, UnknownResult):
                    await self._list()
                others = ", ".join(map(repr, self._others))
                why = f"{error}; foreign consumers are {others}" if others else str(error)
                raise ConsumerExists(f"consumer {self.stream}/{name}: {why}", nonce=None) from None
            if error.err_code == codes.NO_MORE_CONSUMERS:
                raise SourceError(
                    f"consumer {self.stream}/{name}: {error}; raise max_consumers of the stream or the account to the "
                    "number of partitions, plus one for each partition that moves, plus one on a work queue"
                ) from None
            raise self._refused(name, error) from None

    async def _find(self, request: Literal["INFO", "DELETE"], name: str) -> dict[str, Any] | None:
        """Send a request about one durable; None = the durable does not exist."""
        try:
            return await self._api(f"CONSUMER.{request}.{self.stream}.{name}")
        except ApiError as error:
            if error.err_code == codes.CONSUMER_NOT_FOUND:
                return None
            raise self._refused(name, error) from None

    async def _list(self) -> tuple[list[EpochName], int]:
        """List the cohort's durables, and read the server's clock. The listing begins after the call."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._read_names())
            self._coming.add_done_callback(retrieve)
        # Shield the listing, because a cancelled waiter must not end the listing for other waiters.
        return await asyncio.shield(self._coming)

    async def _read_names(self) -> tuple[list[EpochName], int]:
        async with self._reading:
            # A later caller may need a newer state than this listing returns.
            self._coming = None
            return await self._read_pages()

    async def _read_pages(self) -> tuple[list[EpochName], int]:
        # Read the clock first, so that the names are at least as new as the clock.
        info = await self._stream_info()
        names: list[EpochName] = []
        others: list[str] = []

        with self.connection.api_errors(f"stream {self.stream!r}"):
            found = await read_pages(self._api, f"CONSUMER.NAMES.{self.stream}", "consumers")
        for name in found:
            parsed = EpochName.parse(self.namespace, name)
            if parsed is not None:
                names.append(parsed)
            elif name != mark_of(self.namespace) and len(others) < _NAMED:
                others.append(str(name))
        self._others = others
        return sorted(set(names)), _milliseconds(info.get("ts"))

    async def _stream_info(self) -> dict[str, Any]:
        # Read the highest sequence before the request, because the answer may not include messages that arrive
        # meanwhile.
        highest = self.highest()
        with self.connection.api_errors(f"stream {self.stream!r}"):
            info = await self._api(f"STREAM.INFO.{self.stream}")
        if info.get("created") != self.incarnation:
            raise ConfigError(
                f"stream {self.stream!r} was deleted and created again, so its sequences mean other messages; if this "
                f"was intended, stop all members, delete the bucket {self._bucket!r}, and start again"
            )
        self.check(info.get("config") or {})
        self._last = int((info.get("state") or {}).get("last_seq", 0))
        self.check_end(highest)
        return info


def _described(partition: int, epoch: int, sub: int, info: Mapping[str, Any]) -> EpochConsumer:
    return EpochConsumer(partition, epoch, sub, _metadata(info, NONCE) or "", floor_of(info), _lease_of(info))


def _lease_of(info: Mapping[str, Any]) -> int:
    """Return the lease time in seconds that a durable records; 0 = unknown."""
    return number(_metadata(info, LEASE), digits=9) or 0


def floor_of(info: Mapping[str, Any]) -> int:
    """Return the sequence up to which a durable has no unacknowledged message."""
    floor = int((info.get("ack_floor") or {}).get("stream_seq", 0))
    # With nats-server 2.11, a durable without deliveries reports 0 for any start.
    return max(floor, int((info.get("config") or {}).get("opt_start_seq") or 1) - 1)


def _metadata(info: Mapping[str, Any] | None, name: str) -> str | None:
    value = (((info or {}).get("config") or {}).get("metadata") or {}).get(name)
    return value if isinstance(value, str) else None


def _milliseconds(stamp: object) -> int:
    """Convert a server's time stamp to milliseconds since 1970."""
    return int(unix_seconds(stamp) * 1000)
