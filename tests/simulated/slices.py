"""The campaigns over real adapters in slices of seeds, each in a separate process."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from memsource.adapters.campaign import AdapterReport, campaign, seek
from memsource.adapters.pairs import Pair
from memsource.adapters.runs import Adapter
from tests.effort import spread

ADAPTERS: Final = {
    "kafka": ("tests.simulated.kafka.adapter", "KafkaAdapter"),
    "jetstream": ("tests.simulated.jetstream.adapter", "JetStreamAdapter"),
    "postgres": ("tests.simulated.postgres.adapter", "PostgresAdapter"),
    "ranges": ("tests.simulated.postgres.adapter", "RangesAdapter"),
}
"""Module and class of the side of each adapter."""

CAMPAIGN: Final = int(os.environ.get("SCHEDULES") or 5_000)
"""Schedules of each adapter in the campaign: `make campaign SCHEDULES=5000`."""

RANGED: Final = CAMPAIGN if CAMPAIGN >= 5_000 else CAMPAIGN // 2
"""Schedules with ranges in the campaign. One takes twice as long as one of PostgreSQL without ranges."""

ALL_PAIRS: Final = 5_000
"""Schedules of a campaign that has to reach every pair of faults."""

ENOUGH: Final = 60
"""Schedules of an adapter that have every kind of fault."""

PROCESSES: Final = 2
SEEKS: Final = 400
"""Maximum number of runs that seek one pair of faults."""

SEEDS_A_SLICE: Final = 25


def adapter_of(name: str) -> Adapter:
    """Make an adapter by its name."""
    module, kind = ADAPTERS[name]
    make: Callable[[], Adapter] = getattr(importlib.import_module(module), kind)
    return make()


def whole(name: str, schedules: int) -> AdapterReport:
    """Run a campaign. From ``ALL_PAIRS`` schedules on, also seek the pairs that no run has reached. Blocks."""
    report = tally(name, range(schedules))
    if schedules >= ALL_PAIRS:
        report += sought(name, report, schedules)
    return report


def slice_of(name: str, seeds: range) -> AdapterReport:
    """Run some seeds."""
    gc.collect()
    return campaign(adapter_of(name), seeds)


def seek_one(name: str, seeds: range, pair: Pair) -> AdapterReport:
    """Make runs that seek a pair of faults."""
    gc.collect()
    return seek(adapter_of(name), pair, seeds)


def sought(name: str, report: AdapterReport, seed: int, *, processes: int = PROCESSES) -> AdapterReport:
    """Seek the pairs that no run of a report has reached. Blocks."""
    result = AdapterReport()
    for each in spread(partial(seek_one, name, range(seed, seed + SEEKS)), report.unreached, processes):
        result += each
    return result


def tally(name: str, seeds: range, *, processes: int = PROCESSES) -> AdapterReport:
    """Run all seeds of an adapter. Blocks."""
    jobs = [range(begin, min(begin + SEEDS_A_SLICE, seeds.stop)) for begin in seeds[::SEEDS_A_SLICE]]
    result = AdapterReport()
    for each in spread(partial(slice_of, name), jobs, processes):
        result += each
    return result
