"""The durables of a cohort: one for each cohort partition and epoch, created strictly.

Requests are raw JSON. The client's own create call overwrites a consumer of the same name, and its types drop the
fields they do not know.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from lanes.cohort.leases import ConsumerExists, EpochConsumer, UnknownResult
from lanes.core.cohort.records import HIGHEST
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.cohort.lease_store import bucket_name
from lanes_jetstream.wire.connection import (
    CONSUMER_NAME_TAKEN,
    CONSUMER_NOT_FOUND,
    CONSUMER_NOT_UNIQUE,
    NO_MORE_CONSUMERS,
    STREAM_NOT_FOUND,
    ApiError,
    Connection,
    NoAnswer,
    NotPermitted,
    read_pages,
    unix_seconds,
)

__all__ = ["DEFAULT_ACK_WAIT", "EpochName", "JetStreamEpochConsumers", "floor_of", "mark_of"]

log = logging.getLogger("lanes.jetstream")

_NAME: Final = re.compile(r"-p(\d{1,5})-e(\d{1,19})(?:-(\d{1,9}))?")


NONCE: Final = "lanes-nonce"
"""Metadata of a durable: of the acquisition that made it."""

LEASE: Final = "lanes-lease"
"""Metadata of a durable: seconds of the leases of whoever made it."""

MARKED: Final = "_lanes.cohort.mark"
"""What the mark of a cohort would deliver, with its namespace behind it: no subject of a cohort partition, for those
have a number where this has a word. A work queue takes no two durables that could deliver the same."""

DEFAULT_ACK_WAIT: Final = 300.0
"""Seconds. Leases decide when a partition moves, so it only has to outlast whatever keeps a message."""

_TRIES: Final = 3

_NAMED: Final = 5
"""Consumers that are not the cohort's which one line names at most."""


def mark_of(namespace: str) -> str:
    """What the durable is called that says that a work queue has a cohort: none of a partition."""
    return f"{namespace}-cohort"


class EpochName(NamedTuple):
    """A durable's cohort partition, its epoch, and its number among those of one epoch: 0, then takeovers from
    oneself."""

    partition: int
    epoch: int
    sub: int

    def durable(self, namespace: str) -> str:
        """``<namespace>-p<partition>-e<epoch>``, with ``-<sub>`` behind that unless it is 0."""
        return f"{namespace}-p{self.partition}-e{self.epoch}" + (f"-{self.sub}" if self.sub else "")

    @classmethod
    def parse(cls, namespace: str, durable: object) -> EpochName | None:
        """The inverse of ``durable``; None for what it does not make, which is nobody's of this cohort."""
        if not isinstance(durable, str) or not durable.startswith(namespace):
            return None
        match = _NAME.fullmatch(durable, len(namespace))
        if match is None:
            return None
        parsed = cls(int(match[1]), int(match[2]), int(match[3] or 0))
        # A leading zero makes another name, and no record holds a higher epoch.
        return parsed if parsed.epoch <= HIGHEST and parsed.durable(namespace) == durable else None


