"""``docs/guides/logs.md`` shows the output of its program, and names every logger."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.docs.test_docs import blocks_of

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "guides" / "logs.md"


def lines(text: str) -> set[str]:
    """Lines of a log without their times. A line that continues another one is indented."""
    whole = re.sub(r"\n +", " ", text)
    return {re.sub(r"\d+\.\d\d s", "… s", line) for line in whole.splitlines() if " lanes: " in line}


def test_the_page_shows_what_its_program_prints() -> None:
    program, shown, *_ = blocks_of("logs.md", PAGE.read_text())
    ran = subprocess.run([sys.executable, "-c", program.text], capture_output=True, text=True, timeout=40, check=True)
    printed = re.sub(r"\nTraceback.*?\n(?=\w+ lanes)", "\n", ran.stderr, flags=re.DOTALL)
    assert len(lines(shown.text)) == 7
    assert lines(shown.text) == lines(printed)


def test_the_page_names_every_logger() -> None:
    named = set(re.findall(r"^\| `(lanes[\w.]*)` \|", PAGE.read_text(), re.MULTILINE))
    sources = [*(ROOT / "lanes").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    used = {name for path in sources for name in re.findall(r'getLogger\("(lanes[\w.]*)"\)', path.read_text())}
    assert named == used
