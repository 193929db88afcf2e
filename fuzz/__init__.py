"""Attacks targets with random input. A target is an invariant and a generator of hostile input.

The invariant is the first line of the docstring of the target's module. `python -m fuzz` runs the attacks; see
`fuzz.__main__`.
"""

from __future__ import annotations

import os
from pathlib import Path

# Set this before Hypothesis is imported. The project's cache keeps failing examples, which the next run tries first.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".cache" / "hypothesis"))
