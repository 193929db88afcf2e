"""Processes of tests that are killed, or meet limits of the system."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def run_child(prelude: str, code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run this code, behind its prelude, in a process of its own, which is told the directory."""
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code), str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
