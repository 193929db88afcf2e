"""Campaigns over real adapters: ``python -m tests.simulated [kafka …] [--schedules 5000]``; ``--help`` lists the other
options.

The last line of the output is a JSON object with the figures. The exit status is 1 after a violation.
"""

from __future__ import annotations

import argparse
import json

from memsource.adapters.campaign import reduced
from memsource.adapters.runs import AdapterRun, run_schedule, schedule_of
from memsource.sim.runs.view import render
from tests.simulated.slices import ADAPTERS, adapter_of, sought, tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("adapters", nargs="*", default=[*ADAPTERS])
    parser.add_argument("--schedules", type=int, default=5_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seek", action="store_true", help="Seek the pairs that no run has reached.")
    parser.add_argument("--pairs", action="store_true", help="Print how many runs reached each pair.")
    parser.add_argument("--reduce", action="store_true", help="Reduce the first violation of each adapter.")
    parser.add_argument("--replay", metavar="TOKEN", help="Make one run and show it.")
    options = parser.parse_args()
    if options.replay is not None:
        schedule = schedule_of(options.replay)
        return shown(run_schedule(schedule, adapter_of(schedule.adapter)))
    figures: dict[str, int] = {"schedules": 0}
    pairs = unreached = violations = 0
    for name in options.adapters:
        report = tally(name, range(options.first, options.first + options.schedules), processes=options.processes)
        if options.seek:
            report += sought(name, report, options.first, processes=options.processes)
        print(name, json.dumps(report.figures()))
        for line in report.violations:
            print(" ", line)
        if report.unreached:
            print("  unreached:", ", ".join(map(str, report.unreached)))
        if options.pairs:
            for pair, count in sorted(report.pairs.items()):
                print(f"  {pair} {count}")
        if options.reduce and report.violations:
            adapter = adapter_of(name)
            _, _, token = report.violations[0].rpartition(": ")
            shown(reduced(run_schedule(schedule_of(token), adapter), adapter))
        figures["schedules"] += report.schedules
        figures[f"{name}_schedules"] = report.schedules
        pairs += len(report.pairs)
        unreached += len(report.unreached)
        violations += len(report.violations)
    print(json.dumps({**figures, "pairs": pairs, "pairs_unreached": unreached, "violations": violations}))
    return 1 if violations else 0


def shown(made: AdapterRun) -> int:
    """Print a run; return 1 if it has a finding."""
    print(render(made.run))
    for number, choice in made.schedule.decisions or ():
        print(f"  boundary {number}: {choice.kind}, {choice.amount:g} s, target {choice.target}")
    for check, what in made.run.findings.items():
        print(f"  {check}: {what}")
    print(f"  replay: {made.schedule.token()}")
    return 1 if made.run.findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
