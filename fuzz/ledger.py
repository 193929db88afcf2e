"""A ledger agrees with a set of all positions, and a bounded ledger may forget positions but never invents one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.core.ledgers import AckLedger
from lanes.core.types import Message, Partition
from tests.core.builders import new_message, new_partition

FEW_RUNS = 4


class NaiveLedger:
    """A naive ledger: the messages in flight and the settled positions."""

    def __init__(self) -> None:
        self.unsettled: dict[int, Message] = {}
        self.settled: set[int] = set()
        self.highest = -1

    def settle(self, messages: Sequence[Message]) -> tuple[int, int]:
        mine = {m for m in messages if self.unsettled.get(m.position) is m}
        self.settled |= {m.position for m in mine}
        self.unsettled = {p: m for p, m in self.unsettled.items() if m not in mine}
        return len(mine), sum(m.size for m in mine)

    def floor(self) -> int:
        return min(self.unsettled, default=self.highest + 1)


class Step(NamedTuple):
    """A step: skip ``gap`` positions, admit ``admit`` messages, then settle some known messages."""

    gap: int
    admit: int
    settle: list[int]
    strangers: bool


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([0, 0, 1, 2, 10**15]),
        st.integers(0, 6),
        st.lists(st.integers(0, 40), max_size=8),
        st.booleans(),
    ),
    max_size=30,
)


def check(steps: list[Step]) -> None:
    """Run both ledgers and the naive ledger through all steps, and compare them."""
    naive, ledger, few = NaiveLedger(), AckLedger(), AckLedger()
    few._runs_limit, few._loose_limit = FEW_RUNS, 4
    partition = new_partition()
    known: list[Message] = []
    for step in steps:
        _admit(partition, step, naive, [ledger, few], known)
        messages = [known[index % len(known)] for index in step.settle if known]
        if step.strangers:
            # Messages of the same positions that are not in flight in these ledgers.
            messages += [new_message(partition, message.position) for message in messages]
        settled = naive.settle(messages)
        assert ledger.settle(messages) == settled
        assert few.settle(messages) == settled
        assert ledger.unsettled == few.unsettled == naive.unsettled
        assert ledger.floor() == naive.floor()
        for position in {p + near for message in known for p in [message.position] for near in (-1, 0, 1)}:
            assert ledger.is_settled(position) == (position in naive.settled)
            assert not few.is_settled(position) or position in naive.settled
        runs = sum(p - 1 not in naive.settled for p in naive.settled)
        ledger._tidy()
        assert len(ledger._starts) == runs
        assert len(few._starts) <= FEW_RUNS


def _admit(
    partition: Partition, step: Step, naive: NaiveLedger, ledgers: list[AckLedger], known: list[Message]
) -> None:
    for number in range(step.admit):
        position = naive.highest + 1 + (0 if number else step.gap)
        message = new_message(partition, position, size=position % 7)
        known.append(message)
        naive.unsettled[position] = message
        naive.highest = position
        for ledger in ledgers:
            ledger.unsettled[position] = message
            ledger.highest = position


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of sequences of deliveries and settlements."""

    @effort
    @given(steps=STEPS)
    def ledger(steps: list[Step]) -> None:
        tick()
        check(steps)

    return [ledger]
