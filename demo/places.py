"""The folders of a run: a temporary folder, and the folder of ``--keep`` for files that stay."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.errors import DemoError


@dataclass(frozen=True)
class Places:
    """The folders of a run: ``sockets``, and ``folder`` for ledger, history and log. Only ``folder`` can be kept."""

    sockets: Path
    folder: Path

    @property
    def history(self) -> Path:
        """Folder for the history segments of publisher and workers."""
        return self.folder / "history"

    @property
    def log(self) -> Path:
        """File for the stderr of the child processes."""
        return self.folder / "worker.log"


@contextmanager
def places(keep: Path | None) -> Iterator[Places]:
    """Create the folders, and remove the temporary folder at the end. Raises ``DemoError`` for an unusable folder."""
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            taken = next(keep.iterdir(), None)
        except OSError as error:
            raise DemoError(f"--keep {keep}: cannot be used ({error.strerror}): choose another folder") from None
        if taken is not None:
            raise DemoError(f"--keep {keep}: is not empty ({taken.name}): choose an empty or a new folder")
    try:
        temporary = tempfile.TemporaryDirectory(prefix="lanes-demo-", ignore_cleanup_errors=True)
    except OSError as error:
        raise DemoError(f"no temporary folder can be made ({error.strerror}): free space, or set TMPDIR") from None
    with temporary as name:
        yield Places(Path(name), keep if keep is not None else Path(name))
