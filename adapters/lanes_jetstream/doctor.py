"""Checks of a NATS server, a stream and a durable before a consumer uses them. No call changes the server."""

from __future__ import annotations

from typing import Any, Final

from lanes.cli.doctor import Check
from lanes.errors import ConfigError, LanesError
from lanes_jetstream.dead_letters.writer import capturing_streams
from lanes_jetstream.durable.consumer import DurableConsumer
from lanes_jetstream.durable.takeover import RESET_SINCE
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, NoAnswer
from lanes_jetstream.wire.stream import StreamState, read_stream

_DAY: Final = 86_400.0

_NEARLY_FULL: Final = 0.9
"""Used share of an account's limit at which the doctor warns."""


async def examine(server: str, stream: str, durable: str, dead_letters: str) -> list[Check]:
    """Check the server. Also check a stream, a durable and a subject for dead letters, if the arguments name them.

    If no connection is possible, no later check runs.

    Args:
        server: URL of the server.
        stream: Name of the stream; empty = no check of a stream.
        durable: Name of the durable; empty = no check of a durable. A durable needs a stream.
        dead_letters: Subject of the dead letters; empty = no check of the subject.

    Returns:
        The results.

    Raises:
        ConfigError: The URL is wrong.
    """
    connection = Connection(server)
    try:
        await connection.open()
    except LanesError as error:
        return [_failed("server", error, "start the server, or correct --server")]
    try:
        doctor = _Doctor(connection)
        checks = await doctor.server()
        if any(check.ok is False for check in checks):
            return checks
        if stream:
            checks += await doctor.stream(stream)
        if durable and doctor.state is not None:
            checks.append(await doctor.durable(stream, durable))
        if dead_letters:
            checks.append(await doctor.dead_letters(dead_letters, stream))
        return checks
    finally:
        await connection.close()


class _Doctor:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.state: StreamState | None = None

    async def server(self) -> list[Check]:
        connection = self._connection
        try:
            connection.check_server()
            found = await connection.api("INFO")
        except NoAnswer as error:
            remedy = "start nats-server with -js, or enable JetStream for the account of this user"
            return [Check("server", False, str(error).partition("; ")[0], remedy)]
        except (ApiError, LanesError) as error:
            return [_failed("server", error, "enable JetStream for the account of this user")]
        version = ".".join(map(str, connection.server_version))
        checks = [Check("server", True, f"nats-server {version} at {connection.servers} with JetStream")]
        checks.append(_account(found))
        if connection.server_version >= RESET_SINCE:
            checks.append(Check("takeover", True, "this version resets a consumer, so a takeover is quick"))
        else:
            since = ".".join(map(str, RESET_SINCE))
            checks.append(
                Check(
                    "takeover",
                    None,
                    f"a version before {since} cannot reset a consumer, so a takeover changes ack_wait for a moment",
                    f"keep the right to change consumers, or upgrade to {since}",
                )
            )
        return checks

    async def stream(self, name: str) -> list[Check]:
        connection = self._connection
        try:
            self.state = state = await read_stream(connection, name, option="--stream")
            info = await connection.api(f"STREAM.INFO.{name}")
        except (ApiError, NoAnswer, LanesError) as error:
            return [_failed("stream", error, "create the stream, or correct --stream")]
        config = info["config"]
        replicas = int(config.get("num_replicas", 1))
        found = (
            f"{name}: {state.limits.stored} messages in {config.get('storage', 'file')} storage with {replicas} "
            f"replica(s), retention {state.retention}"
        )
        checks = [Check("stream", True, found)]
        if config.get("storage") == "memory":
            checks.append(
                Check(
                    "storage",
                    None,
                    "memory: a restart of the server loses all messages",
                    "use file storage, or accept the loss",
                )
            )
        if state.loses_last_acks:
            checks.append(
                Check(
                    "replicas",
                    None,
                    "1: a killed server loses the last acknowledgements, and redelivers their messages",
                    "use 3 replicas, or make the effects of the handler idempotent",
                )
            )
        checks += [*_limits(state)]
        if config.get("mirror"):
            checks.append(Check("mirror", None, f"{name} is a mirror, which lags behind its origin", ""))
        return checks

    async def durable(self, stream: str, name: str) -> Check:
        connection = self._connection
        try:
            info = await connection.find(f"CONSUMER.INFO.{stream}.{name}", codes.CONSUMER_NOT_FOUND)
        except (ApiError, NoAnswer, LanesError) as error:
            return _failed("durable", error, "give this user the right to read and change consumers")
        if info is None:
            return Check("durable", True, f"{name} does not exist yet, and the first consumer creates it")
        consumer = DurableConsumer(
            connection,
            stream,
            name,
            filter_subject=None,
            ack_wait=30.0,
            max_ack_pending=1,
            start={},
            modify=False,
            hold_back=False,
        )
        wrong = consumer.misfits(dict(info["config"]))
        if wrong:
            text, _, remedy = wrong.partition("; ")
            return Check("durable", False, f"{name}: {text}", remedy)
        waiting, pending = int(info.get("num_pending", 0)), int(info.get("num_ack_pending", 0))
        found = f"{name}: {waiting} undelivered and {pending} unacknowledged messages"
        if info.get("paused"):
            return Check("durable", None, f"{found}; it is paused", "resume the consumer at the server")
        if int(info.get("num_waiting", 0)):
            return Check(
                "durable",
                None,
                f"{found}; a process pulls it now",
                "start one process on a durable, or a cohort for several processes",
            )
        return Check("durable", True, found)

    async def dead_letters(self, subject: str, stream: str) -> Check:
        try:
            streams = await capturing_streams(self._connection, subject)
        except (ApiError, NoAnswer, LanesError) as error:
            return _failed("dead letters", error, "give this user the right to read the names of streams")
        if not streams:
            return Check(
                "dead letters",
                False,
                f"no stream captures the subject {subject!a}",
                "create a stream with this subject",
            )
        if stream in streams:
            return Check(
                "dead letters",
                False,
                f"the stream {stream} captures {subject!a} itself, so the source would read its own dead letters",
                "use a subject of another stream",
            )
        return Check("dead letters", True, f"the stream {streams[0]} captures {subject!a}")


