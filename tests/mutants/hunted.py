"""What the campaigns find of mutants: looked for by two processes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Hunted:
    """``checks``: check -> the first thing it found; ``runs``: how many it took, 0 where they are not counted."""

    checks: dict[str, str]
    runs: int


def hunted(names: Sequence[str]) -> dict[str, Hunted]:
    """What was found of the mutants of these names. Blocks; raises ``RuntimeError`` when one could not be planted."""
    with ThreadPoolExecutor(2) as pool:
        return {name: found for part in pool.map(_hunt, (names[::2], names[1::2])) for name, found in part.items()}


def _hunt(names: Sequence[str]) -> dict[str, Hunted]:
    command = [sys.executable, "-m", "tests.mutants.hunt", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {name: Hunted(checks, runs) for name, checks, runs in map(json.loads, done.stdout.splitlines())}
