"""The example of a replay runs and ends well, in a Spark of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import need_java

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark" / "replay_table.py"
PANDAS = "ignore:PySpark does not yet fully support pandas:FutureWarning"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_runs(tmp_path: Path) -> None:
    need_java()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", PANDAS, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as in a plain loop" in done.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"
