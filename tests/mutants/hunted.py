"""The results of the campaigns for mutants, which two processes search concurrently."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.mutants import Mutant


@dataclass(frozen=True)
class Hunted:
    """The result of the search for a mutant.

    Attributes:
        checks: The first finding of each check, by the name of the check.
        runs: Number of runs.
        beside: The findings of the state machine that must find the mutant too.
    """

    checks: dict[str, str]
    runs: int
    beside: dict[str, str]

    def by(self, mutant: Mutant) -> list[str]:
        """Return the required checks that found the mutant; none if the required state machine did not find it."""
        if mutant.machine and not self.beside.keys() & set(mutant.machine[1:]):
            return []
        return sorted(self.checks.keys() & set(mutant.found_by))

    def line(self, mutant: Mutant) -> str:
        """The result as a line of a table."""
        by = self.by(mutant)
        beside = f", and by the machine {mutant.machine[0]}" if mutant.machine else ""
        found = f"by {', '.join(by)} after {self.runs} runs{beside}" if by else "NOT FOUND"
        return f"planted {mutant.name:28} {mutant.campaign:10} {found}"


def ending(code: int) -> str:
    """Describe the end of a process, by its exit code; a negative code is a signal number."""
    if code >= 0:
        return f"ended with the status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = ": something outside of it ended it, such as a lack of memory" if -code == signal.SIGKILL else ""
    return f"died of {name}{why}"


def hunted(names: Sequence[str]) -> dict[str, Hunted]:
    """Search for the mutants of these names, and return the results. Blocks; raises ``RuntimeError`` if a search
    failed."""
    with ThreadPoolExecutor(2) as pool:
        return {name: found for part in pool.map(_hunt, (names[::2], names[1::2])) for name, found in part.items()}


def _hunt(names: Sequence[str]) -> dict[str, Hunted]:
    command = [sys.executable, "-m", "tests.mutants.hunt", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        looked_for = [json.loads(line)[0] for line in done.stdout.splitlines()]
        left = ", ".join(name for name in names if name not in looked_for)
        raise RuntimeError(
            f"python -m tests.mutants.hunt {ending(done.returncode)}; not looked for: {left}\n{done.stderr}"
        )
    return {name: Hunted(*found) for name, *found in map(json.loads, done.stdout.splitlines())}