class JetStreamEpochConsumers:
    """The durables of the cohort ``namespace`` on ``stream``, as ``lanes.cohort.leases.EpochConsumers``; asyncio only.

    ``incarnation``: which making of the stream; another one found later stops loudly, and so does one that ends below
    ``highest``, a sequence that was read. ``check`` is called with the stream's configuration whenever that is read,
    and raises where it does not fit any more. ``filters``: the subjects of a cohort partition. ``lease``: seconds of
    this member's leases, which each durable it makes tells; 0 = that says nothing. ``ack_wait``: seconds, 1 or more.
    ``max_ack_pending``: deliveries that may be unacknowledged.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        namespace: str,
        *,
        incarnation: str,
        filters: Callable[[int], Sequence[str]],
        highest: Callable[[], int] = lambda: 0,
        check: Callable[[Mapping[str, Any]], None] = lambda _: None,
        lease: float = 0,
        ack_wait: float = DEFAULT_ACK_WAIT,
        max_ack_pending: int = 10_000,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._namespace = namespace
        self._bucket = bucket_name(stream, namespace)
        self._others: list[str] = []
        self._incarnation = incarnation
        self._filters = filters
        self._highest = highest
        self._check = check
        self._last = 0
        self._lease = int(lease)
        self._ack_wait = ack_wait
        self._max_ack_pending = max_ack_pending
        self._reading = asyncio.Lock()
        self._coming: asyncio.Task[tuple[list[EpochName], int]] | None = None

    def __repr__(self) -> str:
        return f"<JetStreamEpochConsumers {self._stream}/{self._namespace}>"

    def name(self, partition: int, epoch: int, sub: int) -> str:
        """What a durable is called."""
        return EpochName(partition, epoch, sub).durable(self._namespace)

    # --- lanes.cohort.leases.EpochConsumers

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        """Those of one partition, rising, and the server's clock; see ``lanes.cohort.leases.EpochConsumers.found``.

        Calls at the same time share one listing, which begins behind each of them.
        """
        beyond = 0
        for _ in range(_TRIES):
            names, clock = await self._list()
            consumers = []
            for found, epoch, sub in names:
                if found != partition:
                    continue
                info = await self._info(self.name(partition, epoch, sub))
                if info is None:
                    break  # It has gone meanwhile, or is only being made: a newer listing knows.
                described = _described(partition, epoch, sub, info)
                if described.floor > self._last and described.floor > beyond:
                    # Acknowledged behind the listing; or the stream has lost its end, if a newer one says the same.
                    beyond = described.floor
                    break
                consumers.append(described)
                clock = max(clock, _milliseconds(info.get("ts")))
            else:
                return consumers, clock
        raise UnknownResult(f"stream {self._stream!r}: its consumers change too fast to be read")

    async def marked(self) -> int | None:
        """Whether the cohort was in use; see ``lanes.cohort.leases.EpochConsumers.marked``."""
        info = await self._info(mark_of(self._namespace))
        return None if info is None else _lease_of(info)

    async def mark(self) -> None:
        """Say that it is, by a durable of its own; see ``lanes.cohort.leases.EpochConsumers.mark``.

        Raises ``SourceError`` where somebody else's consumer is in its way.
        """
        name = mark_of(self._namespace)
        config: dict[str, object] = {
            "name": name,
            "durable_name": name,
            "description": "a cohort of lanes uses this stream",
            "ack_policy": "explicit",
            "metadata": {NONCE: "", LEASE: str(self._lease)},
            "filter_subject": f"{MARKED}-{self._namespace}",
        }
        try:
            await self._create(name, config)
        except ConsumerExists as error:
            if error.nonce is None:
                raise SourceError(f"{error}: delete what is not the cohort's") from None
            told = await self.marked()
            if told is not None and told < self._lease:
                await self._create(name, config, action="update")

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        """Create strictly; see ``lanes.cohort.leases.EpochConsumers.create``."""
        name = self.name(partition, epoch, sub)
        await self._create(name, self._config(name, partition, nonce, start))

    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        """Delete one; see ``lanes.cohort.leases.EpochConsumers.delete``."""
        name = self.name(partition, epoch, sub)
        try:
            await self._api(f"CONSUMER.DELETE.{self._stream}.{name}")
        except ApiError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise self._refused(name, error) from None

    # --- questions beside those

    def check_end(self, highest: int) -> None:
        """Raise ``SourceError`` when the stream, as it was seen last, ends below ``highest``, a sequence that was read.

        New messages would pass for finished ones.
        """
        if self._last < highest:
            raise SourceError(
                f"stream {self._stream!r} ends at sequence {self._last} and was read up to {highest}: the server has "
                "lost messages, and new ones take their sequences; check what is missing, stop all members, delete the "
                f"bucket {self._bucket!r} and the consumers {self._namespace}-p…, and start again"
            )

    async def names(self) -> list[EpochName]:
        """Every durable of the cohort, as (partition, epoch, sub), rising. Raises like ``found``."""
        return (await self._list())[0]

    # --- requests

    def _config(self, name: str, partition: int, nonce: str, start: int | None) -> dict[str, Any]:
        filters = self._filters(partition)
        return {
            "name": name,
            "durable_name": name,
            "description": "a cohort partition of lanes",
            "ack_policy": "explicit",
            "ack_wait": int(self._ack_wait * 1e9),
            "max_deliver": -1,
            "max_ack_pending": self._max_ack_pending,
            "replay_policy": "instant",
            "metadata": {NONCE: nonce, LEASE: str(self._lease)},
            **({"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": list(filters)}),
            **(
                {"deliver_policy": "all"}
                if start is None
                else {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start)}
            ),
        }

    async def _api(self, subject: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        try:
            # The client would keep what is published while it reconnects, and send it when its time has passed.
            if not self._connection.client.is_connected and not self._connection.client.is_closed:
                raise NoAnswer(f"{self._connection.servers}: not connected")
            return await self._connection.api(subject, request)
        except NotPermitted as error:
            raise SourceError(f"stream {self._stream!r}: {error}, then start again") from None
        except NoAnswer as error:
            raise UnknownResult(f"stream {self._stream!r}: {error}") from None
        except ApiError as error:
            if error.temporary:
                raise UnknownResult(f"stream {self._stream!r}: {error}") from None
            if error.err_code == STREAM_NOT_FOUND:
                raise SourceError(
                    f"stream {self._stream!r} was deleted while the cohort in namespace {self._namespace!r} used it: "
                    f"what was in it is gone; make it again, delete the bucket {self._bucket!r}, and start again"
                ) from None
            raise

    def _refused(self, name: str, error: ApiError) -> SourceError:
        return self._connection.failed(f"consumer {self._stream}/{name}", error)

    async def _create(
        self, name: str, config: Mapping[str, object], *, action: Literal["create", "update"] = "create"
    ) -> None:
        try:
            await self._api(
                f"CONSUMER.CREATE.{self._stream}.{name}",
                {"stream_name": self._stream, "config": config, "action": action},
            )
        except ApiError as error:
            if error.err_code in CONSUMER_NAME_TAKEN:
                info = await self._info(name)
                raise ConsumerExists(f"consumer {self._stream}/{name} exists", nonce=_metadata(info, NONCE)) from None
            if error.err_code in CONSUMER_NOT_UNIQUE:
                with suppress(SourceError, UnknownResult):
                    await self._list()
                others = ", ".join(map(repr, self._others))
                why = f"{error}; not the cohort's are {others}" if others else str(error)
                raise ConsumerExists(f"consumer {self._stream}/{name}: {why}", nonce=None) from None
            if error.err_code == NO_MORE_CONSUMERS:
                raise SourceError(
                    f"consumer {self._stream}/{name}: {error}: a cohort needs one consumer for each of its partitions, "
                    "one more while one moves, and on a work queue one as its mark: raise max_consumers of the stream "
                    "or the account"
                ) from None
            raise self._refused(name, error) from None

    async def _info(self, name: str) -> dict[str, Any] | None:
        try:
            return await self._api(f"CONSUMER.INFO.{self._stream}.{name}")
        except ApiError as error:
            if error.err_code == CONSUMER_NOT_FOUND:
                return None
            raise self._refused(name, error) from None

    async def _list(self) -> tuple[list[EpochName], int]:
        """The cohort's durables and the server's clock, by a listing that begins now or later."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._read_names())
            self._coming.add_done_callback(_seen)
        # Shared, so one that waits and is cancelled does not end it for the others.
        return await asyncio.shield(self._coming)

    async def _read_names(self) -> tuple[list[EpochName], int]:
        async with self._reading:
            # Whoever asks from here on may mean what this one does not see any more.
            self._coming = None
            return await self._read_pages()

    async def _read_pages(self) -> tuple[list[EpochName], int]:
        # First the clock: a name that is read later is not missing from what an older clock says.
        info = await self._stream_info()
        names: list[EpochName] = []
        others: list[str] = []

        async def ask(offset: int) -> dict[str, Any]:
            return await self._api(f"CONSUMER.NAMES.{self._stream}", {"offset": offset})

        try:
            found = await read_pages(ask, lambda page: page.get("consumers") or [])
        except ApiError as error:
            raise self._connection.failed(f"stream {self._stream!r}", error) from None
        for name in found:
            parsed = EpochName.parse(self._namespace, name)
            if parsed is not None:
                names.append(parsed)
            elif name != mark_of(self._namespace) and len(others) < _NAMED:
                others.append(str(name))
        self._others = others
        return sorted(set(names)), _milliseconds(info.get("ts"))

    async def _stream_info(self) -> dict[str, Any]:
        # Asked before the server is: what is read meanwhile it may not know of when it answers.
        highest = self._highest()
        try:
            info = await self._api(f"STREAM.INFO.{self._stream}")
        except ApiError as error:
            raise self._connection.failed(f"stream {self._stream!r}", error) from None
        if info.get("created") != self._incarnation:
            raise ConfigError(
                f"stream {self._stream!r} was deleted and made anew: its sequences mean other messages now; where that "
                f"was intended stop all members, delete the bucket {self._bucket!r}, and "
                "start again"
            )
        self._check(info.get("config") or {})
        self._last = int((info.get("state") or {}).get("last_seq", 0))
        self.check_end(highest)
        return info


