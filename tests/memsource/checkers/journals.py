"""Journals for tests: written by the product's writer, and read back as plain rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import pytest

from lanes.core.types import Message, Partition, PartitionId, Reader
from lanes.history.journal import Journal, recorder
from lanes.history.parquet import JournalWriter
from lanes.history.recorder import History, Recorder
from memsource.history.journal import lines_of, open_journals
from tests.components import wait_until

PARTITION: Final = Partition(PartitionId("S", 0), cast(Reader, None))
WAIT: Final = 30.0
"""Seconds after which a journal that is not written yet is a failure."""


def message(position: int, key: bytes | None = b"k") -> Message:
    return Message(PARTITION, position, key, 10, None, None)


def opened(directory: Path, *, history: History | None = None, **options: Any) -> tuple[Journal, Recorder]:
    """An open journal and its recorder."""
    journal = Journal(directory, **({"member": "m-1"} if history is None else {}) | options)
    recording = recorder(history, journal)
    assert recording is not None
    recording.open(source="S", concurrency=4, max_in_flight=9, max_in_flight_bytes=99, now=1.0)
    return journal, recording


def handled(recording: Recorder, position: int) -> None:
    """The four rows of a message that succeeds at its first attempt."""
    one = message(position)
    recording.delivered([one], 2.0)
    recording.started(one, 2.0)
    recording.ended(one, "ok", 2.0)
    recording.acks([one], 2.0)


def ended(journal: Journal, recording: Recorder) -> None:
    """End the run, and write all rows."""
    recording.close("drained", 9.0)
    assert journal.join(WAIT)


def files(directory: Path) -> list[Path]:
    """The complete files of a directory."""
    return sorted(directory.glob("*.parquet"))


def rows(directory: Path) -> list[dict[str, Any]]:
    """The rows of the only run in a directory."""
    (run,) = open_journals(files(directory))
    return [json.loads(line.text) for line in lines_of(run)]


def table(path: Path) -> Any:
    """A file as a table, read by Arrow alone."""
    return import_module("pyarrow.parquet").read_table(path)


@contextmanager
def held_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that blocks every write of a journal until the event is set or the block ends."""
    opens = threading.Event()
    write = JournalWriter._write

    def waiting(self: JournalWriter, lines: Any) -> None:
        assert opens.wait(WAIT)
        write(self, lines)

    monkeypatch.setattr(JournalWriter, "_write", waiting)
    yield opens
    opens.set()


def reach(condition: Callable[[], object]) -> None:
    """Wait until the thread of a journal has made the condition true."""
    wait_until(lambda: bool(condition()), "the journal's thread", seconds=WAIT)
