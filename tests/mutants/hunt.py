"""Plant mutants and look for them: ``python -m tests.mutants.hunt NAME...``, each in a process of its own.

Prints a JSON array a line: the name; check -> the first thing it found, and after how many runs; the same of the state
machine that looks for it as well.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Sequence

# What every one of them needs and no mutant changes is imported once.
import anyio  # noqa: F401
import blake3  # noqa: F401
import hypothesis  # noqa: F401
import opentelemetry  # noqa: F401
import pytest  # noqa: F401
import trio.testing  # noqa: F401

from tests.mutants import install
from tests.mutants.hunted import ending
from tests.mutants.table import MUTANTS


def main(names: Sequence[str]) -> int:
    """One after the other; 1 when one of them failed to be looked for: what became of it is said."""
    logging.disable(logging.CRITICAL)
    # A process that dies of a signal leaves no traceback by itself.
    faulthandler.enable()
    failed = False
    for name in names:
        child = os.fork()
        if child == 0:
            hunt(name)
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            failed = True
            print(f"the hunt for the mutant {name} {ending(code)}", file=sys.stderr, flush=True)
    return int(failed)


def hunt(name: str) -> None:
    """Nothing of ``lanes`` may be imported before the mutant is installed."""
    mutant = MUTANTS[name]
    install(mutant)
    from tests.mutants.campaigns import CAMPAIGNS

    found = CAMPAIGNS[mutant.campaign](mutant.found_by)
    beside = CAMPAIGNS[mutant.machine[0]](mutant.machine[1:]).checks if mutant.machine else {}
    print(json.dumps([name, found.checks, found.runs, beside]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
