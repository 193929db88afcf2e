"""What the campaigns find of mutants: looked for by two processes at once."""

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
    """``checks``: check -> the first thing it found; ``runs``: how many it took.

    ``beside``: what the state machine found that looks for it as well.
    """

    checks: dict[str, str]
    runs: int
    beside: dict[str, str]

    def by(self, mutant: Mutant) -> list[str]:
        """The checks that had to find this mutant and did; none unless its state machine has found it, too."""
        if mutant.machine and not self.beside.keys() & set(mutant.machine[1:]):
            return []
        return sorted(self.checks.keys() & set(mutant.found_by))

    def line(self, mutant: Mutant) -> str:
        """A line for a table."""
        by = self.by(mutant)
        beside = f", and by the machine {mutant.machine[0]}" if mutant.machine else ""
        found = f"by {', '.join(by)} after {self.runs} runs{beside}" if by else "NOT FOUND"
        return f"planted {mutant.name:28} {mutant.campaign:10} {found}"


def ending(code: int) -> str:
    """How a process has ended, by its exit code; below 0 it is the signal it died of."""
    if code >= 0:
        return f"ended with the status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = ": something outside of it ended it, such as a lack of memory" if -code == signal.SIGKILL else ""
    return f"died of {name}{why}"


def hunted(names: Sequence[str]) -> dict[str, Hunted]:
    """What was found of the mutants of these names. Blocks; raises ``RuntimeError`` when one could not be planted."""
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
