"""`python -m bench [CASE...]`: measure, write `bench/out/<case>.json`, and print a table.

Each file holds a list of `{case, figure, unit, baseline, ratio, goal, holds}`; see `bench.figures.Figure`. The
status is 0 whether goals hold or not, 1 when something that is needed is missing, 2 for an unknown case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench import engine, jetstream, runtime, simloop
from bench.figures import OUT, Effort, Figure, table, write
from tests.components import ComponentError

CASES: Final[dict[str, Callable[[Effort], list[Figure]]]] = {
    "engine": engine.figures,
    "runtime": runtime.figures,
    "jetstream": jetstream.figures,
    "simloop": simloop.figures,
}


def main(names: Sequence[str], *, effort: Effort | None = None, folder: Path = OUT) -> int:
    """Measure these cases, all of them when none is named; the exit status."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"bench: unknown case {unknown[0]!r}: known are {', '.join(CASES)}", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
