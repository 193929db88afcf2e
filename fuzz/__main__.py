"""Attack the targets, each for its share of N seconds (60): `python -m fuzz [--seconds N] [TARGET...]`.

If a coverage-guided fuzzer is installed, the fuzzer tests a target for the first half of a share of 4 s or more. Random
examples attack the target for the remaining time. The last output is a table of target, random examples, inputs of the
fuzzer, seconds and failures. The command prints the traceback of each failure. The exit status is 0 if no target
failed, 1 if a target failed, and 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from fuzz import guided
from fuzz.running import Result, Target, run
from fuzz.targets import TARGETS

GUIDED_LEAST: Final = 4.0
"""Share of a target in seconds below which the coverage-guided fuzzer does not start."""


def main(arguments: Sequence[str]) -> int:
    """Run the attacks, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Random attacks on invariants.")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="seconds for all targets together (default: 60)"
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"target to attack, by default every target: {', '.join(TARGETS)}"
    )
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.targets if name not in TARGETS]
    if unknown:
        print(f"fuzz: unknown target {unknown[0]!r}; use {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    if not 0 <= chosen.seconds < float("inf"):
        print(f"fuzz: --seconds {chosen.seconds}: must be a finite number, 0 or more", file=sys.stderr)
        return 2
    targets = [TARGETS[name] for name in dict.fromkeys(chosen.targets or TARGETS)]
    results = [attacked(target, chosen.seconds / len(targets)) for target in targets]
    print(f"\n{'target':13} {'examples':>9} {'guided':>9} {'seconds':>8} {'failures':>9}")
    for result in results:
        failures = int(result.failure is not None)
        print(f"{result.name:13} {result.examples:9} {result.guided:9} {result.seconds:8.1f} {failures:9}")
    return int(any(result.failure is not None for result in results))


def attacked(target: Target, seconds: float) -> Result:
    """Attack one target, and print its invariant and its failure."""
    print(f"{target.name}: {target.invariant}", flush=True)
    if seconds < GUIDED_LEAST or not guided.available():
        result = run(target, seconds)
    else:
        inputs, broken = guided.attack(target.name, seconds / 2)
        # The random run starts with the fuzzer's finding, makes it small, and shows it.
        result = run(target, 0.0 if broken else seconds / 2)
        failure = result.failure or (AssertionError(broken) if broken else None)
        result = dataclasses.replace(result, guided=inputs, seconds=result.seconds + seconds / 2, failure=failure)
    if result.failure is not None:
        # Hypothesis adds the falsifying example to the exception as a note.
        traceback.print_exception(result.failure, file=sys.stdout)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
