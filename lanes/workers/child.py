"""The process of a plain handler, which imports the handler and then handles one call at a time until its parent ends.

The process ignores SIGINT and SIGTERM. A supervisor may send these signals to the whole process group, but the handler
process is still needed while the consumer drains. The process ends after the last call when the consumer closes the
connection. The kernel kills the process when the process of the consumer has ended, even if a handler never returns.
"""

from __future__ import annotations

import fcntl
import multiprocessing.spawn
import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from lanes.core.types import ABANDON, Failure, Message, Outcome
from lanes.handlers import Decode, refuse_awaitable, sync_handler
from lanes.observe.failures import users_part
from lanes.observe.otel import carried
from lanes.workers.crossing import (
    DONE,
    READY,
    STOP_SIGNALS,
    Closed,
    MainImport,
    SetUp,
    Skipped,
    pack_error,
    pack_outcomes,
    receive,
    send,
    unpack,
)
from lanes.workers.outcomes import batch_outcomes, explain, readable


def main(connection: int, life: int) -> None:
    """Run the process.

    Args:
        connection: Descriptor of the connection to the consumer.
        life: Descriptor of a pipe that the process of the consumer holds open.
    """
    for descriptor in (connection, life):
        os.set_inheritable(descriptor, False)
    end_with_parent(life)
    for number in STOP_SIGNALS:
        # Not SIG_IGN, which the programs that a handler starts would inherit.
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with socket.socket(fileno=connection) as parent:
        try:
            _serve(parent)
        except Closed:
            return


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def end_with_parent(life: int) -> None:
    """Make the kernel kill this process when every other process has closed the other end of a pipe.

    On a system whose kernel cannot do so, a thread of this process waits for the end of the pipe. While a handler holds
    the interpreter's lock, that thread cannot end the process.
    """
    kernel = getattr(fcntl, "F_SETSIG", None)
    if kernel is None:
        threading.Thread(target=_exit_after, args=(life,), name="lanes-parent", daemon=True).start()
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, kernel, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        # The parent ended before the kernel watched the pipe.
        os._exit(1)


def _exit_after(life: int) -> None:
    os.read(life, 1)
    os._exit(1)


def _serve(parent: socket.socket) -> None:
    try:
        call = _prepare(receive(parent))
    except Closed:
        raise
    except BaseException as error:
        send(parent, pack_error(error, error.__traceback__))
        return
    send(parent, READY)
    while True:
        send(parent, call(receive(parent)))


def _prepare(frame: bytes) -> Callable[[bytes], bytes]:
    """Import the handler, and call the setup. Return the function that makes the answer to a call."""
    main_module, pickled = cast(tuple[dict[str, Any] | None, bytes], pickle.loads(frame))
    if main_module is not None:
        MainImport.running = True
        try:
            multiprocessing.spawn.prepare(main_module)
        except SystemExit as error:
            raise RuntimeError(f"the import of the main module ended with SystemExit({error.code!r})") from error
        finally:
            MainImport.running = False
    handler, decode, set_up, batch = cast(
        tuple[Callable[..., object], Decode | None, SetUp | None, bool], pickle.loads(pickled)
    )
    if set_up is not None:
        set_up()
    if batch:
        return lambda frame: _answer_batch(handler, decode, frame)
    plain = sync_handler(handler, decode)
    return lambda frame: _answer(plain, frame)


def _answer(handler: Callable[[Message], object], frame: bytes) -> bytes:
    try:
        (message,), carrier = unpack(frame)
        with carried(carrier):
            handler(message)
    except BaseException as error:
        explain(error)
        return pack_error(error, users_part(error.__traceback__))
    return DONE


def _answer_batch(handler: Callable[..., object], decode: Decode | None, frame: bytes) -> bytes:
    try:
        messages, carrier = unpack(frame)
        with carried(carrier):
            return pack_outcomes([_crossing(one) for one in handle_batch(handler, decode, messages)])
    except BaseException as error:
        explain(error, batch=True)
        return pack_error(error, users_part(error.__traceback__))


def handle_batch(handler: Callable[..., object], decode: Decode | None, messages: list[Message]) -> list[Outcome]:
    """Call a plain batch handler with the messages that ``decode`` can read. Return an outcome for each message."""
    sound, outcomes = readable(messages, decode)
    if sound:
        returned = handler(sound)
        refuse_awaitable(handler, returned, sound[0])
        outcomes.update(zip(sound, batch_outcomes(sound, returned), strict=True))
    return [outcomes[message] for message in messages]


def _crossing(outcome: Outcome) -> BaseException | type[Skipped] | None:
    if isinstance(outcome, Failure):
        return outcome.error
    return Skipped if outcome is ABANDON else None
