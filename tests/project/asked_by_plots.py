"""The figures that the plots of the benchmark read."""

from __future__ import annotations

from pathlib import Path

from bench.figures import Figure, cost
from bench.plots import DRAWN, Measured


class _Recording(Measured):
    """A set of measurements that has every figure, and records each request."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.asked: list[tuple[str, str]] = []

    def figure(self, case: str, name: str) -> Figure:
        self.asked.append((case, name))
        return cost(name, "unit", 1.0, 1.0)


def asked_by_plots() -> list[tuple[str, str]]:
    """Return the case and name of each figure that a plot shows, in the order of the plots."""
    recording = _Recording()
    for panels in DRAWN.values():
        panels(recording)
    return recording.asked
