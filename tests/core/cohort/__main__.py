"""The campaign of random walks of lease machines: ``python -m tests.core.cohort [--walks 23000]``.

The output names the number of walks that reached each pair of faults. Its last line is a JSON object with the figures.
The exit status is 1 after a violation.
"""

from __future__ import annotations

import argparse
import json

from tests.core.cohort.campaign import tally
from tests.core.cohort.test_walks import WALKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core.cohort", description=__doc__)
    parser.add_argument("--walks", type=int, default=WALKS)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    result = tally(range(options.first, options.first + options.walks))
    for line in result.violations:
        print(line)
    for pair, count in sorted(result.pairs.items()):
        print(f"{pair} {count}")
    for pair in result.unreached:
        print(f"{pair} unreached")
    print(json.dumps(result.figures()))
    return 1 if result.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
