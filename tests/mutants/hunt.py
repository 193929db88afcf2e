"""Plant mutants and search for them, each in a separate process: ``python -m tests.mutants.hunt NAME...``.

Prints a JSON array for each mutant, on one line: its name, the first finding of each check, the number of runs, and the
findings of the state machine that must find the mutant too.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from tests.mutants import install
from tests.mutants.hunted import ending
from tests.mutants.in_place import Imported, forget, imported
from tests.mutants.table import MUTANTS

if TYPE_CHECKING:
    from tests.mutants.campaigns import Campaign

CAMPAIGNS: Final = "tests.mutants.campaigns"
"""Module of the campaigns. It is imported by `imported`, which notes the calls of the import."""


def main(names: Sequence[str]) -> int:
    """Search for the mutants one after the other. The exit status is 1 if a search failed; stderr then tells how the
    search ended."""
    logging.disable(logging.CRITICAL)
    # Without the fault handler, a process that a signal kills leaves no traceback.
    faulthandler.enable()
    ready = imported(CAMPAIGNS)
    # A campaign collects garbage often; it need not visit the imported modules. State machines make much that lives for
    # long, and few cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    failed = False
    for name in names:
        child = os.fork()
        if child == 0:
            hunt(name, ready)
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            failed = True
            print(f"the hunt for the mutant {name} {ending(code)}", file=sys.stderr, flush=True)
    return int(failed)


def hunt(name: str, ready: Imported) -> None:
    """Search for a mutant, and print the result.

    The campaigns are imported already; a mutant that cannot be planted in them is planted before another import.
    """
    mutant = MUTANTS[name]
    if not ready.plant(mutant):
        forget()
        install(mutant)
    campaigns: dict[str, Campaign] = import_module(CAMPAIGNS).CAMPAIGNS
    found = campaigns[mutant.campaign](mutant.found_by, mutant.first)
    beside = campaigns[mutant.machine[0]](mutant.machine[1:], 0).checks if mutant.machine else {}
    print(json.dumps([name, found.checks, found.runs, beside]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
