"""Every machine of the engine runs a few examples, so that ``make test-fast`` finds most faults of the engine."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.core.test_engine_machine import EngineMachine
from tests.core.test_engine_modes_machine import ModesMachine
from tests.core.test_partition_budgets_machine import BudgetMachine, BudgetModesMachine

EXAMPLES: Final = {EngineMachine: 20, ModesMachine: 20, BudgetMachine: 12, BudgetModesMachine: 8}


@pytest.mark.brief
@pytest.mark.parametrize("machine", EXAMPLES, ids=lambda machine: machine.__name__)
@pytest.mark.timeout(400)  # as in the long runs of these machines
def test_a_few_examples_of_each_state_machine_agree_with_its_model(machine: type[RuleBasedStateMachine]) -> None:
    brief = settings(max_examples=EXAMPLES[machine], stateful_step_count=25, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(machine, settings=brief)
