"""Running a target under a coverage-guided fuzzer: atheris makes the bytes, Hypothesis makes examples of them.

Only where atheris is installed: there are no wheels of it for every platform. ``python -m fuzz.guided TARGET SECONDS``
is the fuzzer's own process, because it never returns. What it finds is kept in Hypothesis's database, so that a random
run of the same target begins with it; the inputs that reached something new, in ``.cache/fuzz``.
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
"""What the longest runs of a state machine are made of."""

SEEDS: Final = 8
SAID_LIMIT: Final = 5_000

UNCAUGHT: Final = "=== Uncaught Python exception: ==="


def available() -> bool:
    """Whether there is a fuzzer here."""
    return find_spec("atheris") is not None


def attack(name: str, seconds: float) -> tuple[int, str]:
    """How many inputs were tried, and what the fuzzer said of one that broke the invariant; empty without.

    Blocks for that long.
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
    """Attack one target. Does not return."""
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
    """Where the fuzzer begins, and what it adds to. A few bytes would be the beginning of an example and no more."""
    corpus = CACHE / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(SEEDS):
        (corpus / f"seed-{number}").write_bytes(Random(number).randbytes(INPUT_BYTES))
    return corpus


if __name__ == "__main__":
    main(*sys.argv[1:])