def _seen(task: asyncio.Task[tuple[list[EpochName], int]]) -> None:
    """Take note of how it ended, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


def _described(partition: int, epoch: int, sub: int, info: Mapping[str, Any]) -> EpochConsumer:
    return EpochConsumer(partition, epoch, sub, _metadata(info, NONCE) or "", floor_of(info), _lease_of(info))


def _lease_of(info: Mapping[str, Any]) -> int:
    """Seconds, as whoever made it has said; 0 = nothing that can be read."""
    lease = _metadata(info, LEASE) or ""
    return int(lease) if lease.isascii() and lease.isdecimal() and len(lease) <= 9 else 0


def floor_of(info: Mapping[str, Any]) -> int:
    """The highest sequence up to which a durable says that everything is acknowledged, or was not for it."""
    floor = int((info.get("ack_floor") or {}).get("stream_seq", 0))
    # One that has delivered nothing says 0 on a server of 2.11, whatever it begins with.
    return max(floor, int((info.get("config") or {}).get("opt_start_seq") or 1) - 1)


def _metadata(info: Mapping[str, Any] | None, name: str) -> str | None:
    value = (((info or {}).get("config") or {}).get("metadata") or {}).get(name)
    return value if isinstance(value, str) else None


def _milliseconds(stamp: object) -> int:
    """A server's time stamp as milliseconds since 1970."""
    return int(unix_seconds(stamp) * 1000)
