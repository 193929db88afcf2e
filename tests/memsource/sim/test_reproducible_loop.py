"""The same chooser and program make the same run, on every Python."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from memsource.sim.loop.choosers import Chooser, Fifo, RandomWalk, Recording, Sparse, mixed
from memsource.sim.loop.virtual import run
from tests.memsource.sim import programs

ROOT = Path(__file__).parents[3]
PROGRAMS = [programs.with_anyio, programs.with_asyncio, programs.scopes]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_seed_always_gives_the_same_run(program: Callable[[], Any]) -> None:
    littered: list[object] = []
    runs = set()
    for number in range(200):
        # The addresses differ in every run.
        littered += [bytearray(number * 13), *(object() for _ in range(number % 7))]
        outcome = run(program, chooser=RandomWalk(7))
        runs.add((outcome.digest, outcome.turns, tuple(outcome.result)))
    assert len(runs) == 1


@pytest.mark.long
@pytest.mark.parametrize("make", [RandomWalk, mixed])
def test_different_seeds_give_different_runs(make: Callable[[int], Chooser]) -> None:
    outcomes = [run(programs.everything, chooser=make(seed)) for seed in range(200)]
    assert len({tuple(outcome.result) for outcome in outcomes}) > 150
    assert len({outcome.digest for outcome in outcomes}) > 150


@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_run_repeats(seed: int) -> None:
    recording = Recording(mixed(seed))
    assert run(programs.everything, chooser=recording) == run(programs.everything, chooser=Sparse(recording.schedule))
    assert recording.schedule.deviations


@cache
def interpreters() -> list[str]:
    """Every installed Python from 3.11 on, the running one first, one of each version."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    versions = {sys.version_info.minor: sys.executable}
    for minor in range(11, 20):
        found = shutil.which(f"python3.{minor}")
        # The commands of pyenv come last, because they are scripts, and each takes as long as ten starts of Python.
        candidates = [*map(str, sorted(installed.glob(f"3.{minor}*/bin/python3"))), *([found] if found else [])]
        for program in candidates:
            if minor not in versions and _is_python(program, minor):
                versions[minor] = program
    return list(versions.values())


def _is_python(program: str, minor: int) -> bool:
    """Whether a program runs, as a Python of this version."""
    asked = [program, "-I", "-S", "-c", f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def environment(hash_seed: str) -> dict[str, str]:
    """The environment of a Python that imports this project, and compiles it once, into the project's cache."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([str(ROOT), str(Path(anyio.__file__).parents[1])])
    compiled = {"PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "pycache")}
    return {**compiled, **inherited, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}


SCRIPT = """
import hashlib, sys, types
# Packages that are compiled for another Python, and that the simulator does not need.
stub = types.ModuleType("blake3")
stub.blake3 = lambda *arguments, **options: hashlib.blake2b()
sys.modules["blake3"] = stub
from memsource.sim.loop.choosers import RandomWalk
from memsource.sim.loop.virtual import run
from tests.memsource.sim.programs import everything
for seed in (1, 1, 2):
    outcome = run(everything, chooser=RandomWalk(seed))
    print(outcome.digest, outcome.turns, outcome.result)
"""


@pytest.mark.process
@pytest.mark.parametrize("python", interpreters())
def test_every_python_repeats_a_run(python: str) -> None:
    said = set()
    for seed in "12":
        command = [python, "-W", "error", "-c", SCRIPT]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(seed))
        assert (done.returncode, done.stderr) == (0, "")
        first, again, other = done.stdout.splitlines()
        assert first == again != other
        said.add(done.stdout)
    assert len(said) == 1


def test_sets_of_futures_and_open_generators_have_one_order() -> None:
    async def main() -> tuple[list[int], list[int]]:
        futures = [asyncio.get_running_loop().create_future() for _ in range(12)]
        numbers = {future: number for number, future in enumerate(futures)}
        for future in futures:
            future.set_result(None)
        done, _ = await asyncio.wait(futures)
        generators = [numbered(number) for number in range(12)]
        for generator in generators:
            await anext(generator)
        kept.append(generators)
        return [numbers[future] for future in done], closed

    async def numbered(number: int) -> Any:
        try:
            yield number
        finally:
            closed.append(number)

    kept: list[object] = []
    runs = set()
    for number in range(30):
        kept += [bytearray(number * 13), *(object() for _ in range(number % 7))]
        closed: list[int] = []
        order, ended = run(main, chooser=Fifo()).result
        runs.add((*order, *ended))
        assert sorted(ended) == list(range(12))
    assert len(runs) == 1
