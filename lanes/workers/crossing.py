"""The bytes that a handler's process and the process of the consumer exchange: calls, messages, results and exceptions.

Both processes run one program on one machine, so the bytes are pickles. Each process sends one frame at a time: 8 bytes
of length, and then the pickle.
"""

from __future__ import annotations

import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, cast

from lanes.attempts import error_type
from lanes.core.types import LaneId, Message, Partition, PartitionId
from lanes.dead_letter import error_text
from lanes.errors import ConfigError, HandlerProcessError, MessageError, Nak, Term

PROTOCOL: Final = pickle.HIGHEST_PROTOCOL

READY: Final = b"ready"
"""The frame by which a process reports that it has imported its handler and finished its setup."""

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals that a handler's process ignores. The parent blocks these signals during the start of the process."""

DONE: Final = b""
"""The frame of a handler of one message that has returned."""

TRACEBACK_LIMIT: Final = 20_000
"""Maximum number of characters of a traceback; its end crosses."""

_HEADER: Final = 8
_CHUNK: Final = 1 << 20


class MainImport:
    """Return whether this process is a handler process that is importing the main module of the consumer's program."""

    running = False


def refuse_in_main_import() -> None:
    """Raise ``ConfigError`` if the import by a handler's process would start the consumer again."""
    if MainImport.running:
        raise ConfigError(
            "the consumer starts while a process of its handler imports the main module: start it under "
            '`if __name__ == "__main__":`, or move the handler to a module of its own'
        )


class HandlerTraceback(Exception):
    """The traceback of an exception in the process of the handler, as the ``__cause__`` of the exception."""


# --- frames


class Closed(Exception):
    """Error for a connection whose other process has closed it or has ended."""


def send(connection: socket.socket, frame: bytes, until: float | None = None) -> None:
    """Send a frame. The call blocks.

    Args:
        connection: The connection.
        frame: The frame.
        until: Time of ``time.monotonic`` at which the call raises ``TimeoutError``. ``None`` = never.

    Raises:
        Closed: The other process has ended.
        TimeoutError: The deadline has passed.
    """
    try:
        connection.settimeout(_left(until))
        connection.sendall(len(frame).to_bytes(_HEADER, "little") + frame)
    except TimeoutError:
        raise
    except OSError as error:
        raise Closed from error


def receive(connection: socket.socket, until: float | None = None) -> bytes:
    """Receive a frame. The call blocks.

    Args:
        connection: The connection.
        until: Time of ``time.monotonic`` at which the call raises ``TimeoutError``. ``None`` = never.

    Returns:
        The frame.

    Raises:
        Closed: The other process has ended.
        TimeoutError: The deadline has passed.
    """
    size = int.from_bytes(_exactly(connection, _HEADER, until), "little")
    return _exactly(connection, size, until)


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        try:
            connection.settimeout(_left(until))
            part = connection.recv(min(size, _CHUNK))
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error
        if not part:
            raise Closed
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _left(until: float | None) -> float | None:
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    return left


# --- messages


class _Content(NamedTuple):
    """The raw message of a message in the handler's process."""

    value: bytes
    headers: Sequence[tuple[str, bytes]]
    subject: str

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f'message.raw has no {name} with sync_handlers="processes": the message of the client stays in the '
            "process of the consumer; read message.value, key, headers, subject and position"
        )


