"""Attacks a target with a coverage-guided fuzzer. Hypothesis makes examples from the bytes of the fuzzer atheris.

The fuzzer needs the package atheris, which has no wheels for some platforms. ``python -m fuzz.guided TARGET SECONDS``
runs the fuzzer in a separate process, because the fuzzer never returns. Hypothesis's database keeps the failing
examples, so a random run of the same target tries them first. ``.cache/fuzz`` keeps the inputs that reached new code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from subprocess import PIPE, STDOUT
from typing import Any, Final, cast

CACHE: Final = Path(__file__).parents[1] / ".cache" / "fuzz"

INPUT_BYTES: Final = 8_192
"""Size of an input: enough for the longest runs of a state machine."""

SEEDS: Final = 8
SAID_LIMIT: Final = 5_000

UNCAUGHT: Final = "=== Uncaught Python exception: ==="


def available() -> bool:
    """Return whether the fuzzer is installed."""
    return find_spec("atheris") is not None


def attack(name: str, seconds: float) -> tuple[int, str]:
    """Attack a target for ``seconds``. Blocks.

    Returns the number of inputs, and the fuzzer's output about an input that broke the invariant. The output is empty
    if the invariant held.
    """
    command = [sys.executable, "-m", "fuzz.guided", name, str(max(1, round(seconds)))]
    done = subprocess.run(command, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", check=False)
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stdout)
    if done.returncode:
        _, mark, said = done.stdout.partition(UNCAUGHT)
        said = mark + said[:SAID_LIMIT] if mark else done.stdout[-SAID_LIMIT:]
    else:
        said = ""
    return int(executed[1]) if executed else 0, said


def main(name: str, seconds: str) -> None:
    """Attack one target. Never returns."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with atheris.instrument_imports(include=["lanes", "lanes_jetstream", "memsource"]):
        from fuzz.running import EFFORT
        from fuzz.targets import TARGETS
    tests = [cast(Any, test).hypothesis.fuzz_one_input for test in TARGETS[name].properties(EFFORT, lambda: None)]

    def test_one_input(data: bytes) -> None:
        if data:
            tests[data[0] % len(tests)](data[1:])

    corpus = _corpus(name)
    options = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES}", "-len_control=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={CACHE}/", *options], test_one_input)
    atheris.Fuzz()


def _corpus(name: str) -> Path:
    """Return the folder of the fuzzer's inputs, filled with seeds that are long enough for an example."""
    corpus = CACHE / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(SEEDS):
        (corpus / f"seed-{number}").write_bytes(Random(number).randbytes(INPUT_BYTES))
    return corpus


if __name__ == "__main__":
    main(*sys.argv[1:])
