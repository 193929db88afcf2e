"""Random attacks: a target has an invariant, the first line of its module, and a generator of hostile input.

`python -m fuzz` runs them for a while; see `fuzz.__main__`.
"""

from __future__ import annotations

import os
from pathlib import Path

# Before Hypothesis looks: failing examples are kept in the project's own cache, and tried first the next time.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))
