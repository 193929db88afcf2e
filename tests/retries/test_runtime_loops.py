"""Each retry loop of the runtime ends or continues as its contract says, in any pass in which an event arrives."""

from __future__ import annotations

import pytest

from tests.retries.harness import LOOPS, RetryLoop, faults_of


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_each_retry_loop_of_the_runtime_checks_its_conditions_on_every_pass(loop: RetryLoop) -> None:
    assert faults_of(loop) == []
