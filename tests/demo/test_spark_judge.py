"""The judge of the demo on Spark finds every fault in its tables, and reports no other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest

from demo import DemoError
from demo.ledger import Step
from demo.spark.judge import Judgement, judge
from demo.spark.tables import Tables
from lanes.core.types import Message, Partition, PartitionId
from tests.components import PostgresServer
from tests.postgres.tables import Reader

LOG: list[Step] = [(case, step) for step in range(4) for case in ("a", "b", "c")]
_numbers = itertools.count(1)


@pytest.fixture
def tables(postgres: PostgresServer) -> Iterator[Tables]:
    made = Tables(postgres.url, f"judge{os.getpid()}x{next(_numbers)}")
    made.make(LOG)
    yield made
    assert made.drop()


def store(tables: Tables, steps: Sequence[Step]) -> None:
    """Store effects like a handler without a fence: in this order, each with the state."""
    with tables.connected() as connection:
        for at, step in enumerate(steps):
            connection.execute(tables.put_query, (*step, 0, at))


def judged(tables: Tables, steps: Sequence[Step], letters: Sequence[Step] = ()) -> Judgement:
    store(tables, steps)
    tables.add_letters(letters)
    return judge(tables)


def whole(**found: object) -> Judgement:
    nothing: dict[str, object] = {
        "lost": [],
        "doubled": [],
        "violations": [],
        "foreign": [],
        "states": [],
        "dead_letters": [],
    }
    return Judgement(**{**nothing, "repeats": 0, **found})  # type: ignore[arg-type]


def test_a_log_whose_effects_were_stored_in_order_has_no_finding(tables: Tables) -> None:
    assert judged(tables, LOG) == whole()


def test_cases_may_overtake_each_other(tables: Tables) -> None:
    assert judged(tables, sorted(LOG)) == whole()


def test_a_duplicate_dead_letter_is_not_lost(tables: Tables) -> None:
    letter = ("b", 2)
    found = judged(tables, [step for step in LOG if step != letter], [letter, letter])
    assert found == whole(dead_letters=[letter])


def test_a_lost_event_is_named(tables: Tables) -> None:
    gone = [("a", 0), ("c", 3)]
    assert judged(tables, [step for step in LOG if step not in gone]) == whole(lost=gone)


def test_doubled_effects_are_counted(tables: Tables) -> None:
    found = judged(tables, [*LOG, ("a", 3), ("a", 3), ("b", 1)])
    assert found == whole(doubled=[("a", 3, 2), ("b", 1, 1)], states=[("b", 1)])
    assert found.double_effects == 3


def test_swapped_effects_are_a_violation(tables: Tables) -> None:
    swapped = list(LOG)
    one, other = LOG.index(("c", 1)), LOG.index(("c", 2))
    swapped[one], swapped[other] = swapped[other], swapped[one]
    assert judged(tables, swapped) == whole(violations=[("c", 1)])


def test_an_effect_without_an_event_is_foreign(tables: Tables) -> None:
    found = judged(tables, [*LOG, ("a", 4)], [("d", 0)])
    assert found == whole(foreign=[("a", 4), ("d", 0)], dead_letters=[("d", 0)])


@pytest.mark.parametrize("change", ["SET steps = 5", "SET step = 2"])
def test_a_state_that_is_not_that_of_its_effects_is_found(tables: Tables, change: str) -> None:
    store(tables, LOG)
    with tables.connected() as connection:
        connection.execute(f"UPDATE {tables.schema}.cases {change} WHERE case_id = 'b'")
    found = judge(tables)
    assert [case for case, _ in found.states] == ["b"]


def test_a_missing_state_is_found(tables: Tables) -> None:
    store(tables, LOG)
    with tables.connected() as connection:
        connection.execute(tables.query("DELETE FROM {schema}.cases WHERE case_id = 'c'"))
    assert judge(tables) == whole(states=[("c", -1)])


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_fence_keeps_a_repeat_out_and_shows_disorder(tables: Tables) -> None:
    partition = Partition(PartitionId("log", 0), Reader())
    partition.live = True
    async with await tables.connect() as connection:

        async def handled(position: int, step: Step) -> bool:
            message = Message(partition, position, step[0].encode(), 1, None, None)
            return await tables.put(connection, message, step)

        # Position 2 has its effect before 1, which then has none; and 0 is repeated.
        order = [(0, ("a", 0)), (2, ("a", 2)), (1, ("a", 1)), (0, ("a", 0)), (3, ("b", 0))]
        assert [await handled(*each) for each in order] == [True, True, False, False, True]
        assert await tables.stored(connection) == 3
    found = judge(tables)
    assert (found.violations, found.repeats, found.doubled) == ([("a", 1)], 1, [])
    assert ("a", 1) in found.lost


def test_a_drop_of_tables_is_idempotent(tables: Tables) -> None:
    assert tables.drop()
    assert tables.drop()
    with tables.connected() as connection:
        found = connection.execute("SELECT to_regnamespace(%s)", (tables.schema,)).fetchone()
    assert found == (None,)


def test_an_unreachable_server_is_one_clear_line() -> None:
    nowhere = Tables("postgresql://me:secret@127.0.0.1:1/test", "x")
    with pytest.raises(DemoError, match=r"PostgreSQL: .*127\.0\.0\.1.*start the server") as raised:
        nowhere.make(LOG)
    assert "secret" not in str(raised.value)
    assert not nowhere.drop()
