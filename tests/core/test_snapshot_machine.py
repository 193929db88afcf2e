"""An engine restored from a snapshot behaves like the original, for any calls in every mode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from lanes.core.chains import Chains
from lanes.core.commits import Committer, PartitionCommits
from lanes.core.fair_queue import FairQueue, PartitionsInTurn
from lanes.core.flow import Flow
from lanes.core.lane import StoppedLane, StoppedLanes
from lanes.core.ledgers import AckLedger, OffsetLedger
from lanes.core.outbox import Outbox
from lanes.core.partition_budgets import PartitionBudgetEngine
from lanes.core.publishing import Publishing
from lanes.core.types import Message, Partition, Settlement
from tests.core import test_engine_machine, test_engine_modes_machine, test_partition_budgets_machine
from tests.core.builders import new_engine
from tests.core.twin import TwinBudgetEngine, TwinEngine
from tests.effort import is_full, runs

MACHINES = {
    "redelivery": (test_engine_machine, test_engine_machine.EngineMachine),
    "modes": (test_engine_modes_machine, test_engine_modes_machine.ModesMachine),
    "budgets": (test_partition_budgets_machine, test_partition_budgets_machine.BudgetMachine),
    "budgets in every mode": (test_partition_budgets_machine, test_partition_budgets_machine.BudgetModesMachine),
}


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(400)  # shrinking a failing example may take minutes; a passing test takes seconds
@pytest.mark.parametrize("name", MACHINES)
def test_a_restored_engine_answers_any_calls_as_the_original_does(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert comparisons(monkeypatch, name, examples=runs(40)) > (500 if is_full() else 20)


@pytest.mark.brief
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", MACHINES)
def test_a_restored_engine_answers_calls_as_the_original_does_in_a_few_examples(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert comparisons(monkeypatch, name, examples=4) > 20


def comparisons(monkeypatch: pytest.MonkeyPatch, name: str, examples: int) -> int:
    """Run a machine with twins, and return the number of calls whose effects were compared."""
    module, machine = MACHINES[name]
    engines: list[TwinEngine | TwinBudgetEngine] = []
    budgets = module is test_partition_budgets_machine

    def make(*args: Any) -> TwinEngine | TwinBudgetEngine:
        engines.append(TwinBudgetEngine(*args) if budgets else TwinEngine(*args))
        return engines[-1]

    monkeypatch.setattr(module, "make_engine" if budgets else "Engine", make)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))
    return sum(engine.compared for engine in engines)


KNOWN = {
    Partition: "aside assignment budget commits completed deadline dirty draining fencing_token finished floor id "
    "incarnation ledger live outputs partings reader recalled resettle steady tails unended",
    Message: "attempt broken data key lane next ordinal partition position raw received row size state token",
    AckLedger: "_ends _knows_settled _loose _loose_limit _runs_limit _starts highest unsettled",
    OffsetLedger: "_base _delivered _first _floor _messages _offsets _open _seeded _trailing highest waiting",
    PartitionCommits: "_count _sent changes confirmed confirmed_ordinal finished not_before over sending since",
    Committer: "_chains _effects _least _next_at _policy ahead partitions",
    Chains: "_key _keyless _lanes _ordered fenced ready relabels tails",
    FairQueue: "_count _heads _limit _turns running",
    PartitionsInTurn: "_count _heads",
    StoppedLanes: "_heap _keeps _order by_head",
    StoppedLane: "failure head kept until",
    Outbox: "dirty",
    Publishing: "handled produced size",
    Flow: "bytes in_flight look_at low max_bytes max_in_flight pause_at paused pausing peak peak_bytes taking",
    Settlement: "completed floor messages ordinal partition",
}
"""The slots that ``snapshot`` covers. A new one must be in the snapshot, or decide nothing.

The runtime sets ``outputs``. A partition with ``partings`` belongs to a source with pieces, of which no snapshot is
taken. ``_next_at`` and ``_least`` decide nothing: a restored ``Committer`` computes both."""

ENGINE = (
    "_most_running _outputs_full _ready _starts_held chains committer concurrency dirty effects flow halted late "
    "latest_assignment outbox partitions policy publishing retries running_handlers settled_count stopped zombies"
)

BUDGETS = "_bound assigned fair full low parting reserve"


@pytest.mark.parametrize("kind", KNOWN)
def test_a_snapshot_has_every_slot_of_the_core_classes(kind: type) -> None:
    kept = [name for base in kind.__mro__[:-1] for name in base.__slots__]  # type: ignore[attr-defined]
    assert sorted(kept) == KNOWN[kind].split()


def test_a_snapshot_covers_every_attribute_of_an_engine() -> None:
    assert sorted(vars(new_engine())) == ENGINE.split()
    budgets = PartitionBudgetEngine(new_engine().policy._replace(concurrency_per_partition=1))
    assert vars(budgets).keys() - vars(new_engine()).keys() == set(BUDGETS.split())
