"""Measure cases and print a table, or draw plots from earlier measurements.

| command | does |
|---|---|
| `python -m bench [--scale X] [--repeats N] [CASE...]` | measures, writes `bench/out/<case>.json`, prints a table |
| `python -m bench plots [--published] [PLOT...]` | draws figures as `docs/plots/<plot>.svg`; see `bench.plots` |

For a rough result, `--scale 0.1` measures with a tenth of the messages, and `--repeats 1` measures most figures once.

Each file contains a list of `{case, figure, unit, baseline, ratio, goal, holds}`; see `bench.figures.Figure`. The exit
status is 0 with met and with missed goals, 1 when a needed component is missing, and 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench import (
    cohort,
    cohort_bounds,
    cohort_repeats,
    engine,
    http_port,
    jetstream,
    jetstream_faststream,
    jetstream_light,
    jetstream_shared,
    jetstream_stuck,
    journal,
    kafka,
    kafka_bounds,
    kafka_handlers,
    kafka_light,
    kafka_recovery,
    kafka_repeats,
    kafka_widths,
    plots,
    postgres,
    postgres_log,
    postgres_ranges,
    processes,
    runtime,
    scaling,
    simloop,
    spark,
    spark_audit,
    spark_bounds,
    zone,
)
from bench.figures import OUT, Effort, Figure, table, write
from tests.components import ComponentError

CASES: Final[dict[str, Callable[[Effort], list[Figure]]]] = {
    "engine": engine.figures,
    "runtime": runtime.figures,
    "processes": processes.figures,
    "zone": zone.figures,
    "scaling": scaling.figures,
    "journal": journal.figures,
    "jetstream": jetstream.figures,
    "jetstream-faststream": jetstream_faststream.figures,
    "jetstream-light": jetstream_light.figures,
    "jetstream-shared": jetstream_shared.figures,
    "jetstream-stuck": jetstream_stuck.figures,
    "cohort": cohort.figures,
    "cohort-bounds": cohort_bounds.figures,
    "cohort-repeats": cohort_repeats.figures,
    "kafka": kafka.figures,
    "kafka-handlers": kafka_handlers.figures,
    "kafka-light": kafka_light.figures,
    "kafka-bounds": kafka_bounds.figures,
    "kafka-recovery": kafka_recovery.figures,
    "kafka-repeats": kafka_repeats.figures,
    "kafka-widths": kafka_widths.figures,
    "http": http_port.figures,
    "postgres": postgres.figures,
    "postgres-log": postgres_log.figures,
    "postgres-ranges": postgres_ranges.figures,
    "spark": spark.figures,
    "spark-bounds": spark_bounds.figures,
    "spark-audit": spark_audit.figures,
    "simloop": simloop.figures,
}


def main(names: Sequence[str], *, effort: Effort | None = None, folder: Path = OUT) -> int:
    """Measure the named cases, or all cases without a name, and return the exit status."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"bench: unknown case {unknown[0]!r}; use {', '.join(CASES)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for name in dict.fromkeys(names or CASES):
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        try:
            measured = CASES[name](effort or Effort())
        except ComponentError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        write(name, measured, folder)
        figures += measured
    print(table(figures))
    return 0


def command(arguments: Sequence[str]) -> int:
    """Run the command of the command line, and return the exit status."""
    if arguments[:1] == ["plots"]:
        return plots.command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        epilog="`python -m bench plots` draws the measured figures; see `python -m bench plots --help`",
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"case to measure, by default every case: {', '.join(CASES)}"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of messages")
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements of each case")
    given = parser.parse_args(arguments)
    return main(given.cases, effort=Effort(scale=given.scale, repeats=given.repeats))


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
