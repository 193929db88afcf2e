"""An engine restored from a snapshot behaves like the one it was taken of: whatever is called, in every mode."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core import test_engine_machine, test_engine_modes_machine
from tests.core.twin import TwinEngine

MACHINES = {
    "redelivery": (test_engine_machine, test_engine_machine.EngineMachine),
    "modes": (test_engine_modes_machine, test_engine_modes_machine.ModesMachine),
}


def run(monkeypatch: pytest.MonkeyPatch, name: str) -> list[TwinEngine]:
    module, machine = MACHINES[name]
    engines: list[TwinEngine] = []

    def make(*args: object) -> TwinEngine:
        engines.append(TwinEngine(*args))  # type: ignore[arg-type]
        return engines[-1]

    monkeypatch.setattr(module, "Engine", make)
    effort = settings(max_examples=25, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(machine, settings=effort)
    return engines


@pytest.mark.timeout(400)  # making a failing example small may take minutes; finding none takes seconds
@pytest.mark.parametrize("name", MACHINES)
def test_a_restored_engine_behaves_alike(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engines = run(monkeypatch, name)
    assert sum(engine.compared for engine in engines) > 500