def _account(found: dict[str, Any]) -> Check:
    """Check the limits of the account."""
    limits = found.get("limits") or {}
    names = {"max_storage": "storage", "max_memory": "memory", "max_streams": "streams", "max_consumers": "consumers"}
    scarce = []
    for limit, used in names.items():
        most, now = int(limits.get(limit, -1)), int(found.get(used) or 0)
        if most > 0 and now >= most * _NEARLY_FULL:
            scarce.append(f"{now} of {most} {used}")
    if scarce:
        remedy = "raise the limits of the account, or delete unused streams and consumers"
        return Check("account", None, f"nearly at its limits: {', '.join(scarce)}", remedy)
    streams, consumers = int(found.get("streams") or 0), int(found.get("consumers") or 0)
    return Check("account", True, f"{streams} streams and {consumers} consumers, below the limits of the account")


def _limits(state: StreamState) -> list[Check]:
    """Check the limits by which the stream deletes messages that no consumer has handled."""
    limits = state.limits
    if state.retention != "limits" and not (limits.age or limits.messages or limits.bytes):
        return [Check("limits", True, "the stream deletes a message only after its acknowledgement")]
    bounds = {
        "max_age": f"{limits.age / _DAY:g} d" if limits.age else "",
        "max_msgs": str(limits.messages or ""),
        "max_bytes": str(limits.bytes or ""),
    }
    shown = ", ".join(f"{name}={text}" for name, text in bounds.items() if text)
    if not shown:
        return [Check("limits", True, "the stream deletes no message by itself")]
    return [
        Check(
            "limits",
            None,
            f"{shown}: the stream deletes older messages, even if no consumer has handled them",
            "keep the lag below these limits, or use discard=new",
        )
    ]


def _failed(name: str, error: Exception, remedy: str) -> Check:
    """Return a failed check. If the error is an error of ``lanes``, its text already contains the remedy."""
    text, _, own = str(error).partition("; ")
    known = own if isinstance(error, ConfigError) or own else ""
    return Check(name, False, text, known or remedy)
