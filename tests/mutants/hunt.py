"""Plant mutants and search for them, each in a separate process: ``python -m tests.mutants.hunt NAME...``.

Prints a JSON array for each mutant, on one line: its name, the first finding of each check, the number of runs, and the
findings of the state machine that must find the mutant too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Sequence

# Packages that every search needs, and that no mutant changes, are imported once.
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
    """Search for the mutants one after the other. The exit status is 1 if a search failed; stderr then tells how the
    search ended."""
    logging.disable(logging.CRITICAL)
    # Without the fault handler, a process that a signal kills leaves no traceback.
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
    """Search for a mutant, and print the result. No module of ``lanes`` may be imported before the call."""
    mutant = MUTANTS[name]
    install(mutant)
    from tests.mutants.campaigns import CAMPAIGNS

    found = CAMPAIGNS[mutant.campaign](mutant.found_by)
    beside = CAMPAIGNS[mutant.machine[0]](mutant.machine[1:]).checks if mutant.machine else {}
    print(json.dumps([name, found.checks, found.runs, beside]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
