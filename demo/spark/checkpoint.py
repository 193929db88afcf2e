"""The started and the finished batches of a checkpoint of Spark."""

from __future__ import annotations

from pathlib import Path


def begun(checkpoint: Path) -> set[int]:
    """Return the numbers of the batches that Spark has logged as started."""
    return _numbers(checkpoint / "offsets")


def done(checkpoint: Path) -> set[int]:
    """Return the numbers of the batches that Spark has logged as finished."""
    return _numbers(checkpoint / "commits")


def _numbers(folder: Path) -> set[int]:
    # Incomplete files and checksums have other names.
    return {int(path.name) for path in folder.glob("*") if path.name.isdecimal()}
