"""The batches in a checkpoint of Spark: which were started, and which are done."""

from __future__ import annotations

from pathlib import Path


def begun(checkpoint: Path) -> set[int]:
    """The numbers of the batches that Spark has written down before it began them."""
    return _numbers(checkpoint / "offsets")


def done(checkpoint: Path) -> set[int]:
    """Those it has written down as done."""
    return _numbers(checkpoint / "commits")


def _numbers(folder: Path) -> set[int]:
    # What is being written, and the checksums, have other names.
    return {int(path.name) for path in folder.glob("*") if path.name.isdecimal()}
