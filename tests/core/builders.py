"""Builders of engines, partitions and messages. The default values do not affect the result of a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lanes.core.commits import PROMPT
from lanes.core.effects import Effect
from lanes.core.engine import Engine
from lanes.core.policy import Keyless, Order, Poison, Policy, RetryPolicy
from lanes.core.types import ACK, Failure, Message, Partition, PartitionId, Settlement

ATTEMPTS = 3
BACKOFF = 1.0
MAX_BACKOFF = 8.0
COMMIT_INTERVAL = 5.0
COMMIT_PACE = COMMIT_INTERVAL * PROMPT
COMMIT_COUNT = 50


class RawReader:
    """Reads raw messages that are texts: the value is the text, and the subject names it."""

    def value(self, raw: object) -> bytes:
        return str(raw).encode()

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return [("raw", str(raw).encode())]

    def subject(self, raw: object) -> str:
        return f"subject of {raw}"


READER = RawReader()


def new_partition(
    number: int = 0, source: str = "S", *, floor: int | None = None, completed: Sequence[tuple[int, int]] = ()
) -> Partition:
    """A partition that is not assigned."""
    return Partition(PartitionId(source, number), READER, floor=floor, completed=completed)


def new_message(partition: Partition, position: int, key: bytes | None = b"k", size: int = 1) -> Message:
    """A message as a source delivers it. Its token names the position."""
    return Message(partition, position, key, size, f"raw {position}", f"token {position}")


def new_engine(
    *,
    concurrency: int = 10,
    max_in_flight: int = 100,
    max_bytes: int = 1_000,
    attempts: int = ATTEMPTS,
    dead_letters: bool = True,
    poison: Poison | None = None,
    order: Order = "key",
    keyless: Keyless = "any",
    lanes: int = 0,
    max_ahead: int = 1_000,
    knows_settled: bool = True,
) -> Engine:
    """An engine with wide bounds. ``dead_letters`` chooses between the poison policies ``skip`` and ``exit``."""
    policy = new_policy(
        concurrency=concurrency,
        max_in_flight=max_in_flight,
        max_bytes=max_bytes,
        retry=RetryPolicy(attempts, BACKOFF, MAX_BACKOFF),
        poison=poison or ("skip" if dead_letters else "exit"),
        order=order,
        keyless=keyless,
        lanes=lanes,
        max_ahead=max_ahead,
        commit_interval=COMMIT_INTERVAL,
        commit_count=COMMIT_COUNT,
        knows_settled=knows_settled,
    )
    return Engine(policy)


def new_policy(
    *,
    concurrency: int,
    max_in_flight: int,
    max_bytes: int,
    retry: RetryPolicy,
    poison: Poison = "exit",
    order: Order = "key",
    keyless: Keyless = "any",
    lanes: int = 0,
    max_ahead: int = 10_000,
    commit_interval: float = 1.0,
    commit_count: int = 5_000,
    knows_settled: bool = True,
    keeps_attempts: bool = False,
) -> Policy:
    """The rules of an engine, with defaults."""
    return Policy(
        concurrency=concurrency,
        max_in_flight=max_in_flight,
        max_bytes=max_bytes,
        retry=retry,
        poison=poison,
        order=order,
        keyless=keyless,
        lanes=lanes,
        max_ahead=max_ahead,
        commit_interval=commit_interval,
        commit_count=commit_count,
        knows_settled=knows_settled,
        keeps_attempts=keeps_attempts,
    )


def assigned(
    engine: Engine, number: int = 0, *, floor: int | None = None, completed: Sequence[tuple[int, int]] = ()
) -> Partition:
    """A partition assigned to the engine. With a ``floor`` its source commits."""
    partition = new_partition(number, floor=floor, completed=completed)
    engine.assign(partition)
    return partition


def deliver(
    engine: Engine,
    partition: Partition,
    *positions: int,
    key: bytes | None = b"k",
    size: int = 1,
    now: float = 0.0,
) -> list[Message]:
    """Deliver positions as one run; returns its messages."""
    run = [new_message(partition, position, key, size) for position in positions]
    engine.receive(partition, run, size * len(run), now)
    return run


def deliver_keys(engine: Engine, partition: Partition, letters: bytes) -> list[Message]:
    """Deliver one run with a message for each letter, which is its key; a dot has no key."""
    run = []
    for position, letter in enumerate(letters.decode(), start=partition.ledger.highest + 1):
        run.append(new_message(partition, position, None if letter == "." else letter.encode()))
    engine.receive(partition, run, len(run), 0.0)
    return run


def start(engine: Engine, partition: Partition, *positions: int, now: float = 0.0) -> list[Message]:
    """Deliver messages without keys, and start them."""
    run = deliver(engine, partition, *positions, key=None, now=now)
    take_all(engine)
    return run


def ack(engine: Engine, *messages: Message, now: float = 0.0) -> None:
    """Acknowledge running messages."""
    for message in messages:
        engine.finish(message, ACK, now)


def take(engine: Engine) -> Message:
    """Take the next message to run; there must be one."""
    message = engine.take()
    assert message is not None
    return message


def take_all(engine: Engine) -> list[int]:
    """Take all messages that can start; their positions in order of start."""
    positions = []
    while (message := engine.take()) is not None:
        positions.append(message.position)
    return positions


def effects(engine: Engine) -> list[Effect]:
    """Empty the list of effects, as the runtime does after every call."""
    found = engine.effects[:]
    engine.effects.clear()
    return found


def kinds(engine: Engine) -> list[type[Effect]]:
    """The types of the effects; the list is empty afterwards."""
    return [type(effect) for effect in effects(engine)]


def positions(messages: Iterable[Message]) -> list[int]:
    """The positions of messages."""
    return [message.position for message in messages]


def commits_of(settlements: Sequence[Settlement]) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """The floor and the completed set of each commit, which has no messages."""
    assert all(s.messages == [] for s in settlements)
    return [(s.floor, list(s.completed)) for s in settlements]


def failed(*, chance: float = 0.5, delay: float | None = None, terminal: bool = False) -> Failure:
    """A failed attempt."""
    return Failure(ValueError("no"), chance, delay, terminal)
