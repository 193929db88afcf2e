"""Plant a mutant and look for it: ``python -m tests.mutants.hunt NAME``, in a process of its own.

Prints a JSON object: check -> the first thing it found.
"""

from __future__ import annotations

import json
import logging
import sys

from tests.mutants import install
from tests.mutants.table import MUTANTS


def main(name: str) -> None:
    """Nothing of ``lanes`` may be imported before the mutant is installed."""
    logging.disable(logging.CRITICAL)
    mutant = MUTANTS[name]
    install(mutant)
    from tests.mutants.campaigns import CAMPAIGNS

    print(json.dumps(CAMPAIGNS[mutant.campaign](mutant.found_by)))


if __name__ == "__main__":
    main(sys.argv[1])
