"""Durations of the demo's options need a unit."""

from __future__ import annotations

import pytest

from demo.options import seconds


@pytest.mark.parametrize(("text", "value"), [("10ms", 0.01), ("0.5s", 0.5), (".5s", 0.5), ("2m", 120.0), ("0s", 0.0)])
def test_a_duration_has_a_unit(text: str, value: float) -> None:
    assert seconds("--latency", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "10", "ms", "1e3s", "-1s", "1 s", "infs", "10ms "])
def test_invalid_durations_end_the_process(text: str) -> None:
    with pytest.raises(SystemExit):
        seconds("--latency", text)
