"""The scripts of the Spin models name a missing tool. `make model` runs the models, which takes minutes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[3] / "docs" / "model"


@pytest.mark.process
@pytest.mark.parametrize("script", ["cohort.sh", "widths.sh"])
@pytest.mark.parametrize(
    ("there", "missing"), [((), "spin gcc"), (("gcc",), "spin"), (("spin",), "gcc")], ids=["both", "spin", "gcc"]
)
def test_a_missing_tool_is_named_with_the_way_to_get_it(
    script: str, there: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    for name in there:
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    run = subprocess.run(
        [bash, str(MODELS / script)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert run.returncode == 2
    assert run.stderr.startswith(f"{script}: needs {missing}: install what is missing (Debian, Ubuntu: apt install ")
    assert run.stdout == ""
