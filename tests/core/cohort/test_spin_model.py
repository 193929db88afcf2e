"""The script of the Spin model names a missing tool. `make model` runs the model, which takes minutes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "model" / "cohort.sh"


@pytest.mark.process
@pytest.mark.parametrize(
    ("there", "missing"), [((), "spin gcc"), (("gcc",), "spin"), (("spin",), "gcc")], ids=["both", "spin", "gcc"]
)
def test_a_missing_tool_is_named_with_the_way_to_get_it(there: tuple[str, ...], missing: str, tmp_path: Path) -> None:
    for name in there:
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    run = subprocess.run(
        [bash, str(SCRIPT)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=20
    )
    assert run.returncode == 2
    assert run.stderr.startswith(f"cohort.sh: needs {missing}: install what is missing (Debian, Ubuntu: apt install ")
    assert run.stdout == ""
