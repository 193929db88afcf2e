"""Every example runs and ends well: against a real server, or as the simulated test that it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.components import NatsServer

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted((FOLDER / "jetstream").glob("*.py"))
SIMULATED = sorted(FOLDER.glob("simulate_*"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example: Path, nats_server: NatsServer, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        env={**os.environ, "NATS_URL": nats_server.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("example", SIMULATED, ids=lambda example: example.name)
def test_simulated_example_passes(example: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(example)]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 runs, " in done.stdout


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert SIMULATED
