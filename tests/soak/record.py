"""The results of the last soaks, for the table in ``docs/checkers.md``.

Each soak leaves its result in ``.cache/soak``. ``python -m tests.soak.published`` copies these results to ``last.json``
in this folder and writes the table of ``docs/checkers.md``. A soak without a new run keeps its former result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".cache" / "soak"
LAST: Final = Path(__file__).with_name("last.json")
NAMES: Final = ("simulation", "kafka", "jetstream", "postgres")


def leave(name: str, result: dict[str, Any], folder: Path = FOLDER) -> None:
    """Write the result of a soak over its former result."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def collected(folder: Path = FOLDER, last: Path = LAST) -> dict[str, dict[str, Any]]:
    """Return the newest result of each soak. Raises ``FileNotFoundError`` for a soak that has never run."""
    former: dict[str, dict[str, Any]] = json.loads(last.read_text()) if last.exists() else {}
    found = {name: folder / f"{name}.json" for name in NAMES}
    made = {name: json.loads(file.read_text()) for name, file in found.items() if file.exists()}
    for name in NAMES:
        if name not in made and name not in former:
            raise FileNotFoundError(f"no result of the soak {name!r} in {folder}; run `make soak` with that broker")
    return {name: made.get(name, former.get(name, {})) for name in NAMES}
