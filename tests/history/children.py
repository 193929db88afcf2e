"""Child processes that tests kill, or run under limits of the system."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def run_child(prelude: str, code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run this code after its prelude in a child process, which gets the directory as its argument."""
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code), str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
