"""Messages that arrive at a steady rate: the CPU and the latencies of the process that handles them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

from bench.figures import Effort, Figure, cost

RATES: Final = {10: 10.0, 1_000: 5.0, 5_000: 5.0}
"""Seconds of each rate, in messages a second."""

CPU_GOAL: Final = 1.8
P99_GOAL: Final = 1.3
RATE_OF_GOALS: Final = 1_000
IDLE: Final = 10.0
IDLE_GOAL: Final = 0.5
SETTLED_IN: Final = 4.0
"""Seconds before the measurement of an idle consumer. Less than a tenth of the usual effort shortens the wait."""

LEAST: Final = 20
"""Fewest messages of a measurement, because percentiles need several."""

TICK: Final = 0.002
WARM_UP: Final = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The cost of one consumer: percent of a core, microseconds of CPU a message, and seconds of latency."""

    busy: float
    cpu: float
    p50: float
    p95: float
    p99: float


class Watch:
    """A clock of the CPU and the latencies of a process, from the end of the warm-up to the end of the messages.

    Args:
        count: Number of sent messages.
        warm_up: Number of messages before the measurement.
        done: Function to call at the last message.
    """

    def __init__(self, count: int, warm_up: int, done: Callable[[], object]) -> None:
        self._left, self._warm_up, self._done = count, count - warm_up, done
        self._latencies: list[float] = []
        self._cpu = self._begin = 0.0
        self._count = warm_up

    def handled(self, value: bytes | None) -> None:
        """Count one message."""
        now = time.time_ns()
        assert value is not None
        if self._left == self._warm_up:
            self._cpu, self._begin = time.process_time(), time.monotonic()
        elif self._left < self._warm_up:
            self._latencies.append((now - int(value)) / 1e9)
        self._left -= 1
        if not self._left:
            self._cpu = time.process_time() - self._cpu
            self._begin = time.monotonic() - self._begin
            self._done()

    def load(self) -> Load:
        """Return the measurement."""
        cuts = quantiles(self._latencies, n=100)
        return Load(
            100 * self._cpu / self._begin,
            1e6 * self._cpu / len(self._latencies),
            median(self._latencies),
            cuts[94],
            cuts[98],
        )


def paced(
    name: str,
    effort: Effort,
    idle: Callable[[str, float, float], float],
    load: Callable[[str, int, int], Load],
    goals: bool,
) -> list[Figure]:
    """Measure an idle consumer and a consumer at every rate, each with the plain loop as its baseline.

    Args:
        name: Name of the case.
        effort: Amount of work.
        idle: Returns the percent of a core that ``"lanes"``, or the ``"plain"`` loop, needs without a message, after a
            number of seconds and for a number of seconds.
        load: Returns the measurement of one consumer, for a number of messages and a rate.
        goals: Whether the figures have goals.

    Returns:
        The rows.
    """
    settled, seconds = SETTLED_IN * min(1.0, 10 * effort.scale), IDLE * min(1.0, effort.scale)
    measured = [idle(by, settled, seconds) for _ in range(effort.repeats) for by in ("lanes", "plain")]
    figure, baseline = median(measured[::2]), median(measured[1::2])
    made = [cost(f"{name} idle", "% of a core", figure, baseline, IDLE_GOAL if goals else None)]
    for rate, seconds in RATES.items():
        count = max(LEAST, effort.messages(round(rate * seconds)))
        ours: list[Load] = []
        plain: list[Load] = []
        for _ in range(effort.repeats):
            ours.append(load("lanes", count, rate))
            plain.append(load("plain", count, rate))
        made += _rows(name, rate, ours, plain, goals=goals and rate == RATE_OF_GOALS)
    return made


def _rows(name: str, rate: int, ours: list[Load], plain: list[Load], *, goals: bool) -> list[Figure]:
    def of(what: str, unit: str, figure: Callable[[Load], float]) -> Figure:
        case = f"{name} {rate:,}/s {what}"
        return cost(case, unit, median(map(figure, ours)), median(map(figure, plain)))

    cpu = of("CPU", "µs CPU/message", lambda load: load.cpu)
    p50 = of("p50", "ms", lambda load: 1e3 * load.p50)
    p99 = of("p99", "ms", lambda load: 1e3 * load.p99)
    return [cpu.within(CPU_GOAL), p50, p99.within(P99_GOAL)] if goals else [cpu, p50, p99]


def due(begin: float, rate: int, count: int) -> int:
    """Return the number of messages that the sender must have sent since ``begin``."""
    return min(count, int((time.monotonic() - begin) * rate) + 1)


def pause(begin: float, rate: int, sent: int) -> float:
    """Return the seconds until the sender must send the next message."""
    return max(TICK, begin + sent / rate - time.monotonic())
