"""An application that copies its messages to another target, with failures of handlers, sends and dead letters.

The test of the application compares the outputs that readers see with the messages. The check ``GivenUpOutputs``
expects each output once in a run whose only faults are hand-overs. The checkers of every run judge the order of the
outputs, and whether a message was settled before its outputs were visible.
"""

from __future__ import annotations

import random
from typing import Final

import anyio

from lanes import Message, Retry, Settings
from lanes.config import Poison
from memsource import App, World, faults

FAULTS: Final = faults(crash=2, rebalance=2, lost=1, publish_fails=6, commit_fails=1, letter_fails=1, slow=1)
"""Faults at each boundary of a publisher."""

MOVES: Final = faults(rebalance=6)
"""Hand-overs that lose nothing: no output is published twice."""

TARGET: Final = "invoices"

_KEYS: Final = 6
_MESSAGES: Final = 40
_SECONDS: Final = (0.0, 0.0, 0.01, 0.3)


class Copies:
    """The handler. Some attempts fail after they have published, and each fifth message has three outputs."""

    def __init__(self, world: World, *, batch: int | None = None, poison: Poison = "skip") -> None:
        self.world = world
        self.rng = random.Random(world.plan.seed)
        self.settings = Settings(
            concurrency=4,
            max_in_flight=20,
            batch=batch,
            retry=Retry(attempts=3, backoff=0.1, max_backoff=1.0),
            poison=poison,
        )

    def app(self) -> App:
        handler = self.one if self.settings.batch is None else self.several
        return App(handler=handler, settings=self.settings, dead_letters=True, publisher=True)

    def made(self, position: int) -> int:
        """The number of outputs of a message."""
        return 3 if position % 5 == 0 else position % 3

    async def one(self, message: Message) -> None:
        self.publish(message)
        await anyio.sleep(self.rng.choice(_SECONDS))
        if message.attempt < 2 and message.position % 4 == 0:
            raise ValueError("a failed attempt, which has published")

    async def several(self, batch: list[Message]) -> list[BaseException | None]:
        for message in batch:
            self.publish(message)
        await anyio.sleep(self.rng.choice(_SECONDS))
        wrong = ValueError("a failed attempt, which has published")
        return [wrong if message.attempt < 2 and message.position % 4 == 0 else None for message in batch]

    def publish(self, message: Message) -> None:
        for number in range(self.made(message.position)):
            message.publish_soon(TARGET, b"%d of %s" % (number, message.value), key=message.key)


async def copied(world: World, *, batch: int | None = None) -> None:
    """Publish messages, and expect every output of each message among the visible outputs."""
    copies = Copies(world, batch=batch)
    moves_only = {fault.kind for fault in world.plan.faults} <= {"rebalance"}
    records = world.produce("orders", _MESSAGES, keys=_KEYS, skew=1.2)
    world.workers(2, copies.app())
    await world.settled()
    visible = {output.value for output in world.published(TARGET)}
    places = [(output.source, output.position, output.number) for output in world.published(TARGET)]
    if moves_only and len(set(places)) < len(places):
        world.find("GivenUpOutputs", "a hand-over without other faults has published an output twice")
    letters = {(letter.partition, letter.position) for letter in world.dead_letters}
    for record in records:
        if (record.partition, record.position) in letters:
            continue
        for number in range(copies.made(record.position)):
            assert b"%d of %s" % (number, record.value) in visible, record


async def copied_in_batches(world: World) -> None:
    """The same with a batch handler."""
    await copied(world, batch=4)
