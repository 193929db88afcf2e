"""The judge: a comparison of the tables of a run with the log, by SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import Connection

from demo.ledger import Step
from demo.spark.tables import Tables

_DONE: Final[LiteralString] = (
    "(SELECT case_id, step FROM {schema}.effects UNION SELECT case_id, step FROM {schema}.dead_letters)"
)
_LOST: Final[LiteralString] = "SELECT case_id, step FROM {schema}.published EXCEPT " + _DONE
_FOREIGN: Final[LiteralString] = _DONE + " EXCEPT SELECT case_id, step FROM {schema}.published"
_DOUBLED: Final[LiteralString] = (
    "SELECT case_id, step, count(*) - 1 FROM {schema}.effects GROUP BY case_id, step HAVING count(*) > 1"
)
# The rows of a case are in the order of their transactions, because each event waits for its predecessor.
_DISORDERED: Final[LiteralString] = (
    "SELECT case_id, step FROM (SELECT case_id, step, "
    "row_number() OVER (PARTITION BY case_id, step ORDER BY id) AS nth, "
    "max(step) OVER (PARTITION BY case_id ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before "
    "FROM {schema}.effects) AS each WHERE nth = 1 AND step < before "
    "UNION ALL SELECT case_id, step FROM {schema}.refused WHERE verdict = 'violation'"
)
_STATES: Final[LiteralString] = (
    "SELECT case_id, coalesce(state.step, -1) FROM {schema}.cases AS state FULL JOIN "
    "(SELECT case_id, max(step) AS step, count(*) AS steps FROM {schema}.effects GROUP BY case_id) AS sum "
    "USING (case_id) WHERE (state.step, state.steps) IS DISTINCT FROM (sum.step, sum.steps)"
)
_REPEATS: Final[LiteralString] = "SELECT count(*) FROM {schema}.refused WHERE verdict = 'repeat'"
_LETTERS: Final[LiteralString] = "SELECT DISTINCT case_id, step FROM {schema}.dead_letters"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The effects of the replay compared with the log. The lists are in rising order.

    Attributes:
        lost: Events without an effect and without a dead letter.
        doubled: Case, step and number of surplus effects of each event with several effects.
        violations: Events whose effect the tables stored after a later step of their case, or refused for this reason.
        foreign: Stored or dead-lettered events outside the log.
        states: Case and stored step, or -1 without a state, of each case whose state differs from its effects.
        dead_letters: Events with a dead letter.
        repeats: Number of effects that the fence refused as repeats.
    """

    lost: Sequence[Step]
    doubled: Sequence[tuple[str, int, int]]
    violations: Sequence[Step]
    foreign: Sequence[Step]
    states: Sequence[Step]
    dead_letters: Sequence[Step]
    repeats: int

    @property
    def double_effects(self) -> int:
        """Number of surplus effects."""
        return sum(times for _, _, times in self.doubled)


def judge(tables: Tables) -> Judgement:
    """Compare effects and dead letters with the log, and states with the effects. Blocks."""
    with tables.connected() as connection:

        def found(text: LiteralString) -> list[Any]:
            return sorted(_rows(connection, tables, text))

        return Judgement(
            lost=found(_LOST),
            doubled=found(_DOUBLED),
            violations=found(_DISORDERED),
            foreign=found(_FOREIGN),
            states=found(_STATES),
            dead_letters=found(_LETTERS),
            repeats=found(_REPEATS)[0][0],
        )


def _rows(connection: Connection[Any], tables: Tables, text: LiteralString) -> list[Any]:
    return connection.execute(tables.query(text)).fetchall()
