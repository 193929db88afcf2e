"""One seed gives one history, different seeds give different histories, on every installed Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.effort import runs
from tests.memsource.sim.test_reproducible_loop import environment, interpreters

ROOT = Path(__file__).parents[3]
COUNT = 60

SCRIPT = """
import hashlib, sys, types

class blake3:
    # A stub of a package that was compiled for another Python; any other hash will do.
    def __init__(self, data=b"", **options):
        self.data = data
    def hexdigest(self, length=32):
        return hashlib.shake_128(self.data).hexdigest(length)
    def digest(self, length=32):
        return hashlib.shake_128(self.data).digest(length)

stub = types.ModuleType("blake3")
stub.blake3 = blake3
sys.modules["blake3"] = stub
from tests.memsource.sim.repeats import main
main(int(sys.argv[1]))
"""


@pytest.mark.process
@pytest.mark.sliced
@pytest.mark.timeout(180)
@pytest.mark.parametrize("python", interpreters())
def test_every_python_repeats_a_world(python: str) -> None:
    count = runs(COUNT)
    command = [python, "-c", SCRIPT, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment("random"))
    assert (done.returncode, done.stderr) == (0, "")
    one, many = json.loads(done.stdout)
    assert one == 1
    assert many > count * 3 // 4
