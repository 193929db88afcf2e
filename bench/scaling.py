"""The cost of a message over the number of keys and of messages in flight, in microseconds of CPU.

`bench.plots` draws the figures. ``scaling run`` is a whole run over an in-process source with a handler that does
nothing, as in `bench.runtime`; its baseline is a plain loop that awaits the handler. ``scaling engine`` is the engine
alone, as in `bench.engine`; its baseline is a loop over a dict and a queue. The engine figures vary the number of keys,
or the number of delivered messages before the first call of ``take``.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from bench.engine import Case, in_dict_and_queue, in_engine
from bench.figures import Effort, Figure, cost, interleaved
from bench.runtime import MESSAGES, in_loop, in_run

KEYS: Final = (1, 10, 100, 1_000, 10_000, 100_000)
IN_FLIGHT: Final = (100, 1_000, 10_000, 100_000)


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baseline."""
    count = effort.messages(MESSAGES)
    made: list[Figure] = []
    for keys in KEYS:
        loop, run = interleaved([partial(in_loop, count, keys), partial(in_run, count, keys)], effort.repeats)
        made.append(cost(name("run", keys, "keys"), "µs CPU/message", run, loop))
    made += [_engine(name("engine", keys, "keys"), Case(keys=keys), effort) for keys in KEYS]
    for number in IN_FLIGHT:
        # A run of messages fits into the room.
        case = Case(in_flight=number, batch=min(number, Case.batch))
        made.append(_engine(name("engine", number, "in flight"), case, effort))
    return made


def name(what: str, number: int, of: str) -> str:
    """Return the name of a case with this number of keys or messages in flight."""
    return f"scaling {what}, {number:,} {of.removesuffix('s') if number == 1 else of}"


def _engine(named: str, case: Case, effort: Effort) -> Figure:
    bare, engine = interleaved(
        [partial(in_dict_and_queue, case, effort), partial(in_engine, case, effort)], effort.repeats
    )
    return cost(named, "µs CPU/message", engine, bare)