class _ContentReader:
    """The reader of ``_Content``; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        return cast(_Content, raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return cast(_Content, raw).headers

    def subject(self, raw: object) -> str:
        return cast(_Content, raw).subject


_READER: Final = _ContentReader()

_Place = tuple[str, int, str, int, int | None]
_Packed = tuple[_Place, int, bytes | None, LaneId, int, int, float, bytes, Sequence[tuple[str, bytes]], str]


def pack(messages: Sequence[Message], carrier: Mapping[str, str]) -> bytes:
    """Return the frame of a call.

    Args:
        messages: The messages of the call.
        carrier: The trace context of the call.

    Returns:
        The frame.
    """
    return pickle.dumps(([_packed(message) for message in messages], dict(carrier)), PROTOCOL)


def _packed(message: Message) -> _Packed:
    partition = message.partition
    place = (*partition.id, partition.incarnation, partition.assignment, partition.fencing_token)
    content = (bytes(message.value), list(message.headers), message.subject)
    numbers = (message.size, message.attempt, message.received)
    return (place, message.position, message.key, message.lane, *numbers, *content)


def unpack(frame: bytes) -> tuple[list[Message], dict[str, str]]:
    """Return the messages and the trace context of a call. Messages of one assignment share its ``Partition``."""
    packed, carrier = cast(tuple[list[_Packed], dict[str, str]], pickle.loads(frame))
    partitions: dict[_Place, Partition] = {}
    return [_unpacked(each, partitions) for each in packed], carrier


def _unpacked(packed: _Packed, partitions: dict[_Place, Partition]) -> Message:
    place, position, key, lane, size, attempt, received, *content = packed
    partition = partitions.get(place)
    if partition is None:
        source, number, incarnation, assignment, fencing_token = place
        partition = Partition(PartitionId(source, number), _READER, incarnation, fencing_token=fencing_token)
        partition.assignment, partition.live = assignment, True
        partitions[place] = partition
    message = Message(partition, position, key, size, _Content(*cast(Any, content)), None)
    message.lane, message.attempt, message.received = lane, attempt, received
    return message


# --- results


def pack_error(error: BaseException, frames: TracebackType | None) -> bytes:
    """Return the frame of a call whose handler raised an exception. ``frames``: the traceback to show."""
    return pickle.dumps(_Raised.of(error, frames), PROTOCOL)


def pack_outcomes(outcomes: Sequence[BaseException | type[Skipped] | None]) -> bytes:
    """Return the frame of a batch, with None, an exception or ``Skipped`` for each message."""
    return pickle.dumps(
        [_Raised.of(one, one.__traceback__) if isinstance(one, BaseException) else one for one in outcomes], PROTOCOL
    )


class Skipped:
    """Result for an unhandled message of a batch after an unreadable message."""


def result_of(frame: bytes) -> list[BaseException | type[Skipped] | None] | None:
    """Return the outcomes of a batch; None = a handler of one message has returned. Raises the handler's exception."""
    if frame == DONE:
        return None
    result = pickle.loads(frame)
    if isinstance(result, _Raised):
        raise result.error()
    return [one.error() if isinstance(one, _Raised) else one for one in result]


class _Raised(NamedTuple):
    """An exception for the other process: its pickle and traceback, and a substitute error for an unreadable pickle."""

    pickled: bytes | None
    substitute: BaseException
    frames: str

    @classmethod
    def of(cls, error: BaseException, frames: TracebackType | None) -> _Raised:
        text = "".join(traceback.format_exception(type(error), error, frames))[-TRACEBACK_LIMIT:]
        pickled: bytes | None = None
        why = ""
        try:
            pickled = pickle.dumps(error, PROTOCOL)
            if type(pickle.loads(pickled)) is not type(error):
                pickled = None
                why = "its pickle is of another type"
        except Exception as failed:
            pickled = None
            why = f"{type(failed).__qualname__}: {error_text(failed)}"
        return cls(pickled, _substitute(error, why or "its class cannot be imported there"), text)

    def error(self) -> BaseException:
        error = self.substitute
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:
                error = self.substitute
        error.__cause__ = HandlerTraceback(f"in the process of the handler:\n\n{self.frames}")
        return error


def _substitute(error: BaseException, why: str) -> BaseException:
    """Return a picklable substitute for an error, with the same effect on its message."""
    text = (
        f"the handler raised {error_type(error)} ({error_text(error)}), which cannot be sent to the process of the "
        f"consumer ({why}): raise an exception of an importable class whose __init__ takes its args"
    )
    if isinstance(error, Nak):
        return Nak(text, delay=error.delay)
    for kind in (Term, MessageError, ConfigError):
        if isinstance(error, kind):
            return kind(text)
    # Any other exception that is no Exception stops the consumer, as a ConfigError does.
    return HandlerProcessError(text) if isinstance(error, Exception) else ConfigError(text)


SetUp = Callable[[], object]
"""A function that each process calls before its first message."""
