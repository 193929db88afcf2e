"""Handlers for processes, which write lines into a file, because a process shares no objects with the test.

The value of a message is the path of a folder. Each process imports this module, so the module imports little.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from lanes import ConfigError, Message, Nak, Term


def note(folder: Path, line: str) -> None:
    """Append a line to the notes of a test, by one write."""
    with (folder / "notes").open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def folder_of(message: Message) -> Path:
    return Path(message.value.decode())


def began(message: Message) -> Path:
    folder = folder_of(message)
    note(folder, f"start {os.getpid()} {message.position} {message.attempt}")
    return folder


def record(message: Message) -> None:
    """Note the parts of the message that reached this process."""
    folder = began(message)
    crossed = (message.key, message.headers, message.subject, message.partition.id, message.position, message.attempt)
    note(folder, f"crossed {(*crossed, message.epoch, message.size, message.raw is None)!r}")


def wait(message: Message) -> None:
    """Wait until the test releases the position; ``crash`` and ``forever`` in the key act at the first attempt."""
    folder = began(message)
    if message.key == b"crash" and message.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if message.key in (b"forever", b"ever") and message.attempt == 1:
        forever(message)
    while message.key != b"free" and not (folder / f"go{message.position}").exists():
        time.sleep(0.005)
    note(folder, f"end {message.position}")


def forever(message: Message) -> None:
    """Hold the lock of the interpreter in C, so that neither a thread nor a signal handler can run."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def begin_forever(message: Message) -> None:
    began(message)
    forever(message)


def late(message: Message) -> None:
    """Answer the first message after its timeout, and fail every other message."""
    folder = began(message)
    if message.position == 0:
        while not (folder / "go0").exists():
            time.sleep(0.005)
        return
    raise ValueError("poison")


class Unpicklable(Exception):
    """An exception that cannot be made from its ``args``."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Unsendable(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock", lambda: None)


def fail(message: Message) -> None:
    """Raise the error that the key names."""
    match message.key:
        case b"nak":
            raise Nak("later", delay=0.0)
        case b"term":
            raise Term("never")
        case b"unpicklable":
            raise Unpicklable(code=7)
        case b"unsendable":
            raise Unsendable
        case b"attribute":
            message.offset  # type: ignore[attr-defined]  # noqa: B018 (the mistake)
        case b"raw":
            message.raw.timestamp()  # type: ignore[attr-defined]
        case b"exit":
            os._exit(3)
        case _:
            raise ValueError("poison")


def misconfigured(message: Message) -> None:
    raise ConfigError("a setting of the handler")


def unreadable(message: Message) -> object:
    if message.key == b"bad":
        raise ValueError("not a number")
    return os.getpid()


def decoded(message: Message) -> None:
    """Note that the decoder ran in this process."""
    note(folder_of(message), f"decoded {message.data == os.getpid()}")


def batch(messages: list[Message]) -> list[BaseException | None]:
    """Handle a batch: keys ``poison`` fail alone, ``crash`` ends the process, ``forever`` never returns."""
    folder = began(messages[0])
    note(folder, f"batch {[message.position for message in messages]}")
    for message in messages:
        if message.key == b"crash" and message.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if message.key in (b"forever", b"ever"):
            forever(message)
    return [Unpicklable(code=7) if message.key == b"poison" else None for message in messages]


def set_up() -> None:
    note(Path(os.environ["LANES_TEST_FOLDER"]), f"setup {os.getpid()}")


def broken_set_up() -> None:
    raise RuntimeError("no model")


def die_in_set_up() -> None:
    os._exit(7)


def traced(message: Message) -> None:
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    note(folder_of(message), f"span {context.trace_id:032x} {context.span_id:016x}")
