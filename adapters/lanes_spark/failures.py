"""Converts errors between ``lanes`` and Spark. An error of Spark contains the error of a worker only as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote, unquote

from lanes.errors import ConfigError, ContractError, HandlerHalted, LanesError, MessageError, SourceError

_ERRORS: Final[Mapping[str, type[LanesError]]] = {
    kind.__name__: kind for kind in (ConfigError, ContractError, HandlerHalted, LanesError, MessageError)
}
_NOTE_SAFE: Final = ",.:;()[]/=+@_-"
_NOTE: Final = re.compile(
    rf"lanes-error: ([A-Za-z]+) (passes|stays) ((?:[A-Za-z0-9~{re.escape(_NOTE_SAFE)}]|%[0-9A-F]{{2}})*)"
)
"""Pattern of a note in a worker's error. The note contains the error's class, ``retryable`` and quoted text.

The pattern expects quoted text, because Spark and py4j change line ends, quotes and backslashes. A letter of an escape
sequence may precede the note, and the start of an escape sequence may follow the note."""

_OURS: Final = re.compile(r"^(?:Caused by: |: )?(?:[\w.]+: )?lanes\.errors\.(\w+): (.+)$", re.MULTILINE)
_RAISED: Final = re.compile(r"^(?:Caused by: |: )?([A-Za-z_][\w.]*(?:Error|Exit|Exception): .+)$", re.MULTILINE)

_FILE: Final = re.compile(r"\[FAILED_READ_FILE[^\]\n]*\] Encountered error while reading file [^\n]*?\.(?=\s)")

_REMEDIES: Final[Mapping[re.Pattern[str], str]] = {
    re.compile(pattern): remedy
    for pattern, remedy in {
        r"PYTHON_VERSION_MISMATCH": "set PYSPARK_PYTHON to a Python of the driver's minor version",
        r"No module named '(?:lanes|pyarrow|anyio|blake3)": (
            "the workers' Python lacks that module: set PYSPARK_PYTHON to a Python that has lanes-runtime[spark]"
        ),
        r"Python worker exited unexpectedly": (
            "the worker was killed, often for memory, or ended itself; see the executor's stderr"
        ),
        r"CONCURRENT_STREAM_LOG_UPDATE|CONCURRENT_QUERY|another query with same id|is already active": (
            "another replay uses this checkpoint; wait until that replay has ended, or stop it"
        ),
        r"FAILED_READ_FILE": "restore the file, or remove it from the table; a replay never skips a file",
        r"Python worker failed to connect back": (
            "the worker did not start in time: the machine is too busy, or PYSPARK_PYTHON names no working Python"
        ),
        r"^(?:Py4JError|Py4JNetworkError|Connection\w*Error)$": (
            "the JVM of the driver was killed, often for memory, or ended; see its stderr, and check memory by "
            "`lanes doctor spark`"
        ),
        r"PATH_ALREADY_EXISTS": "set results_to= to a new folder",
        r"terminated with exception: assertion failed|Incomplete log file|MALFORMED_LOG": (
            "the checkpoint is damaged; restore it, or use a new checkpoint with from_= after the last finished batch"
        ),
        r"No FileSystem for scheme|ClassNotFoundException: Class org\.apache\.hadoop\.fs": (
            "Spark lacks the jars of that file system; name them in spark.jars.packages"
        ),
    }.items()
}
"""Remedies for some errors of Spark, by a pattern of the error."""

_LIMIT: Final = 500
"""Maximum number of characters of Spark's error text."""


@contextmanager
def crossing() -> Iterator[None]:
    """Add a note to each error of ``lanes`` that leaves the block. ``as_ours`` finds the note in Spark's text."""
    try:
        yield
    except LanesError as error:
        passes = "passes" if isinstance(error, SourceError) and error.retryable else "stays"
        # ``as_ours`` searches Spark's text by line, but the text of a database driver may have several lines.
        said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        text = quote(said, safe=_NOTE_SAFE, errors="replace")
        error.add_note(f"lanes-error: {type(error).__name__} {passes} {text}")
        raise


@contextmanager
def mapped_errors(topic: str) -> Iterator[None]:
    """Replace an error of Spark in the block by the error of its task, or by a ``SourceError`` that names ``topic``."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise as_ours(topic, type(error).__name__, str(error)) from error


def as_ours(topic: str, name: str, text: str) -> LanesError:
    """Return the error of ``lanes`` for an exception of Spark, whose text may contain the error of a worker.

    If ``text`` contains a note of ``crossing``, the result has the class, the text and the ``retryable`` of the
    worker's error. Only Spark's text contains the worker's traceback.

    Args:
        topic: Topic name, for an error that ``lanes`` did not raise.
        name: Class name of Spark's exception.
        text: Text of Spark's exception.

    Returns:
        The error to raise.
    """
    noted = _NOTE.findall(text)
    if noted:
        kind, passes, quoted = noted[-1]
        said = unquote(quoted, errors="replace")
        return _ERRORS[kind](said) if kind in _ERRORS else SourceError(said, retryable=passes == "passes")
    # Search for errors without a note.
    ours = _OURS.findall(text)
    if ours:
        kind, said = ours[-1]
        return _ERRORS.get(kind, SourceError)(said)
    # Use the innermost exception, which states the cause. A line of py4j only states that an exception occurred.
    raised = [line for line in _RAISED.findall(text) if not line.startswith("py4j.") and "Traceback (most" not in line]
    said = (raised or [line.strip() for line in text.splitlines() if line.strip()][:1] or ["no text"])[-1]
    if file := _FILE.search(text):
        # Use the outer exception too, because only this exception names the file.
        said = f"{file[0].strip()} {said}" if file[0].strip() not in said else said
    remedy = next((found for pattern, found in _REMEDIES.items() if pattern.search(said) or pattern.search(name)), "")
    return SourceError(f"{topic}: Spark failed: {name}: {said[:_LIMIT]}" + (f"; {remedy}" if remedy else ""))
