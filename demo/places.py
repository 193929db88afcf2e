"""The folders of a run: a temporary folder, and the folder of ``--keep`` for permanent files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.errors import DemoError


@dataclass(frozen=True)
class Places:
    """The folders of a run.

    Attributes:
        sockets: Temporary folder for sockets, and for Spark's checkpoint and temporary files.
        folder: Folder for log, ledger and history, on Spark for log and journal. ``--keep`` keeps the folder.
    """

    sockets: Path
    folder: Path

    @property
    def history(self) -> Path:
        """Folder of the history segments that the publisher and the workers write."""
        return self.folder / "history"

    @property
    def log(self) -> Path:
        """File for the stderr of the workers, the serial loop and the drivers."""
        return self.folder / "worker.log"


@contextmanager
def places(keep: Path | None) -> Iterator[Places]:
    """Yield the folders of a run, and remove the temporary folder after the block.

    Raises ``DemoError`` if a folder cannot be created or read, or if ``keep`` is not empty.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            taken = next(keep.iterdir(), None)
        except OSError as error:
            raise DemoError(
                f"--keep {keep}: cannot be created or read ({error.strerror}): choose another folder"
            ) from None
        if taken is not None:
            raise DemoError(f"--keep {keep}: the folder is not empty ({taken.name}): choose an empty or a new folder")
    try:
        temporary = tempfile.TemporaryDirectory(prefix="lanes-demo-", ignore_cleanup_errors=True)
    except OSError as error:
        raise DemoError(
            f"a temporary folder cannot be created ({error.strerror}): free space on the disk, or set TMPDIR"
        ) from None
    with temporary as name:
        yield Places(Path(name), keep if keep is not None else Path(name))
