"""The campaigns over real adapters in slices of seeds, each in a separate process."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Final

from memsource.adapters.campaign import AdapterReport, campaign
from memsource.adapters.runs import Adapter

ADAPTERS: Final = {
    "kafka": ("tests.simulated.kafka.adapter", "KafkaAdapter"),
    "jetstream": ("tests.simulated.jetstream.adapter", "JetStreamAdapter"),
}
"""Module and class of the side of each adapter."""

CAMPAIGN: Final = int(os.environ.get("SCHEDULES") or 5_000)
"""Schedules of each adapter in the campaign: `make campaign SCHEDULES=5000`."""

PROCESSES: Final = 2
SEEDS_A_SLICE: Final = 25


def adapter_of(name: str) -> Adapter:
    """Make the side of an adapter."""
    module, kind = ADAPTERS[name]
    make: Callable[[], Adapter] = getattr(importlib.import_module(module), kind)
    return make()


def slice_of(name: str, begin: int, end: int) -> AdapterReport:
    """Run the seeds ``begin`` to ``end - 1``."""
    gc.collect()
    return campaign(adapter_of(name), range(begin, end))


def tally(name: str, seeds: range, *, processes: int = PROCESSES) -> AdapterReport:
    """Run all seeds of an adapter, in several processes."""
    begins = range(seeds.start, seeds.stop, SEEDS_A_SLICE)
    ends = [min(begin + SEEDS_A_SLICE, seeds.stop) for begin in begins]
    result = AdapterReport()
    # A forked process would have the threads' locks of this one.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for each in pool.map(partial(slice_of, name), begins, ends):
            result += each
    return result
