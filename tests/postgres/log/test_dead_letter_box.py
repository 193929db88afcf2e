"""``PostgresDeadLetters`` keeps the contract of dead letters on a real server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from lanes.dead_letter import DeadLetter
from lanes.source import DeadLetters
from lanes_postgres import PostgresDeadLetters
from lanes_postgres.dead_letters import dead_letter_of, record_of
from lanes_postgres.log.appending import headers_of
from memsource.contract.dead_letter_harness import Published
from memsource.contract.dead_letters import DeadLetterAbility, DeadLetterCheck, Origin, dead_letter_checks
from tests.components import PostgresServer
from tests.postgres.log.logs import Logs

pytestmark = pytest.mark.anyio

CAN: tuple[DeadLetterAbility, ...] = ("box", "headers")


class TableHarness:
    can = CAN
    origin = Origin("orders", 0, "orders")
    limit = 0

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def dead_letters(self) -> PostgresDeadLetters:
        return PostgresDeadLetters(self._logs.url, "billing", schema=self._logs.schema)

    def box(self) -> PostgresDeadLetters:
        return self.dead_letters()

    async def stored(self) -> Sequence[DeadLetter]:
        rows = self._logs.execute(
            "SELECT record, value FROM {}.lanes_dead_letters WHERE record IS NOT NULL ORDER BY number"
        )
        return [dead_letter_of(record, value) for record, value in rows]

    async def copy(self, dead_letter: DeadLetter) -> None:
        with self._logs.connect(autocommit=True) as connection:
            query = "INSERT INTO {}.lanes_dead_letters (box, id, record, value) VALUES ('billing', %s, %s, %s)"
            row = dead_letter.id, record_of(dead_letter), dead_letter.value
            connection.execute(self._logs.query(query), row)

    async def lose(self, dead_letter_id: str) -> None:
        with self._logs.connect(autocommit=True) as connection:
            query = (
                "DELETE FROM {0}.lanes_dead_letters WHERE number = "
                "(SELECT min(number) FROM {0}.lanes_dead_letters WHERE id = %s)"
            )
            connection.execute(self._logs.query(query), (dead_letter_id,))

    async def stranger(self) -> None:
        self._logs.execute("INSERT INTO {}.lanes_dead_letters (box, id, value) VALUES ('billing', 'x', '')")

    async def published(self) -> Sequence[Published]:
        rows = self._logs.execute("SELECT value, headers FROM {}.lanes_log_messages ORDER BY batch, index")
        return [Published(value, headers_of(headers)) for value, headers in rows]

    def acted_on(self, name: str) -> bool:
        return False

    def forged(self) -> Sequence[Origin]:
        return [Origin("absent", 0, "absent"), Origin("", 0, "x"), Origin("a\0b", 0, "x"), Origin("x" * 300, 0, "x")]

    def nowhere(self) -> tuple[DeadLetters, PostgresDeadLetters]:
        raise NotImplementedError("the ability place is not in can")

    def own(self) -> Origin:
        raise NotImplementedError("the ability place is not in can")

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        raise NotImplementedError("the ability outage is not in can")

    async def hang_up(self, dead_letters: DeadLetters) -> None:
        raise NotImplementedError("the ability outage is not in can")


@pytest.mark.parametrize("check", dead_letter_checks(CAN), ids=lambda check: check.__name__)
async def test_the_table_keeps_the_contract(check: DeadLetterCheck, postgres: PostgresServer, schema: str) -> None:
    await check(TableHarness(Logs.make(postgres, schema)))
