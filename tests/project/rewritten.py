"""Collect all tests once, in two processes, before the workers of pytest start: `python -m tests.project.rewritten`.

pytest rewrites the assertions of each test module and keeps the result in the cache of compiled modules. Without that
cache each worker rewrites all modules, which takes 20 s of CPU in each of them. Later runs do nothing: a worker
rewrites an edited module itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
DONE: Final = TESTS.parent / ".cache" / "rewritten"
"""Exists once the tests have been collected. `make clean` removes it with the cache."""

PROCESSES: Final = 2


def shares(tests: Path, processes: int) -> list[list[Path]]:
    """Distribute the folders of tests over processes, so that each has about as much text as the others."""
    sizes = {each: sum(file.stat().st_size for file in each.rglob("*.py")) for each in tests.iterdir() if each.is_dir()}
    result: list[list[Path]] = [[] for _ in range(processes)]
    for folder in sorted(sizes, key=lambda each: (-sizes[each], each.name)):
        if sizes[folder]:
            min(result, key=lambda share: sum(sizes[each] for each in share)).append(folder)
    return result


def main() -> int:
    """Collect the tests, unless that was done. The exit status is always 0: the run itself reports errors."""
    if not DONE.exists():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0"]
        running = [
            subprocess.Popen([*command, *map(str, share)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for share in shares(TESTS, PROCESSES)
        ]
        statuses = [each.wait() for each in running]
        if not any(statuses):
            DONE.parent.mkdir(exist_ok=True)
            DONE.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
