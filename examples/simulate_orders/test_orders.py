"""A handler that tolerates redelivery, and its test with crashes, rebalances and lost answers.

Needs no broker: python -m pytest examples/simulate_orders
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import lanes
import memsource

# The program.


@dataclass
class Database:
    """Stand-in for the real database. ``call`` crosses the network; the code between two calls is one transaction."""

    call: Callable[[str, float], Awaitable[None]]
    spent: dict[str, int] = field(default_factory=dict)
    booked: dict[str, int] = field(default_factory=dict)

    async def book(self, customer: str, position: int, amount: int) -> None:
        """Add an order, unless the database already has this order or a later order of the customer."""
        await self.call("begin", 0.005)
        if position > self.booked.get(customer, -1):
            self.booked[customer] = position
            self.spent[customer] = self.spent.get(customer, 0) + amount
        await self.call("commit", 0.005)


@dataclass
class Orders:
    """The handler, which compares a position with the database instead of its memory."""

    database: Database

    async def handle(self, message: lanes.Message) -> None:
        order = json.loads(message.value)
        await self.database.book(order["customer"], message.position, order["amount"])


SETTINGS = lanes.Settings(concurrency=20, retry=lanes.Retry(attempts=20, backoff=0.1))


# Its test.


def an_order(index: int, key: bytes | None) -> str:
    order: dict[str, Any] = {"customer": (key or b"").decode(), "amount": index % 7 + 1}
    return json.dumps(order)


@memsource.simulate(
    runs=100,
    faults=memsource.faults(crash=1, freeze=1, rebalance=2, lost=1, redeliver=2, slow=1, commit_fails=1, io_fails=2),
    sometimes=["fault: crash", "fault: lost", "fault: io_fails", "retry", "revoked"],
)
async def test_every_order_is_booked_once(world: memsource.World) -> None:
    database = Database(world.io)
    world.produce("orders", n=100, keys=15, hot=0.2, gaps=0.1, value=an_order)
    world.workers(2, memsource.App(handler=Orders(database).handle, settings=SETTINGS))
    await world.settled()
    world.check(state=lambda: database.spent)
