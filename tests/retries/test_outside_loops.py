"""Each retry loop of the adapters and of the cohort ends in the pass in which its end becomes known."""

from __future__ import annotations

import pytest

from tests.retries.stubs import STUBBED, StubbedLoop, stubbed_faults_of


@pytest.mark.parametrize("kind", STUBBED, ids=lambda kind: kind.__name__)
def test_each_retry_loop_ends_in_the_pass_in_which_its_event_happens(kind: type[StubbedLoop]) -> None:
    assert stubbed_faults_of(kind) == []
